"""``/v1/chat/completions``: preparing a chat, and its answer as one object or as a stream of chunks."""

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from triptych.api.answers import (
    ChoiceDelta,
    MessageBuilder,
    PreparedChat,
    collect_messages,
    stream_deltas,
)
from triptych.api.context import ApiContext
from triptych.api.conversation import plan_conversation
from triptych.api.generation import Generation, RequestContext, check_model, make_sampling_params
from triptych.api.media_parts import media_parts
from triptych.api.prompt_logprobs import prompt_logprob_entries, scored_tokens
from triptych.api.response_format import answer_grammar
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.sse import DONE, event
from triptych.api.tool_calls import ToolCalls
from triptych.errors import InvalidRequest
from triptych.messages.work import ReasoningBudget
from triptych.observe.timeline import Interval
from triptych.prompt.formats.reasoning import Reasoning
from triptych.prompt.prompt import PlannedPrompt


async def prepare(api: ApiContext, request: ChatCompletionRequest, context: RequestContext) -> PreparedChat:
    """Plan the request's prompt and fix its sampling and its answer's grammar. Raises RequestError and ServiceError."""
    context = context.with_timeout(request.timeout)
    prompt, intervals = await plan_prompt(api, request, context)
    return await prepare_planned(api, request, context, prompt, intervals)


async def prepare_planned(
    api: ApiContext,
    request: ChatCompletionRequest,
    context: RequestContext,
    prompt: PlannedPrompt,
    intervals: list[Interval],
) -> PreparedChat:
    """Fix the sampling and the answer's grammar of a request whose prompt is planned; ``intervals`` were spent on that.
    Raises InvalidRequest."""
    grammar = None
    if request.is_constrained or request.callable_tools:
        grammar = await api.grammars.checked(
            context.record.client, partial(answer_grammar, request, prompt.reasoning, api.prompt_builder.formats)
        )
    generation = Generation(
        api=api,
        prompts=[prompt],
        sampling_params=make_sampling_params(
            api,
            request,
            [prompt],
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            num_scoring=1,  # the answer has them once, for all choices
            grammar=grammar,
            param="messages",
            reasoning_budget=_reasoning_budget(api, request.thinking_token_budget, prompt.reasoning),
        ),
        fields=request,
        context=context,
        id=f"chatcmpl-{secrets.token_hex(12)}",
        keep_special=api.prompt_builder.formats.special.values(),
        intervals=intervals,
        preceding=[_continued(api, request, prompt)] if request.continue_final_message else (),
    )
    return PreparedChat(generation, request)


def _reasoning_budget(api: ApiContext, tokens: int | None, reasoning: Reasoning) -> ReasoningBudget | None:
    """Return the budget of an answer's reasoning; -1 is none. Raises InvalidRequest if no single token ends it: the
    instance couldn't tell that it has ended."""
    if tokens in (None, -1) or reasoning is Reasoning.NONE:
        return None
    tags, tokenizer = api.prompt_builder.formats.reasoning[0], api.tokenizer
    if (close := end_of_reasoning(api)) is None:
        field = "thinking_token_budget"
        raise InvalidRequest(f"{field}: no single token ends this model's reasoning, so it can't be limited", field)
    opening = [] if reasoning.is_open else tokenizer.encode(tags.open.strip())
    return ReasoningBudget(tokens, [close, *(tokenizer.encode(tags.after) if tags.after else ())], opening)


def end_of_reasoning(api: ApiContext) -> int | None:
    """Return the token that ends the model's reasoning; None if no single one does, or it doesn't reason."""
    formats = api.prompt_builder.formats
    return api.tokenizer.id_of(formats.reasoning[0].close) if formats.reasoning else None


def _continued(api: ApiContext, request: ChatCompletionRequest, prompt: PlannedPrompt) -> list[int]:
    return api.tokenizer.context_of(prompt.tokens, skip_special_tokens=request.skip_special_tokens)


async def plan_prompt(
    api: ApiContext, request: ChatCompletionRequest, context: RequestContext
) -> tuple[PlannedPrompt, list[Interval]]:
    """Plan the request's prompt while it holds an admission slot; return it and the intervals spent. Raises
    RequestError and ServiceError."""
    check_model(api, request.model)
    if has_media := bool(media_parts(request.messages)):
        api.prompt_builder.check_takes_media()
    with api.lifecycle.preparing(
        context.record, has_media=has_media, priority=request.priority or 0, timeout=context.remaining
    ):
        return await plan_conversation(api, request, context)


# ── the answer as one object ─────────────────────────────────────────────────────────────────────────────────────


async def full_response(chat: PreparedChat) -> dict[str, Any]:
    """Return the answer as one ``chat.completion`` object (``objects.ChatCompletion``)."""
    choices = [_choice(chat, *numbered) for numbered in enumerate(await collect_messages(chat))]
    answer = _object(chat, "chat.completion") | {"choices": choices, "usage": chat.generation.usage}
    return answer | _prompt_ids(chat) | await _prompt_logprobs(chat) | chat.generation.timeline


async def _prompt_logprobs(chat: PreparedChat) -> dict[str, Any]:
    """Return the field ``prompt_logprobs``, null unless the request asks for it, as in vLLM."""
    if (num_top := chat.request.prompt_logprobs) is None:
        return {"prompt_logprobs": None}
    generation = chat.generation
    tokenizer, prompt, logprobs = generation.api.tokenizer, generation.prompts[0], generation.prompt_logprobs.get(0)
    # on another thread, because it takes long enough to delay other requests' tokens
    encoded = await generation.api.executor.run(
        generation.context.record.client,
        lambda: prompt_logprob_entries(tokenizer, scored_tokens(prompt.tokens, logprobs), num_top),
    )
    return {"prompt_logprobs": encoded}


def _choice(chat: PreparedChat, number: int, parts: MessageBuilder) -> dict[str, Any]:
    content = parts.content or (None if parts.calls.whole else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parts.reasoning and chat.request.include_reasoning:
        message |= {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}
    if parts.calls.whole:
        message["tool_calls"] = parts.calls.whole
    return {
        "index": number,
        "message": message,
        "logprobs": _logprobs(chat, parts.logprobs),
        "finish_reason": parts.finish_reason,
        "stop_reason": parts.stop_reason,
    } | _token_ids(chat, parts.ids)


# ── the answer as a stream ───────────────────────────────────────────────────────────────────────────────────────


async def stream_response(chat: PreparedChat) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events (``objects.ChatChunk``).

    A token without text of its own, such as a tag, has no event: what belongs to it comes with the next. With the
    usage so far, it has one, so that clients see when each token came."""
    generation = chat.generation
    options = chat.request.stream_options
    include_usage = options is not None and options.include_usage
    continuous_usage = options is not None and include_usage and options.continuous_usage_stats
    held = [_Held() for _ in range(generation.num_choices)]
    calls = [chat.new_calls() for _ in range(generation.num_choices)]
    has_begun = False
    async with aclosing(stream_deltas(chat)) as stream:
        async for delta in stream:
            if not has_begun:
                for one in _first_chunks(chat, continuous_usage=continuous_usage):
                    yield one
            has_begun = True
            usage = {"usage": generation.usage} if continuous_usage else {}
            held[delta.choice].add(delta)
            message = _message_delta(chat, delta, calls[delta.choice])
            if message or delta.finish_reason or continuous_usage:
                yield _chunk(chat, delta, message, held=held[delta.choice], extra=usage)
    timeline = generation.timeline
    if include_usage:
        yield event(_object(chat, "chat.completion.chunk") | {"choices": [], "usage": generation.usage} | timeline)
    elif timeline:
        yield event(_object(chat, "chat.completion.chunk") | {"choices": []} | timeline)
    yield DONE


@dataclass
class _Held:
    """What belongs to tokens of a choice that no event was sent for."""

    logprobs: list[msgspec.Raw] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, delta: ChoiceDelta) -> None:
        self.logprobs += delta.logprobs
        self.ids += delta.ids

    def take(self, chat: PreparedChat) -> dict[str, Any]:
        """Return the fields of a chunk's choice that have it, and forget it."""
        made = {"logprobs": _logprobs(chat, self.logprobs) if self.logprobs else None} | _token_ids(chat, self.ids)
        self.logprobs, self.ids = [], []
        return made


def _first_chunks(chat: PreparedChat, *, continuous_usage: bool) -> Iterator[bytes]:
    """Yield a chunk for each choice that has its role, and no token yet."""
    extra: dict[str, Any] = _prompt_ids(chat)
    if continuous_usage:
        usage = chat.generation.usage
        extra["usage"] = usage | {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    for choice in range(chat.generation.num_choices):
        message = {"role": "assistant", "content": ""}
        yield _chunk(chat, ChoiceDelta(choice, [], [], None), message, held=_Held(), extra=extra)


def _message_delta(chat: PreparedChat, delta: ChoiceDelta, calls: ToolCalls) -> dict[str, Any]:
    """Return what the client sees of a delta; empty for nothing."""
    message: dict[str, Any] = {}
    if delta.reasoning and chat.request.include_reasoning:
        message |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    if changed := calls.add(delta.events, ended=delta.finish_reason is not None):
        message["tool_calls"] = changed
    if delta.content:
        message["content"] = delta.content
    return message


def _chunk(
    chat: PreparedChat, delta: ChoiceDelta, message: dict[str, Any], *, held: _Held, extra: dict[str, Any]
) -> bytes:
    """Return a chunk of ``delta``'s choice; a choice's last one has its reason to finish, and text if that ends."""
    ended = {"stop_reason": delta.stop_reason} if delta.finish_reason else {}
    body = {"index": delta.choice, "delta": message, "finish_reason": delta.finish_reason} | ended | held.take(chat)
    return event(_object(chat, "chat.completion.chunk") | {"choices": [body]} | extra)


def _logprobs(chat: PreparedChat, logprobs: list[msgspec.Raw]) -> dict[str, Any] | None:
    return {"content": logprobs, "refusal": None} if chat.request.logprobs else None


def _token_ids(chat: PreparedChat, ids: list[int]) -> dict[str, Any]:
    return {"token_ids": ids} if chat.request.return_token_ids else {}


def _prompt_ids(chat: PreparedChat) -> dict[str, Any]:
    return {"prompt_token_ids": chat.generation.prompts[0].tokens} if chat.request.return_token_ids else {}


def _object(chat: PreparedChat, kind: str) -> dict[str, Any]:
    generation = chat.generation
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
    }
