"""Splits one streamed answer into reasoning, text and tool calls."""

import re
from collections.abc import Collection, Sequence

from triptych.prompt.formats.base import Format, Output, Tools
from triptych.prompt.formats.events import Event
from triptych.prompt.formats.reader import NotACallError, Reader, Steps
from triptych.prompt.formats.reasoning import Reasoning, ReasoningTags

_SPACE = re.compile(r"\s+")


class AnswerParser:
    """Joined, the events of ``push`` and ``finish`` are the same however the text was split into pieces.

    A call that only markers begin may have any name. Others, and those within reasoning, are calls only of ``tools``.
    What turns out to be no call is text, and is searched for calls and tags again.
    White space around reasoning and calls is dropped."""

    def __init__(
        self,
        reasoning: Reasoning,
        tags: Sequence[ReasoningTags],
        calls: Sequence[Format],
        tools: Tools,
        special: Collection[str] = (),
    ) -> None:
        """``special`` are markers that are special tokens, which are never text."""
        self._special = special
        self._reader = Reader()
        self._out = Output(self._reader, tools)
        calls = [one for one in calls if tools or one.always]
        self._calls = {opener: one for one in calls for opener in (*one.openers, *one.first_openers)}
        self._first = [opener for one in calls for opener in one.first_openers]
        self._closes = {one.open: one.close for one in tags}
        self._opening = list(self._closes) if reasoning is Reasoning.POSSIBLE else []
        """Tags with which the answer may begin."""
        self._closing = list(self._closes.values()) if reasoning.is_open else []
        """Tags that end the reasoning. A call within it ends it, too; its tag may still come."""
        self._anywhere = [opener for one in calls for opener in one.openers]
        """What is met in any text: calls, and tags and markers that are special tokens."""
        others = [tag for tag in self._closes if tag.startswith(tuple(special))] + list(special)
        for one in sorted(others, key=len, reverse=True):
            if not any(one.startswith(known) or known.startswith(one) for known in self._anywhere):
                self._anywhere.append(one)
        if reasoning.is_open:
            self._out.begin_reasoning(continued=reasoning is Reasoning.CONTINUED)
        self._steps = self._answer()

    @property
    def in_reasoning(self) -> bool:
        """Whether the reasoning continues."""
        return self._out.in_reasoning

    @property
    def complete(self) -> int:
        """Number of complete calls."""
        return self._out.complete

    def push(self, text: str) -> list[Event]:
        """Add text and return the events that are now certain."""
        self._reader.add(text)
        next(self._steps, None)
        return self._take()

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back, at the end of the answer."""
        self._reader.end()
        next(self._steps, None)
        self._out.finish()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._out.events = self._out.events, []
        return events

    def _answer(self) -> Steps[None]:
        if not self._out.in_reasoning:
            yield from self._begin()
        while True:
            mark = yield from self._reader.stream([*self._closing, *self._anywhere], self._restore)
            if not mark:
                return
            if mark in self._calls:
                yield from self._call(mark)
            elif mark in self._closes:
                self._open(mark)
            elif mark in self._closing:
                self._closing = []
                self._out.end_reasoning()
                yield from self._begin()

    def _begin(self) -> Steps[None]:
        """Read what can only be where the text begins: reasoning, and calls of some formats."""
        if not self._first and not self._opening:
            return
        space: list[str] = []
        yield from self._reader.matching(_SPACE, space.append)
        mark = yield from self._reader.literal(*self._calls, *self._opening)
        if mark in self._closes:
            self._open(mark)
            return
        self._opening = []
        self._out.say("".join(space))
        if mark:
            yield from self._call(mark)

    def _open(self, tag: str) -> None:
        self._opening, self._closing = [], [self._closes[tag]]
        self._out.begin_reasoning()

    def _call(self, opener: str) -> Steps[None]:
        found = self._out.num_calls
        self._reader.keep()
        self._out.any_name = opener not in self._first and not self._out.in_reasoning
        try:
            yield from self._calls[opener].read(self._reader, self._out, opener)
        except NotACallError:
            if self._out.num_calls == found:
                self._restore(opener)
            self._restore(self._reader.rewind())
        self._reader.decide()
        if self._out.num_calls > found:
            self._drop(self._calls[opener].closers)

    def _restore(self, text: str) -> None:
        """Take for text what began as a call or a tag."""
        for marker in self._special:
            text = text.replace(marker, "")
        self._out.restore(text)

    def _drop(self, closers: Sequence[str]) -> None:
        """Take what ends calls for no text any more."""
        self._anywhere += [one for one in closers if one not in self._anywhere]
