"""Limit on the number of values in a JSON text, checked before it is parsed."""

import re

from triptych.errors import PayloadTooLarge

MAX_VALUES = 20_000
"""Maximum members of objects and arrays in a body, without numbers in arrays. Pydantic reports each invalid value as an
error of its own, so a body with millions of them would block the event loop for minutes."""

_VALUE = re.compile(rb'(?:[^"{\[,]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"|,(?=[ \t\r\n]{0,8}[-0-9]))*+[{\[,]', re.DOTALL)
"""Matches up to the next bracket or comma that is neither in a string nor before a number."""


def check_num_values(*texts: str | bytes) -> None:
    """Raise PayloadTooLarge if the texts together have more than ``MAX_VALUES`` values."""
    encoded = [text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass") for text in texts]
    if sum(text.count(mark) for text in encoded for mark in (b"{", b"[", b",")) <= MAX_VALUES:
        return
    count = 0
    for text in encoded:
        position = 0
        while match := _VALUE.match(text, position):
            position = match.end()
            count += 1
            if count >= MAX_VALUES:
                raise PayloadTooLarge(f"the body has more than {MAX_VALUES} values")
