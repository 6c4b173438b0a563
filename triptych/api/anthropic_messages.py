"""``/v1/messages``: Anthropic's Messages API on top of chats."""

import json
import re
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from triptych.api import chat, forwarded_chat
from triptych.api.answers import ChatAnswerer, ChoiceDelta
from triptych.api.anthropic_errors import body_of
from triptych.api.anthropic_schemas import CountTokensRequest, MessagesRequest
from triptych.api.context import ApiContext
from triptych.api.conversation import plan_conversation
from triptych.api.generation import RequestContext
from triptych.api.sse import named_event
from triptych.errors import RequestError, TriptychError
from triptych.prompt.formats.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

Block = dict[str, Any]
StreamEvent = dict[str, Any]

SIGNATURE = "unsigned"
"""Signature of reasoning, which is never encrypted; some clients send reasoning back only if it has a signature."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHAT_MESSAGE = re.compile(r"\bmessages\[(\d+)\][\w.\[\]]*")


class ContentBlocks:
    """The content blocks of one answer, built from its deltas: thinking, text and calls in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._arguments: list[str] = []
        """Pieces of the open call's input."""

    def add(self, delta: ChoiceDelta) -> Iterator[StreamEvent]:
        """Add a delta and yield the events for it."""
        for one in delta.events:
            yield from self._add(one)

    def _add(self, one: Event) -> Iterator[StreamEvent]:
        match one:
            case ReasoningDelta(text=text):
                yield from self._continue("thinking", text)
            case TextDelta(text=text):
                yield from self._continue("text", text)
            case ToolCallStart(name=name):
                yield from self._begin({"type": "tool_use", "id": _new_id("toolu"), "name": name, "input": {}})
            case ToolCallArguments(text=text):
                self._arguments.append(text)
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def finish(self) -> Iterator[StreamEvent]:
        """End the last block. An empty answer gets a block without text."""
        if not self.blocks:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end()

    def _continue(self, kind: str, text: str) -> Iterator[StreamEvent]:
        if not self.blocks or self.blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signature})
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        if self.blocks:
            yield from self._end()
        self.blocks.append(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _end(self) -> Iterator[StreamEvent]:
        block = self.blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        elif block["type"] == "tool_use":
            block["input"] = _object("".join(self._arguments))
            self._arguments = []
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _delta(self, delta: Block) -> StreamEvent:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


@dataclass
class PreparedMessage:
    """A request whose prompt is planned, and its answer as far as it has arrived."""

    request: MessagesRequest
    chat: ChatAnswerer
    content: ContentBlocks = field(default_factory=ContentBlocks)
    id: str = field(default_factory=lambda: _new_id("msg"))
    _last: ChoiceDelta | None = None

    async def full_response(self) -> dict[str, Any]:
        """Return the answer as one object (``objects.AnthropicMessage``). Raises as its deltas do."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        ended = {"content": self.content.blocks, **self._stop, "usage": self._usage}
        return self._message | ended | self.chat.generation.timeline

    async def stream_response(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events (``objects.AnthropicEvent``)."""
        started = False
        async with aclosing(self._events()) as events:
            async for one in events:
                if not started:
                    started = True
                    yield _event({"type": "message_start", "message": self._message | {"usage": self._usage}})
                    yield _event({"type": "ping"})
                yield _event(one)
        yield _event({"type": "message_delta", "delta": self._stop, "usage": self._usage})
        yield _event({"type": "message_stop"} | self.chat.generation.timeline)

    async def _events(self) -> AsyncGenerator[StreamEvent, None]:
        try:
            async with aclosing(self.chat.deltas()) as deltas:
                async for delta in deltas:
                    self._last = delta
                    for one in self.content.add(delta):
                        yield one
        except RequestError as error:
            raise _renamed(error, self.request) from error
        for one in self.content.finish():
            yield one

    @property
    def _message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.chat.generation.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @property
    def _stop(self) -> dict[str, Any]:
        assert self._last is not None
        reason, sequence = STOP_REASONS[self._last.finish_reason or "stop"], self._last.stop_reason
        if any(block["type"] == "tool_use" for block in self.content.blocks) and reason == "end_turn":
            reason = "tool_use"  # chats have "stop" for a call that the request names
        sequence = sequence if isinstance(sequence, str) else None  # not a token
        return {"stop_reason": "stop_sequence" if sequence else reason, "stop_sequence": sequence}

    @property
    def _usage(self) -> dict[str, Any]:
        """Token counts; prompt tokens that were in the KV cache are counted apart."""
        usage = self.chat.generation.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


async def prepare(api: ApiContext, request: MessagesRequest, context: RequestContext) -> PreparedMessage:
    """Plan the request's prompt. Raises as ``forwarded_chat.prepare`` does."""
    try:
        asked = request.to_chat()
        if chat.end_of_reasoning(api) is None:
            asked.thinking_token_budget = None  # Anthropic's budget is a target
        return PreparedMessage(request, await forwarded_chat.prepare(api, asked, context))
    except RequestError as error:
        raise _renamed(error, request) from error


async def count_tokens(api: ApiContext, request: CountTokensRequest, context: RequestContext) -> dict[str, int]:
    """Return ``objects.TokenCount``, with all tokens of media. Raises RequestError and ServiceError."""
    try:
        with api.lifecycle.holding_slot(context.record):
            prompt, _ = await plan_conversation(api, request.to_chat(), context)
    except RequestError as error:
        raise _renamed(error, request) from error
    return {"input_tokens": len(prompt.tokens)}


def on_error(error: TriptychError) -> bytes:
    """Return the event that ends a stream with an error."""
    return _event(body_of(error))


def _renamed(error: RequestError, request: CountTokensRequest) -> RequestError:
    """Name the request's fields in an error in place of the chat's, which may have more messages."""
    numbers = [number for number, _ in request.chat_messages()]

    def renumbered(found: re.Match[str]) -> str:
        return f"messages[{numbers[min(int(found[1]), len(numbers) - 1)]}]"

    def renamed(text: str) -> str:
        text = text.replace(".function.parameters", ".input_schema").replace(".function.", ".")
        return _CHAT_MESSAGE.sub(renumbered, text)

    error.args = tuple(renamed(one) if isinstance(one, str) else one for one in error.args)
    error.param = error.param and renamed(error.param)
    return error


def _object(text: str) -> Any:
    """Return a call's input. One that was cut off isn't valid JSON, and becomes an empty object."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _event(data: StreamEvent) -> bytes:
    return named_event(data["type"], data)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
