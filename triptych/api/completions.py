"""``/v1/completions``: texts and tokens without a chat template."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from triptych.api.chat import timeline
from triptych.api.completion_schemas import CompletionRequest
from triptych.api.generation import Caller, Generation, check_model, samplings
from triptych.api.service import Service
from triptych.api.sse import DONE, event
from triptych.errors import InvalidRequest
from triptych.messages.work import TokenLogprob
from triptych.observe.requests import note
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt
from triptych.prompt.tokenizer import Tokenizer


async def prepare(service: Service, request: CompletionRequest, caller: Caller) -> Generation:
    """Plans the request's prompts and fixes its sampling. Raises RequestError and ServiceError."""
    caller = caller.within(request.timeout)
    check_model(service, request.model)
    wanted = len(request.prompts) * (request.n or 1)
    if wanted > service.front_door.max_queue:
        raise InvalidRequest(f"prompt: {wanted} answers, at most {service.front_door.max_queue} can be made", "prompt")
    service.router.check_admission(has_media=False)
    began = time.time()
    prompts = await asyncio.to_thread(_planned, service, request)
    planned = Interval("plan", began, time.time())
    note(planned)
    return Generation(
        service=service,
        prompts=prompts,
        samplings=samplings(
            service,
            request,
            prompts,
            max_tokens=request.max_tokens,
            logprobs=request.logprobs,
            grammar=request.form,
            param="prompt",
        ),
        fields=request,
        caller=caller,
        id=f"cmpl-{secrets.token_hex(12)}",
        intervals=[planned],
    )


def _planned(service: Service, request: CompletionRequest) -> list[PlannedPrompt]:
    return [
        service.prompt_builder.build_text(
            prompt, service.context_length, param=param, add_special_tokens=request.add_special_tokens
        )
        for param, prompt in request.prompts
    ]


class _Choice:
    """One choice as it is told: where its text stands, for ``text_offset``."""

    def __init__(self, generation: Generation, number: int) -> None:
        request = generation.fields
        assert isinstance(request, CompletionRequest)
        self._number = number
        self._tokenizer = generation.service.tokenizer
        self._wants_logprobs = request.logprobs is not None
        self.before = self._tokenizer.decode(generation.prompt_of(number).tokens) if request.echo else ""
        """The prompt's text, if the answer is to begin with it."""
        self._offset = len(self.before)

    def told(
        self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": self._number,
            "text": text,
            "logprobs": self._logprobs(tokens, logprobs) if self._wants_logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([token]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                # the token itself is always among them, as in OpenAI's API
                _by_text(self._tokenizer, [*one.top, (token, one.logprob)])
                for token, one in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


def _by_text(tokenizer: Tokenizer, logprobs: Sequence[tuple[int, float]]) -> dict[str, float]:
    """By the tokens' texts; of several that are spelled the same, the likeliest."""
    texts: dict[str, float] = {}
    for token, logprob in logprobs:
        texts.setdefault(tokenizer.decode([token]), logprob)
    return texts


async def whole(generation: Generation) -> dict[str, Any]:
    """The answer as one object (``objects.TextCompletion``)."""
    numbers = range(generation.num_choices)
    texts, tokens, logprobs = ([[] for _ in numbers] for _ in range(3))  # type: ignore[var-annotated]
    reasons: list[str | None] = [None for _ in numbers]
    async with aclosing(generation.stream()) as stream:
        async for piece in stream:
            texts[piece.choice].append(piece.text)
            tokens[piece.choice] += piece.tokens
            logprobs[piece.choice] += piece.logprobs
            reasons[piece.choice] = piece.finish_reason or reasons[piece.choice]
    choices = []
    for number in numbers:
        choice = _Choice(generation, number)
        text = choice.before + "".join(texts[number])
        choices.append(choice.told(text, tokens[number], logprobs[number], reasons[number]))
    return _object(generation) | {"choices": choices, "usage": generation.usage} | timeline(generation)


async def chunks(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The answer as events (``objects.TextCompletion``)."""
    options = generation.fields.stream_options
    so_far = options is not None and options.continuous_usage_stats
    choices: dict[int, _Choice] = {}
    async with aclosing(generation.stream()) as stream:
        async for piece in stream:
            if (choice := choices.get(piece.choice)) is None:
                choice = choices[piece.choice] = _Choice(generation, piece.choice)
                text = choice.before + piece.text
            else:
                text = piece.text
            told = choice.told(text, piece.tokens, piece.logprobs, piece.finish_reason)
            usage = {"usage": generation.usage} if so_far else {}
            yield event(_object(generation) | {"choices": [told]} | usage)
    last = timeline(generation)
    if options is not None and options.include_usage:
        yield event(_object(generation) | {"choices": [], "usage": generation.usage} | last)
    elif last:
        yield event(_object(generation) | {"choices": []} | last)
    yield DONE


def _object(generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.service.model_name,
    }
