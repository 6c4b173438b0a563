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
from triptych.api.generation import RequestContext
from triptych.api.media_parts import media_parts
from triptych.api.schemas import ChatCompletionRequest
from triptych.errors import InstanceLost
from triptych.gateway.answers import ChatAnswer, ServerChatChoice, ServerMessage, TokenUsage
from triptych.gateway.relay import AnswerPart
from triptych.prompt.formats.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "repetition": "stop"}
"""Why answers end, by vLLM's reasons. With others, they are no answers."""
MADE_HERE = {"model", "messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs", "timeout"}
"""Fields of a chat that are translated for a server."""
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

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield what each part of the answer adds. Raises as ``gateway.streamed``."""
        if not self.request.stream:
            for delta in self._read(await gateway.whole(self.generation.asked)):
                yield delta
            return
        async with aclosing(gateway.streamed(self.generation.asked)) as parts:
            async for part in parts:
                for delta in self._read(part):
                    yield delta

    def _read(self, part: AnswerPart) -> Iterator[ChoiceDelta]:
        says = part.says
        if not isinstance(says, ChatAnswer):
            return  # a comment, or the end
        if says.error is not None:
            raise InstanceLost(f"the language server {part.server} failed after it had begun to answer")
        if says.usage is not None:
            self.generation.note(says.usage)
        yield from (_delta(choice, part.server) for choice in says.choices)


def _delta(choice: ServerChatChoice, server: str) -> ChoiceDelta:
    if (reason := choice.finish_reason) is not None and reason not in REASONS:
        raise InstanceLost(f"the language server {server} ended its answer: {reason[:40]}")
    return ChoiceDelta(
        choice=choice.index,
        events=list(_events(choice.delta or choice.message)),
        logprobs=(choice.logprobs and choice.logprobs.content) or [],
        finish_reason=reason and REASONS[reason],
        ids=choice.token_ids or [],
        stop_reason=choice.stop_reason,
    )


def _events(message: ServerMessage) -> Iterator[Event]:
    if thought := message.reasoning or message.reasoning_content:
        yield ReasoningDelta(thought)
    if message.content:
        yield TextDelta(message.content)
    for number, call in enumerate(message.tool_calls):
        index = number if call.index is None else call.index
        if call.function.name:
            yield ToolCallStart(index, call.function.name)
        if call.function.arguments:
            yield ToolCallArguments(index, call.function.arguments)
