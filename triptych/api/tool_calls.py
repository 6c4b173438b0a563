"""Tool calls of a chat's answer, in the form that clients get: functions, and custom tools, whose input is text."""

import secrets
from collections.abc import Iterable, Set
from typing import Any

from triptych.api.custom_input import CustomInput
from triptych.prompt.formats.events import Event, ToolCallArguments, ToolCallStart


class ToolCalls:
    """The calls of one message, built from the answer's events."""

    def __init__(self, custom: Set[str]) -> None:
        """``custom`` are the names of custom tools. The model calls functions that stand for them."""
        self.whole: list[dict[str, Any]] = []
        """The calls so far."""
        self._custom = custom
        self._input: CustomInput | None = None
        """The input of the last call, if that is of a custom tool."""

    def add(self, events: Iterable[Event], *, ended: bool) -> list[dict[str, Any]]:
        """Add events, and return what they add to each call, as chunks have it. ``ended`` is for the last ones."""
        changed: dict[int, dict[str, Any]] = {}
        for one in events:
            if isinstance(one, ToolCallStart):
                self._end(changed)
                self._begin(one, changed)
            elif isinstance(one, ToolCallArguments):
                self._extend(one.text if self._input is None else self._input.push(one.text), changed)
        if ended:
            self._end(changed)
        return list(changed.values())

    def _begin(self, start: ToolCallStart, changed: dict[int, dict[str, Any]]) -> None:
        is_custom = start.name in self._custom
        self._input = CustomInput() if is_custom else None
        kind, member = ("custom", "input") if is_custom else ("function", "arguments")
        head = {"id": new_call_id(), "type": kind}
        self.whole.append(head | {kind: {"name": start.name, member: ""}})
        changed[len(self.whole) - 1] = {"index": len(self.whole) - 1} | head | {kind: {"name": start.name, member: ""}}

    def _extend(self, text: str, changed: dict[int, dict[str, Any]]) -> None:
        """Add text to the last call."""
        if not text:
            return
        number = len(self.whole) - 1
        kind = self.whole[number]["type"]
        member = "input" if kind == "custom" else "arguments"
        delta = changed.setdefault(number, {"index": number, kind: {member: ""}})
        for call in (self.whole[number], delta):
            call[kind][member] += text

    def _end(self, changed: dict[int, dict[str, Any]]) -> None:
        """End the last call: now a custom tool's input is known that has another form."""
        if self._input is not None:
            self._extend(self._input.finish(), changed)
        self._input = None


def new_call_id() -> str:
    """Return a random id for a tool call."""
    return f"call_{secrets.token_hex(12)}"
