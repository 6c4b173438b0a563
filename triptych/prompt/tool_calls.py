"""Finds tool calls in what a model says, in the format of Hermes and Qwen::

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from triptych.prompt.partial_match import partial_match_length

CALL, END_CALL = "<tool_call>", "</tool_call>"
_MAX_HEADER = 4096
"""Characters within which a call's name and the beginning of its arguments are looked for while it comes."""
_MAX_CALL = 65_536
"""Characters of a call whose arguments couldn't be told as they came."""
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class TextDelta:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; the ``index``-th of its answer, from 0 on."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments: JSON, as the model wrote it."""

    index: int
    text: str


Event = TextDelta | ToolCallStart | ToolCallArguments


class ToolCallParser:
    """One answer's text, in pieces. Arguments are told as they come. What isn't a call of one of ``names`` is text,
    tags included. White space beside a call is no text. Joined, the events are the same however the text was split."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._calls = 0
        self._held = ""
        self._space = ""
        """White space before the tag of the call that is being read."""
        self._after_call = False
        self._in_call = False
        self._arguments: _ObjectEnd | None = None
        self.complete = 0
        """How many calls have come to their end."""

    def push(self, text: str) -> list[Event]:
        """What is now certain."""
        self._held += text
        events: list[Event] = []
        while (found := self._next()) is not None:
            events += found
        return events

    def finish(self) -> list[Event]:
        """What was held back: nothing more comes."""
        held, self._held = self._held, ""
        if self._arguments is not None:
            self.complete += self._arguments.found
            return []
        if self._in_call:
            return self._whole(held) or [TextDelta(self._space + CALL + held)]
        held = held.lstrip() if self._after_call else held
        return [TextDelta(held)] if held else []

    def _next(self) -> list[Event] | None:
        """The next events; None when more text is needed."""
        if self._arguments is not None:
            return self._in_arguments(self._arguments)
        return self._in_header() if self._in_call else self._in_text()

    def _in_text(self) -> list[Event] | None:
        text = self._held.lstrip() if self._after_call else self._held
        before, tag, after = text.partition(CALL)
        certain = before if tag else before[: len(before) - partial_match_length(before, (CALL,))]
        said = certain.rstrip()
        if tag:
            self._held, self._in_call, self._space = after, True, certain[len(said) :]
        else:
            self._held = text[len(said) :]
            if not said:
                return None
        self._after_call = self._after_call and not said
        return [TextDelta(said)] if said else []

    def _in_header(self) -> list[Event] | None:
        if match := _HEADER.match(self._held, 0, _MAX_HEADER):
            name = _string(match[1])
            if name in self._names:
                self._held = self._held[match.end() :]
                self._arguments = _ObjectEnd()
                return [ToolCallStart(self._begin(), name)]
        call, tag, _ = self._held[:_MAX_CALL].partition(END_CALL)
        if not tag and len(self._held) < _MAX_CALL:
            return None
        self._in_call = False
        if not tag:
            return [TextDelta(self._space + CALL)]
        self._held = self._held[len(call) + len(tag) :]
        events = self._whole(call)
        self._after_call = bool(events)
        return events or [TextDelta(self._space + CALL + call + END_CALL)]

    def _in_arguments(self, end: "_ObjectEnd") -> list[Event] | None:
        """Their text up to the brace that ends them; what follows, up to the tag, says nothing."""
        if not end.found:
            length = end.push(self._held)
            told, self._held = self._held[:length], self._held[length:]
            return [ToolCallArguments(self._calls - 1, told)] if told else None
        _, tag, after = self._held.partition(END_CALL)
        if not tag:
            self._held = self._held[max(0, len(self._held) - len(END_CALL)) :]
            return None
        self._held, self._in_call, self._arguments, self._after_call = after, False, None, True
        self.complete += 1
        return []

    def _whole(self, text: str) -> list[Event]:
        """The events of a call that is there as a whole, whatever the order of its fields; none if it isn't one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        index = self._begin()
        self.complete += 1
        return [ToolCallStart(index, call["name"]), ToolCallArguments(index, told)]

    def _begin(self) -> int:
        self._calls += 1
        return self._calls - 1


class _ObjectEnd:
    """Finds the brace that ends a JSON object, in pieces."""

    def __init__(self) -> None:
        self.found = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """How many characters belong to the object: all of them, unless it ends here."""
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.found = True
                    return place + 1
        return len(text)


def _string(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""
