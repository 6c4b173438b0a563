"""Chats in the form of other APIs, answered by this service or by a language server before which it stands.
What that answers becomes the deltas that answers are made from here."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from triptych.api import chat, gateway
from triptych.api.answers import ChatAnswerer, ChoiceDelta
from triptych.api.context import ApiContext
from triptych.api.conversation import message_of, template_variables
from triptych.api.fields import JsonObjectFormat, JsonSchemaFormat, TextFormat
from triptych.api.generation import RequestContext
from triptych.api.media_parts import media_parts
from triptych.api.schemas import ChatCompletionRequest
from triptych.errors import InstanceLost
from triptych.gateway.answers import (
    AnswerTokenEntry,
    CalledFunction,
    ChatAnswer,
    ServerChatChoice,
    ServerMessage,
    TokenUsage,
)
from triptych.gateway.relay import AnswerPart
from triptych.prompt.formats.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "repetition": "stop"}
"""Why answers end, by vLLM's reasons. With others, they are no answers."""
MADE_HERE = {
    "model", "messages", "tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs",
    "timeout",
}  # fmt: skip
"""Fields of a chat that are translated for a server."""
FORMAT_NAME = "answer"
"""The name of a schema that the request gives none."""
OWN = {"thinking_token_budget", "separate_reasoning", "mm_processor_kwargs"}
"""Fields that a server doesn't get. A budget of reasoning is a target in those APIs, and servers may lack it."""


async def prepare(api: ApiContext, request: ChatCompletionRequest, context: RequestContext) -> ChatAnswerer:
    """Plan a chat, or have its media encoded for a language server. Raises RequestError and ServiceError."""
    if api.servers is None:
        return await chat.prepare(api, request, context)
    fields = _fields(api, request)
    length = len(msgspec.json.encode(fields))
    asked = gateway.Forwarded(api, context, fields, length, form=ChatAnswer)
    return ForwardedChat(request, ForwardedAnswer(api, await gateway.prepare_fields(api, asked, request)))


def _fields(api: ApiContext, request: ChatCompletionRequest) -> dict[str, Any]:
    """Return the request as vLLM takes it, with a text in place of each medium."""
    given = request.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_unset=True, exclude=MADE_HERE | OWN
    )
    blank = {"type": "text", "text": ""}
    places = dict.fromkeys(media_parts(request.messages), blank)
    fields: dict[str, Any] = {"model": request.model} if request.model else {}
    fields["messages"] = [message_of(number, one, places) for number, one in enumerate(request.messages)]
    fields |= given
    if (chosen := _format(request.response_format)) is not None:
        fields["response_format"] = chosen
    if tools := [tool.model_dump(by_alias=True, exclude_none=True) for tool in request.callable_tools]:
        fields["tools"] = tools
        if (name := request.named_tool) is not None:
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif request.must_call:
            fields["tool_choice"] = "required"
    if variables := template_variables(api, request):
        fields["chat_template_kwargs"] = variables
    if request.stream:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return fields


def _format(chosen: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    """Return a format as vLLM enforces it: that of a schema needs a name, and that of any object takes no schema."""
    match chosen:
        case JsonObjectFormat(schema_=None):
            return {"type": "json_object"}
        case JsonObjectFormat(schema_=schema):
            return {"type": "json_schema", "json_schema": {"name": FORMAT_NAME, "schema": schema}}
        case JsonSchemaFormat(json_schema=described):
            given = described.model_dump(mode="json", by_alias=True, exclude_none=True)
            return {"type": "json_schema", "json_schema": {"name": FORMAT_NAME} | given}
    return None


@dataclass
class ForwardedAnswer:
    """What is known of an answer beside its deltas. Final once they have ended."""

    api: ApiContext
    asked: gateway.Forwarded
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    num_reasoning: int = 0
    _usage: TokenUsage = field(default_factory=TokenUsage)

    @property
    def model(self) -> str:
        """The name of the model that answers: a LoRA's for one that the request names."""
        return self.asked.model

    @property
    def context(self) -> RequestContext:
        return self.asked.context

    @property
    def timeline(self) -> dict[str, Any]:
        """None: a server doesn't say what it spent its time on."""
        return {}

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in the format of OpenAI's ``usage``."""
        prompt, completion = self._usage.prompt_tokens, self._usage.completion_tokens or 0
        details = self._usage.prompt_tokens_details
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": (details and details.cached_tokens) or 0},
        }

    def note(self, usage: TokenUsage) -> None:
        """Take the tokens that the server has counted so far."""
        self._usage = usage
        if (details := usage.completion_tokens_details) is not None:
            self.num_reasoning = details.reasoning_tokens or 0


@dataclass
class ForwardedChat:
    """A chat that a language server answers."""

    request: ChatCompletionRequest
    generation: ForwardedAnswer
    _last_call: int = -1
    """The index of the call that began last."""
    _is_open: bool = False
    """Whether nothing has come after that call."""
    _has_ended: bool = False

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield what each part of the answer adds. Raises as ``gateway.streamed``, and InstanceLost for an answer that
        isn't one whole choice."""
        asked = self.generation.asked
        if self.request.stream:
            async with aclosing(gateway.streamed(asked, self._read)) as parts:
                async for part in parts:
                    for delta in part:
                        yield delta
        else:
            for delta in await gateway.whole(asked, self._read):
                yield delta
        if not self._has_ended:
            raise InstanceLost("the language server ended its answer without a reason")

    def _read(self, part: AnswerPart) -> list[ChoiceDelta]:
        if self.request.stream:
            self.generation.context.hold(len(part.data))  # about what is kept of it
        says = part.says
        if not isinstance(says, ChatAnswer):
            return []  # a comment, or the end
        if says.error is not None:
            raise InstanceLost(f"the language server {part.server} failed after it had begun to answer")
        if says.usage is not None:
            self.generation.note(says.usage)
        return [self._delta(choice, part.server) for choice in says.choices]

    def _delta(self, choice: ServerChatChoice, server: str) -> ChoiceDelta:
        if choice.index != 0 or self._has_ended:
            raise InstanceLost(f"the language server {server} answered more than it was asked for")
        if (reason := choice.finish_reason) is not None and reason not in REASONS:
            raise InstanceLost(f"the language server {server} ended its answer: {reason[:40]}")
        self._has_ended = reason is not None
        return ChoiceDelta(
            choice=0,
            events=list(self._events(choice.delta or choice.message, server)),
            logprobs=[_entry(one) for one in (choice.logprobs and choice.logprobs.content) or ()],
            finish_reason=reason and REASONS[reason],
            ids=choice.token_ids or [],
            stop_reason=choice.stop_reason,
        )

    def _events(self, message: ServerMessage, server: str) -> Iterator[Event]:
        if thought := message.reasoning or message.reasoning_content:
            self._is_open = False
            yield ReasoningDelta(thought)
        if message.content:
            self._is_open = False
            yield TextDelta(message.content)
        for number, call in enumerate(message.tool_calls or ()):
            index = number if call.index is None else call.index
            function = call.function or CalledFunction()
            if function.name and index > self._last_call:  # older versions repeat it in each piece
                self._last_call, self._is_open = index, True
                yield ToolCallStart(index, function.name)
            if function.arguments:
                if index != self._last_call or not self._is_open:
                    raise InstanceLost(f"the language server {server} sent arguments of a call that isn't open")
                yield ToolCallArguments(index, function.arguments)


def _entry(listed: AnswerTokenEntry) -> msgspec.Raw:
    for one in (listed, *listed.top_logprobs):
        if one.bytes is None:
            one.bytes = list(one.token.encode())
    return msgspec.Raw(msgspec.json.encode(listed))
