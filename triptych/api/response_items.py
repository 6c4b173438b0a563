"""Output items of the Responses API, and the events that report their changes."""

import bisect
import itertools
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from triptych.api.answers import ChoiceDelta
from triptych.api.custom_input import CustomInput
from triptych.api.response_tools import ToolTarget
from triptych.api.tool_calls import new_call_id
from triptych.prompt.formats.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]
"""An event's type and its members without the sequence number."""

REASONING, MESSAGE, CALL, CUSTOM_CALL = "reasoning", "message", "function_call", "custom_tool_call"
_PREFIXES = {REASONING: "rs", MESSAGE: "msg", CALL: "fc", CUSTOM_CALL: "ctc"}


class OutputItems:
    """The items of one answer, built from its deltas: reasoning, then text and calls in order."""

    def __init__(self, targets: Mapping[str, ToolTarget] | None = None) -> None:
        """``targets`` are the tools that functions of other names stand for."""
        self.items: list[Item] = []
        self._targets = targets or {}
        self._input = CustomInput()
        """The input of the open item, if that is a call of a custom tool."""
        self._open: Item | None = None
        self._logprobs: list[msgspec.Raw] = []

    def add(self, delta: ChoiceDelta) -> Iterator[Event]:
        """Add a delta and yield the events for it."""
        self._logprobs += delta.logprobs
        for one in delta.events:
            if isinstance(one, ReasoningDelta):
                yield from self._append(REASONING, one.text)
                self._logprobs = list(delta.logprobs)  # only text has them
            elif isinstance(one, TextDelta):
                yield from self._append(MESSAGE, one.text)
            elif isinstance(one, ToolCallStart):
                yield from self._begin_call(one.name)
            elif isinstance(one, ToolCallArguments) and self._open is not None:
                self._logprobs = list(delta.logprobs)
                yield from self._add_arguments(self._open, one.text)

    def finish(self, status: str) -> Iterator[Event]:
        """End the last item with that status. An empty answer gets one message without text."""
        if not self.items:
            yield from self._append(MESSAGE, "")
        yield from self._end(status)

    def _append(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            logprobs = entries_of(text, self._logprobs) if kind == MESSAGE else []
            yield from self._begin(kind, {"role": "assistant"} if kind == MESSAGE else {"summary": []})
            self._logprobs = logprobs
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        place = self._place() | {"content_index": 0, "delta": text}
        if kind == REASONING:
            yield "response.reasoning_text.delta", place
            return
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        yield "response.output_text.delta", place | {"logprobs": logprobs}

    def _begin_call(self, function: str) -> Iterator[Event]:
        target = self._targets.get(function, ToolTarget(function))
        members = {"call_id": new_call_id(), "name": target.name}
        if target.namespace is not None:
            members["namespace"] = target.namespace
        kind, argument = (CUSTOM_CALL, "input") if target.is_custom else (CALL, "arguments")
        yield from self._begin(kind, members | {argument: ""})
        self._input = CustomInput()

    def _add_arguments(self, call: Item, text: str) -> Iterator[Event]:
        if call["type"] == CALL:
            call["arguments"] += text
            yield "response.function_call_arguments.delta", self._place() | {"delta": text}
        elif added := self._input.push(text):
            yield "response.custom_tool_call_input.delta", self._place() | {"delta": added}

    def _begin(self, kind: str, members: Item) -> Iterator[Event]:
        yield from self._end("completed")
        item: Item = {
            "id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}",
            "type": kind,
            "status": "in_progress",
        } | members
        if kind in (REASONING, MESSAGE):
            item["content"] = []
        self.items.append(item)
        self._open = item
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(item)}
        if kind in (REASONING, MESSAGE):
            part: Item = {"text": "", "type": "reasoning_text"}
            if kind == MESSAGE:
                part = {"text": "", "type": "output_text", "annotations": [], "logprobs": []}
            item["content"] = [part]
            yield "response.content_part.added", self._place() | {"content_index": 0, "part": dict(part)}

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        place, item, self._open = self._place(), self._open, None
        item["status"] = status
        if item["type"] == CALL:
            call = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", place | call
        elif item["type"] == CUSTOM_CALL:
            if rest := self._input.finish():
                yield "response.custom_tool_call_input.delta", place | {"delta": rest}
            item["input"] = self._input.text
            yield "response.custom_tool_call_input.done", place | {"input": item["input"]}
        else:
            part = item["content"][0]
            kind, more = "reasoning_text", {}
            if item["type"] == MESSAGE:
                kind, more = "output_text", {"logprobs": part["logprobs"]}
            yield f"response.{kind}.done", place | {"content_index": 0, "text": part["text"]} | more
            yield "response.content_part.done", place | {"content_index": 0, "part": dict(part)}
        self._logprobs = []
        yield "response.output_item.done", {"output_index": place["output_index"], "item": _copy(item)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


class _TokenEntry(msgspec.Struct):
    """What is read of a token's entry."""

    bytes: list[int]


def entries_of(text: str, entries: list[msgspec.Raw]) -> list[msgspec.Raw]:
    """Return the entries from the token on in which the text begins: those before it are of hidden tokens, such as
    the end of reasoning. All of them if the text isn't in their bytes."""
    pieces = [bytes(msgspec.json.decode(entry, type=_TokenEntry).bytes) for entry in entries]
    begin = b"".join(pieces).rfind(text.encode())
    ends = list(itertools.accumulate(map(len, pieces)))
    return entries[bisect.bisect_right(ends, begin) :]


def _copy(item: Item) -> Item:
    """Return a snapshot, because events are encoded later."""
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
