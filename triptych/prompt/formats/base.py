"""What all formats share."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from triptych.prompt.formats.reader import NotACallError, Reader, Steps

_MAX_HELD_SPACE = 1024
"""Limit in characters on white space that is held back because it is dropped before a call."""

_NAME = re.compile(r"[\w.:/-]{1,64}")

Tools = Mapping[str, Any]
"""Names of the tools that an answer may call, and the JSON schemas of their parameters (None: any)."""


class Trimmed:
    """Text as it becomes certain, without white space: that at its start if ``at_start`` is set, that at its end if
    ``at_end`` is."""

    def __init__(self, *, at_start: bool = False, at_end: bool = True) -> None:
        self._at_start = at_start
        self._at_end = at_end
        self._space = ""

    def push(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        text = self._space + text
        held = min(len(text) - len(text.rstrip()), _MAX_HELD_SPACE) if self._at_end else 0
        self._space = text[len(text) - held :]
        return text[: len(text) - held]

    def take_space(self) -> str:
        """Return the white space that is held back."""
        space, self._space = self._space, ""
        return space


class Output:
    """The events of one answer, and what its text is at the moment."""

    def __init__(self, reader: Reader, tools: Tools) -> None:
        self.tools = tools
        self.events: list[Event] = []
        self.in_reasoning = False
        self.any_name = False
        """Whether calls of other names than those of tools are calls, too."""
        self.complete = 0
        """Number of complete calls."""
        self._reader = reader
        self.parameters: Any = None
        """Schema of the parameters of the call that was begun last."""
        self._text = Trimmed(at_end=bool(tools))
        self._reasoning = Trimmed()
        self.num_calls = 0

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def say(self, text: str) -> None:
        """Add text. White space at its end is held back until more text comes."""
        if text := self._text.push(text):
            self.events.append(TextDelta(text))

    def reason(self, text: str) -> None:
        """Add reasoning. White space at its ends is dropped."""
        if text := self._reasoning.push(text):
            self.events.append(ReasoningDelta(text))

    def begin_reasoning(self, *, continued: bool = False) -> None:
        self.in_reasoning = True
        self._reasoning = Trimmed(at_start=not continued)

    def end_reasoning(self) -> None:
        """White space that follows is dropped, too."""
        self.in_reasoning = False
        self._text = Trimmed(at_start=True, at_end=bool(self.tools))

    def restore(self, text: str) -> None:
        """Add what began as a call and isn't one."""
        if self.in_reasoning:
            self.reason(text)
        else:
            self.say(text)

    def finish(self) -> None:
        """Add white space at the end of the text."""
        if space := self._text.take_space():
            self.events.append(TextDelta(space))

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, name: str) -> None:
        """Begin a call. White space around it is dropped, and reasoning ends. Raises NotACallError for a name that may
        not be called."""
        if name not in self.tools and not (self.any_name and _NAME.fullmatch(name)):
            raise NotACallError
        self._reader.decide()
        self.parameters = self.tools.get(name)
        self.in_reasoning = False
        self._text = Trimmed(at_start=True)
        self.events.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Add to the call's arguments."""
        if text:
            self.events.append(ToolCallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """The call's arguments are complete."""
        self.complete += 1


class Format(ABC):
    """How models of some families call tools."""

    families: ClassVar[str]
    """For the documentation."""
    parsers: ClassVar[tuple[str, ...]]
    """Names of vLLM's parsers for it."""
    openers: ClassVar[tuple[str, ...]] = ()
    """Texts that calls begin with."""
    first_openers: ClassVar[tuple[str, ...]] = ()
    """Texts that calls begin with only where an answer's text begins, because text could have them, too."""
    form: ClassVar[CallForm]
    """How grammars and histories write calls."""
    text_begin: ClassVar[str] = ""
    """What the text of an answer begins with where a grammar demands its format."""
    always: ClassVar[bool] = False
    """Whether answers without calls are in this format, too."""
    mark: ClassVar[str] = ""
    """What a call always has, by which the format is told from another that is read alike."""
    closers: ClassVar[tuple[str, ...]] = ()
    """Texts within calls or at their ends, which are no text of an answer when they are special tokens."""

    def form_for(self, special: Collection[str]) -> CallForm:
        """Return how calls are written with a vocabulary that has these markers as special tokens."""
        return self.form

    def call_id(self, given: str, name: str, number: int) -> str:
        """Return the id of a call of the history as the format has it. ``number`` is its place in the conversation."""
        return given

    @abstractmethod
    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        """Read what follows an opener, which has been consumed. Raises NotACallError if it begins no call."""
