"""Stages of decoding: what a decoder of the tokenizers package does for all tokens, for tokens that arrive one by one.

A stage returns the tokens that no later one can change, and holds back the others. Behind a stage that joins all tokens
into one, stages see a single token, which arrives in fragments.
"""

import codecs
import re
from collections.abc import Callable

from triptych.text.partial_match import partial_match_length

REPLACEMENT = "\ufffd"
LENGTH_OF_BYTE = len("<0x00>")
_BYTE = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")

Edit = Callable[[str], str]


class TextStage:
    """Decodes a list of tokens that arrives piece by piece."""

    def push(self, tokens: list[str]) -> list[str]:
        """Add tokens. Return those that are final."""
        raise NotImplementedError

    def pause(self) -> list[str]:
        """Return what was held back, but for the start of what later tokens may complete, such as a character."""
        return []

    def finish(self) -> list[str]:
        """Return what was held back, as the end of the list decodes."""
        return []


class EachToken(TextStage):
    """Edits each token by itself."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def push(self, tokens: list[str]) -> list[str]:
        return list(map(self._edit, tokens))


class FirstAndRest(TextStage):
    """Edits the first token otherwise than the others."""

    def __init__(self, first: Edit, rest: Edit) -> None:
        self._first: Edit | None = first
        self._rest = rest

    def push(self, tokens: list[str]) -> list[str]:
        if self._first is None or not tokens:
            return list(map(self._rest, tokens))
        first, self._first = self._first, None
        return [first(tokens[0]), *map(self._rest, tokens[1:])]


class Suffixed(TextStage):
    """Replaces the suffix of words by a space, but not in the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        tokens = [*self._held, *tokens]
        final, self._held = tokens[:-1], tokens[-1:]
        return [token.replace(self._suffix, " ") for token in final]

    def pause(self) -> list[str]:
        held = self._held
        final = self.finish()
        self._held = [self._suffix for token in held if token.endswith(self._suffix)]
        return final

    def finish(self) -> list[str]:
        held, self._held = self._held, []
        return [token.replace(self._suffix, "") for token in held]


class Collapsed(TextStage):
    """Edits each token that differs from the one before; drops the others."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._previous: str | None = None

    def push(self, tokens: list[str]) -> list[str]:
        final = []
        for token in tokens:
            if token != self._previous:
                final.append(self._edit(token))
            self._previous = token
        return [token for token in final if token]


class ByteRuns(TextStage):
    """Decodes runs of tokens that stand for bytes. A run is text if all of it is UTF-8, else one U+FFFD per byte."""

    def __init__(self) -> None:
        self._begin_run()

    def _begin_run(self, data: bytes = b"") -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._text: list[str] = []
        self._length = 0
        self._is_broken = False
        self._last = b""
        """The last bytes, up to the three that an incomplete character can have."""
        for byte in data:
            self._add(bytes([byte]))

    def push(self, tokens: list[str]) -> list[str]:
        final = []
        for token in tokens:
            if (byte := byte_of(token)) is not None:
                final += self._add(byte)
            else:
                if self._length:
                    final += self.finish()
                final.append(token)
        return final

    def _add(self, byte: bytes) -> list[str]:
        self._length += 1
        self._last = (self._last + byte)[-3:]
        if self._is_broken:
            return [REPLACEMENT]
        try:
            self._text.append(self._utf8.decode(byte))
        except UnicodeDecodeError:
            self._is_broken = True
            return [REPLACEMENT] * self._length
        return []

    def pause(self) -> list[str]:
        final = [] if self._is_broken or not self._length else ["".join(self._text)]
        self._begin_run(incomplete_end(self._last))
        return final

    def finish(self) -> list[str]:
        if self._is_broken or not self._length:
            final = []
        else:
            is_complete = not self._utf8.getstate()[0]
            final = ["".join(self._text)] if is_complete else [REPLACEMENT] * self._length
        self._begin_run()
        return final


class Bytes(TextStage):
    """Joins the bytes that tokens spell, and decodes them."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(spelled_bytes(token)) for token in tokens]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class Stripped(TextStage):
    """Strips a character from both ends of a token that arrives in fragments, a number of times at most."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start, self._stop = start, stop
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        if self._start and text:
            rest = text.lstrip(self._content)
            cut = min(self._start, len(text) - len(rest))
            self._start = 0 if rest else self._start - cut
            text = text[cut:]
        if not self._stop:
            return [text]
        text = self._held + text
        cut = len(text) - min(self._stop, len(text) - len(text.rstrip(self._content)))
        self._held = text[cut:]
        return [text[:cut]]


class Replaced(TextStage):
    """Replaces a string in a token that arrives in fragments."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        *before, rest = (self._held + "".join(tokens)).split(self._old)
        cut = len(rest) - partial_match_length(rest, [self._old])
        self._held = rest[cut:]
        return [self._new.join([*before, rest[:cut]])]

    def pause(self) -> list[str]:
        return self.finish()

    def finish(self) -> list[str]:
        held, self._held = self._held, ""
        return [held]


class Whole(TextStage):
    """Edits a token that arrives in fragments once it is complete. One of more than ``longest`` characters, if that is
    given, is left as it is."""

    def __init__(self, edit: Edit, longest: int | None) -> None:
        self._edit = edit
        self._longest = longest
        self._held: list[str] = []
        self._length = 0

    def push(self, tokens: list[str]) -> list[str]:
        self._held += tokens
        self._length += sum(map(len, tokens))
        if self._longest is None or self._length <= self._longest:
            return []
        held, self._held = self._held, []
        return held

    def pause(self) -> list[str]:
        return self.finish()

    def finish(self) -> list[str]:
        held, self._held = "".join(self._held), []
        is_long = self._longest is not None and self._length > self._longest
        return [held if is_long else self._edit(held)]


def incomplete_end(data: bytes) -> bytes:
    """Return the bytes at the end that begin a character."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(data)
    return utf8.getstate()[0]


def byte_of(token: str) -> bytes | None:
    """Return the byte that a token such as ``<0x0A>`` stands for."""
    if len(token) != LENGTH_OF_BYTE or not (found := _BYTE.fullmatch(token)):
        return None
    return bytes([int(found[1], 16)])


def _byte_alphabet() -> dict[str, int]:
    """Return the characters by which byte-level vocabularies spell bytes: printable ones as themselves, the others as
    the characters from 256 on, in order (as in GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_TO_LATIN = {code: chr(256) for code in range(256)} | {ord(letter): chr(byte) for letter, byte in _ALPHABET.items()}
"""Translates the alphabet's characters to those of Latin 1, and Latin 1's others to one that it lacks."""


def spelled_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary. One with other characters than its alphabet is text."""
    try:
        return token.translate(_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
