"""How many values a JSON text has: counted before anything is made of them."""

import re

from triptych.errors import PayloadTooLarge

MAX_VALUES = 20_000
"""Members of objects and arrays in a body; numbers in arrays don't count. What is wrong with each of millions would be
told in as many errors, which takes pydantic minutes."""

_VALUE = re.compile(rb'(?:[^"{\[,]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"|,(?=[ \t\r\n]{0,8}[-0-9]))*+[{\[,]', re.DOTALL)
"""Up to the next bracket or comma that isn't within a string, nor before a number."""


def check_values(*texts: str | bytes) -> None:
    """Raises PayloadTooLarge for more than ``MAX_VALUES`` values in all texts together."""
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
