"""``/v1/chat/completions``: from text to thoughts, calls and content, and from those to OpenAI's objects."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from triptych.api.conversation import planned
from triptych.api.forms import answer_form
from triptych.api.generation import Generation, Piece, RequestContext, check_model, samplings
from triptych.api.media_parts import media_parts
from triptych.api.prompt_logprobs import entries, scored_tokens
from triptych.api.schemas import ChatCompletionRequest, NamedTool
from triptych.api.service import Service
from triptych.api.sse import DONE, event
from triptych.messages.work import TokenLogprob
from triptych.observe.requests import current_client
from triptych.observe.timeline import as_json
from triptych.prompt.reasoning import Reasoning, ReasoningParser
from triptych.prompt.tokenizer import Tokenizer
from triptych.prompt.tool_calls import Event, TextDelta, ToolCallArguments, ToolCallParser, ToolCallStart


@dataclass
class Chat:
    """A request whose prompt is planned, and what its answer is read for."""

    generation: Generation
    request: ChatCompletionRequest
    tools: list[str]

    @property
    def reasoning(self) -> Reasoning:
        return self.generation.prompts[0].reasoning


@dataclass(frozen=True)
class Delta:
    """What one report of the model adds to a choice's message: more of a thought, then text and calls in order."""

    choice: int
    reasoning: str
    events: list[Event]
    logprobs: list[msgspec.Raw]
    finish_reason: str | None

    @property
    def content(self) -> str:
        return "".join(one.text for one in self.events if isinstance(one, TextDelta))


async def prepare(service: Service, request: ChatCompletionRequest, context: RequestContext) -> Chat:
    """Plans the request's prompt and fixes its sampling and its answer's form. Raises RequestError and ServiceError."""
    context = context.within(request.timeout)
    check_model(service, request.model)
    has_media = bool(media_parts(request.messages))
    with service.router.preparing(has_media=has_media, priority=request.priority or 0, timeout=context.remaining):
        prompt, intervals = await planned(service, request, context)
    generation = Generation(
        service=service,
        prompts=[prompt],
        samplings=samplings(
            service,
            request,
            [prompt],
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            num_scoring=1,  # they are told once, for all choices
            grammar=answer_form(request, prompt.reasoning),
            param="messages",
        ),
        fields=request,
        context=context,
        id=f"chatcmpl-{secrets.token_hex(12)}",
        intervals=intervals,
    )
    return Chat(generation, request, [tool.function.name for tool in request.callable_tools])


# ── reading an answer ────────────────────────────────────────────────────────────────────────────────────────────


class _Reader:
    """One choice's text, told apart."""

    def __init__(self, reasoning: Reasoning, tools: Sequence[str]) -> None:
        self.thoughts = ReasoningParser(reasoning)
        self.calls = ToolCallParser(tools) if tools else None

    def read(self, text: str, is_last: bool) -> tuple[str, list[Event]]:
        reasoning, rest = self.thoughts.push(text)
        if is_last:
            more_reasoning, more = self.thoughts.finish()
            reasoning, rest = reasoning + more_reasoning, rest + more
        if self.calls is None:
            return reasoning, [TextDelta(rest)] if rest else []
        return reasoning, self.calls.push(rest) + (self.calls.finish() if is_last else [])


async def deltas(chat: Chat) -> AsyncGenerator[Delta, None]:
    """What the model says, choice by choice, as it comes. Raises as ``Generation.stream`` does."""
    generation = chat.generation
    readers = [_Reader(chat.reasoning, chat.tools) for _ in range(generation.num_choices)]
    async with aclosing(generation.stream()) as stream:
        async for piece in stream:
            delta = _delta(chat, piece, readers[piece.choice])
            if delta.finish_reason and not piece.finish_reason:
                generation.end(piece.choice)
            yield delta


def _delta(chat: Chat, piece: Piece, reader: _Reader) -> Delta:
    if reader.thoughts.in_reasoning:
        chat.generation.num_reasoning += len(piece.tokens)
    reasoning, events = reader.read(piece.text, piece.finish_reason is not None)
    reason = piece.finish_reason
    if reader.calls is not None and reader.calls.complete:
        if chat.request.parallel_tool_calls is False:
            events = [one for one in events if isinstance(one, TextDelta) or one.index == 0]
            reason = reason or "stop"
        if reason == "stop" and not isinstance(chat.request.tool_choice, NamedTool):
            reason = "tool_calls"  # for a call that the request names it is "stop", as in OpenAI's API
    logprobs = logprob_entries(chat.generation.service.tokenizer, piece.tokens, piece.logprobs)
    return Delta(piece.choice, reasoning, events, logprobs, reason)


def logprob_entries(tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[msgspec.Raw]:
    """In the shape of the OpenAI API's ``choices[].logprobs.content``, each as JSON: of a long answer, hundreds of
    thousands of objects would keep the garbage collector, and the loop, for long."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": list(tokenizer.bytes_of(token))}

    return [
        msgspec.Raw(msgspec.json.encode(entry(token, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]}))
        for token, one in zip(tokens, logprobs, strict=False)  # none unless they were asked for
    ]


# ── the answer as a whole ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class MessageParts:
    """A choice's message, put together from its deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        for one in delta.events:
            if isinstance(one, ToolCallStart):
                function = {"name": one.name, "arguments": ""}
                self.calls.append({"id": call_id(), "type": "function", "function": function})
            elif isinstance(one, ToolCallArguments):
                self.calls[one.index]["function"]["arguments"] += one.text


async def gathered(chat: Chat) -> list[MessageParts]:
    """The messages of all choices. Raises as ``deltas`` does."""
    messages = [MessageParts() for _ in range(chat.generation.num_choices)]
    async with aclosing(deltas(chat)) as stream:
        async for delta in stream:
            messages[delta.choice].add(delta)
    return messages


async def whole(chat: Chat) -> dict[str, Any]:
    """The answer as one ``chat.completion`` object (``objects.ChatCompletion``)."""
    choices = [_choice(chat, *numbered) for numbered in enumerate(await gathered(chat))]
    answer = _object(chat, "chat.completion") | {"choices": choices, "usage": chat.generation.usage}
    return answer | await _prompt_logprobs(chat) | timeline(chat.generation)


async def _prompt_logprobs(chat: Chat) -> dict[str, Any]:
    """Those of the prompt, if they were asked for: once for all choices."""
    if (most := chat.request.prompt_logprobs) is None:
        return {}
    generation = chat.generation
    tokenizer, prompt, told = generation.service.tokenizer, generation.prompts[0], generation.prompt_logprobs.get(0)
    # on another thread, since it takes a while, and other requests' tokens shouldn't wait for it
    made = await generation.service.planning.run(
        current_client(), lambda: entries(tokenizer, scored_tokens(prompt.tokens, told), most)
    )
    return {"prompt_logprobs": made}


def _choice(chat: Chat, number: int, parts: MessageParts) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parts.content or (None if parts.calls else "")}
    if parts.reasoning:
        message |= {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}
    if parts.calls:
        message["tool_calls"] = parts.calls
    return {
        "index": number,
        "message": message,
        "logprobs": _content(chat, parts.logprobs),
        "finish_reason": parts.finish_reason,
    }


# ── the answer as a stream ───────────────────────────────────────────────────────────────────────────────────────


async def chunks(chat: Chat) -> AsyncGenerator[bytes, None]:
    """The answer as events (``objects.ChatChunk``)."""
    generation = chat.generation
    options = chat.request.stream_options
    include_usage = options is not None and options.include_usage
    so_far = options is not None and options.continuous_usage_stats
    begun: set[int] = set()
    running = generation.num_choices
    async with aclosing(deltas(chat)) as stream:
        async for delta in stream:
            usage = {"usage": generation.usage} if so_far else {}
            if delta.choice not in begun:
                begun.add(delta.choice)
                yield _chunk(chat, delta.choice, {"role": "assistant", "content": ""}, extra=usage)
            # an empty piece too: clients take the time between tokens from the chunks, as vLLM sends them
            yield _chunk(chat, delta.choice, _message_delta(delta), logprobs=delta.logprobs, extra=usage)
            if delta.finish_reason:
                running -= 1
                if running:
                    yield _chunk(chat, delta.choice, {}, delta.finish_reason, extra=usage)
                else:
                    ending = delta
    last = timeline(generation)
    usage = {"usage": generation.usage} if so_far else {}
    yield _chunk(chat, ending.choice, {}, ending.finish_reason, extra=usage | ({} if include_usage else last))
    if include_usage:
        yield event(_object(chat, "chat.completion.chunk") | {"choices": [], "usage": generation.usage} | last)
    yield DONE


def _message_delta(delta: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {}
    if delta.reasoning:
        message |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    calls: dict[int, dict[str, Any]] = {}
    for one in delta.events:
        if isinstance(one, ToolCallStart):
            function = {"name": one.name, "arguments": ""}
            calls[one.index] = {"index": one.index, "id": call_id(), "type": "function", "function": function}
        elif isinstance(one, ToolCallArguments):
            call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += one.text
    if calls:
        message["tool_calls"] = list(calls.values())
    if delta.content or not message:
        message["content"] = delta.content
    return message


def _chunk(
    chat: Chat,
    choice: int,
    delta: dict[str, Any],
    finish_reason: str | None = None,
    *,
    logprobs: list[msgspec.Raw] | None = None,
    extra: dict[str, Any] | None = None,
) -> bytes:
    body = {
        "index": choice,
        "delta": delta,
        "logprobs": None if logprobs is None else _content(chat, logprobs),
        "finish_reason": finish_reason,
    }
    return event(_object(chat, "chat.completion.chunk") | {"choices": [body]} | (extra or {}))


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def timeline(generation: Generation) -> dict[str, Any]:
    """Where the time went, if that was asked for."""
    return {"timeline": as_json(generation.intervals)} if generation.context.timeline else {}


def _content(chat: Chat, logprobs: list[msgspec.Raw]) -> dict[str, Any] | None:
    return {"content": logprobs} if chat.request.logprobs else None


def _object(chat: Chat, kind: str) -> dict[str, Any]:
    generation = chat.generation
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.service.model_name,
    }
