"""Parses tool calls in a model's output, in the format of Hermes and Qwen::

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
"""Characters within which a call's name and the start of its arguments must appear for it to be streamed."""
_MAX_CALL = 65_536
"""Limit in characters on a call that can't be streamed and is parsed as a whole."""
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class TextDelta:
    """Text outside of tool calls."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Start of a tool call."""

    index: int
    """The call's index in the answer, from 0."""
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """Next piece of a call's arguments: JSON, as the model wrote it."""

    index: int
    text: str


Event = TextDelta | ToolCallStart | ToolCallArguments


class ToolCallParser:
    """Parses one streamed answer into events. Arguments are streamed as they arrive. Anything but a call of one of
    ``names`` is text, tags included; white space around a call is dropped. Joined, the events are the same however the
    text was split into pieces."""

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
        """Number of complete calls."""

    def push(self, text: str) -> list[Event]:
        """Add text and return the events that are now certain."""
        self._held += text
        events: list[Event] = []
        while (found := self._next()) is not None:
            events += found
        return events

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back, at the end of the answer."""
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
        """Read arguments up to their closing brace. Anything between that and the closing tag is ignored."""
        if not end.found:
            length = end.push(self._held)
            ready, self._held = self._held[:length], self._held[length:]
            return [ToolCallArguments(self._calls - 1, ready)] if ready else None
        _, tag, after = self._held.partition(END_CALL)
        if not tag:
            self._held = self._held[max(0, len(self._held) - len(END_CALL)) :]
            return None
        self._held, self._in_call, self._arguments, self._after_call = after, False, None, True
        self.complete += 1
        return []

    def _whole(self, text: str) -> list[Event]:
        """Return the events of a complete call, with its fields in any order; none if it isn't a valid call."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        index = self._begin()
        self.complete += 1
        return [ToolCallStart(index, call["name"]), ToolCallArguments(index, text)]

    def _begin(self) -> int:
        self._calls += 1
        return self._calls - 1


class _ObjectEnd:
    """Finds the closing brace of a JSON object in streamed text."""

    def __init__(self) -> None:
        self.found = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """Return how many characters belong to the object: all of them, unless it ends here."""
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
