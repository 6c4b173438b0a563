"""The input of a custom tool, read from the streamed arguments of the function that stands for it."""

import json
import re

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_BEGIN = 256
"""Characters within which the input must begin to be streamed."""
_LOW = r"(?:\\u[0-9a-fA-F]{4}|(?=\\[^u])|(?=[^\\]))"
_WHOLE = re.compile(rf'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\u[dD][89abAB][0-9a-fA-F]{{2}}{_LOW})*')
"""JSON's escapes as far as they are complete; the halves of a surrogate pair belong together."""


class CustomInput:
    """Decodes ``{"input": "…"}`` as it arrives. Other arguments are the input as they are."""

    def __init__(self) -> None:
        self.text = ""
        """The input so far."""
        self._held = ""
        self._in_string = self._ended = False

    def push(self, text: str) -> str:
        """Add a piece of the arguments and return what it adds to the input."""
        self._held += text
        if self._ended:
            return ""
        if not self._in_string:
            if (begin := _BEGIN.match(self._held, 0, _MAX_BEGIN)) is None:
                return ""
            self._held, self._in_string = self._held[begin.end() :], True
        whole = _WHOLE.match(self._held)
        assert whole is not None  # it matches nothing, too
        added = _decoded(whole[0])
        self._held = self._held[whole.end() :]
        self._ended = self._held.startswith('"')
        self.text += added
        return added

    def finish(self) -> str:
        """Return the rest of the input, when the arguments have ended: all of them if they have another form."""
        if self._in_string:
            return ""
        try:
            given = json.loads(self._held)
        except (ValueError, RecursionError):
            given = None
        named = given.get("input") if isinstance(given, dict) else None
        self.text = named if isinstance(named, str) else self._held
        return self.text


def _decoded(escaped: str) -> str:
    try:
        text = str(json.loads(f'"{escaped}"', strict=False))
    except ValueError:
        return escaped
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
