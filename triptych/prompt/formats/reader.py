"""Reads text that arrives in pieces as if it were whole.

A format is read by generators that yield when they need more text. What they consume never depends on where the text
was cut, so neither does what they find."""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields when it needs more text, and returns a T."""

MAX_UNDECIDED = 65_536
"""Limit in characters on text that may still turn out to be no call."""
MAX_REREAD = 16 * MAX_UNDECIDED
"""Limit in characters on what is read again in an answer because it turned out to be no call."""
MAX_NAME = 256
"""Limit in characters on a tool's name and what is around it."""

_SPACE = re.compile(r"\s*")


class NotACallError(Exception):
    """Text that began as a call isn't one."""


@dataclass(frozen=True)
class Marks:
    """Texts that are searched for at once. None may be the beginning of another."""

    texts: tuple[str, ...]

    @cached_property
    def _any(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.texts)) or "(?!)")

    @cached_property
    def _first(self) -> re.Pattern[str]:
        return re.compile(f"[{re.escape(''.join({text[0] for text in self.texts}))}]" if self.texts else "(?!)")

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.texts), default=1)

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._any.search(text, start)

    def certain(self, text: str, start: int) -> int:
        """Return the end of what can't be the beginning of a mark; ``text`` has no whole one."""
        for match in self._first.finditer(text, max(start, len(text) - self._longest + 1)):
            rest = text[match.start() :]
            if any(mark.startswith(rest) for mark in self.texts):
                return match.start()
        return len(text)


@lru_cache(maxsize=256)
def marks(texts: tuple[str, ...]) -> Marks:
    """Return the marks, compiled once."""
    return Marks(texts)


class Reader:
    """The text of an answer. It holds no more than what can't be consumed yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None
        self._num_kept = self._num_reread = 0
        self._max_kept = MAX_UNDECIDED

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    # ── what was consumed ────────────────────────────────────────────────────────────────────────────────────────

    def keep(self) -> None:
        """Keep what is consumed from here on, until ``decide``."""
        self._kept, self._num_kept, self._max_kept = [], 0, MAX_UNDECIDED

    def decide(self) -> str | None:
        """Return what was kept, None if nothing is being kept, and keep nothing any more."""
        kept, self._kept = self._kept, None
        return None if kept is None else "".join(kept)

    def rewind(self) -> str:
        """Go back to where ``keep`` was called, so that what was kept is read again. Return what isn't: all that was
        kept, once too much of the answer would have been read again."""
        kept = self.decide() or ""
        self._num_reread += len(kept)
        if self._num_reread > MAX_REREAD:
            return kept
        self._text, self._at = kept + self._text[self._at :], 0
        return ""

    def _consume(self, end: int) -> str:
        """Consume the text up to a place in it. Raises NotACallError when more is kept than may be."""
        if self._kept is None:
            text, self._at = self._text[self._at : end], end
            return text
        last = min(end, self._at + self._max_kept - self._num_kept)
        text, self._at = self._text[self._at : last], last
        self._kept.append(text)
        self._num_kept += len(text)
        if last < end:
            raise NotACallError
        return text

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def more(self) -> Steps[bool]:
        """Wait for more text. Return False if there is none."""
        length = len(self._text) - self._at
        while len(self._text) - self._at == length:
            if self._ended:
                return False
            yield
        return True

    def next(self) -> Steps[str]:
        """Return the next character without consuming it; empty at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def skip(self, length: int) -> str:
        """Consume and return characters that have arrived."""
        return self._consume(self._at + length)

    def space(self) -> Steps[None]:
        """Consume white space."""
        yield from self.matching(_SPACE, lambda _: None)

    def matching(self, pattern: re.Pattern[str], emit: Callable[[str], object]) -> Steps[None]:
        """Consume what matches a pattern that takes any number of characters of a kind."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match[0]:
                emit(self._consume(match.end()))
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def literal(self, *literals: str) -> Steps[str]:
        """Consume and return the one of these that comes next, the longest; empty if none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, literals))]
            if not self._ended and any(one.startswith(rest) and one != rest for one in literals if one):
                yield from self.more()
                continue
            found = max((one for one in literals if rest.startswith(one)), key=len, default="")
            self._consume(self._at + len(found))
            return found

    def stream(self, ends: Sequence[str], emit: Callable[[str], object]) -> Steps[str]:
        """Consume text up to one of ``ends``, and that. Pass on the text as it becomes certain. Return what ended it;
        empty at the end of the answer."""
        any_end = marks(tuple(ends))
        while True:
            match = any_end.search(self._text, self._at)
            certain = match.start() if match else len(self._text)
            if match is None and not self._ended:
                certain = any_end.certain(self._text, self._at)
            if text := self._consume(certain):
                emit(text)
            if match is not None:
                return self._consume(match.end())
            if not (yield from self.more()) and self._at == len(self._text):
                return ""

    def until(self, *ends: str) -> Steps[tuple[str, str]]:
        """Consume text up to one of ``ends``, and that. Return both; the second is empty at the end of the answer."""
        parts: list[str] = []
        end = yield from self.stream(ends, parts.append)
        return "".join(parts), end

    def name(self, *ends: str) -> Steps[tuple[str, str]]:
        """Consume a tool's name up to one of ``ends``, and that. Return both. Raises NotACallError for text that is
        too long for a name, or that the answer ends in."""
        self._max_kept = min(MAX_UNDECIDED, self._num_kept + MAX_NAME)
        name, end = yield from self.until(*ends)
        self._max_kept = MAX_UNDECIDED
        if not end:
            raise NotACallError
        return name.strip(), end

    def expect(self, *literals: str) -> Steps[str]:
        """Consume the one of these that must come next, after white space. Raises NotACallError if none does."""
        yield from self.space()
        found = yield from self.literal(*literals)
        if not found and "" not in literals:
            raise NotACallError
        return found
