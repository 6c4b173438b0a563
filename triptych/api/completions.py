"""``/v1/completions``: texts and tokens without a chat template."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from triptych.api.chat import timeline
from triptych.api.completion_schemas import CompletionRequest
from triptych.api.generation import Generation, Piece, RequestContext, check_model, samplings
from triptych.api.prompt_logprobs import entries, scored_tokens
from triptych.api.service import Service
from triptych.api.sse import DONE, event
from triptych.errors import InvalidRequest
from triptych.messages.work import TokenLogprob
from triptych.observe.requests import current_client, note
from triptych.observe.timeline import Interval
from triptych.prompt.detokenize import REPLACEMENT, Detokenizer
from triptych.prompt.prompt import PlannedPrompt


async def prepare(service: Service, request: CompletionRequest, context: RequestContext) -> Generation:
    """Plans the request's prompts and fixes its sampling. Raises RequestError and ServiceError."""
    context = context.within(request.timeout)
    check_model(service, request.model)
    wanted = len(request.prompts) * (request.n or 1)
    if wanted > service.frontend.admission.max_queue:
        raise InvalidRequest(
            f"prompt: {wanted} answers, at most {service.frontend.admission.max_queue} can be made", "prompt"
        )
    began = time.time()
    with service.router.preparing(has_media=False, priority=request.priority or 0, timeout=context.remaining):
        async with context.in_time():
            prompts = await service.planning.run(current_client(), partial(_planned, service, request))
    planned = Interval("plan", began, time.time())
    note(planned)
    return Generation(
        service=service,
        prompts=prompts,
        samplings=samplings(
            service,
            request,
            prompts,
            max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.scores_prompt,
            num_scoring=request.n or 1,  # each of its choices tells of the prompt
            grammar=request.form,
            param="prompt",
        ),
        fields=request,
        context=context,
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
    """One choice as it is told, piece by piece: with ``echo`` the first one begins with the prompt."""

    def __init__(self, generation: Generation, number: int) -> None:
        assert isinstance(generation.fields, CompletionRequest)
        self._request = generation.fields
        self._number = number
        self._tokenizer = generation.service.tokenizer
        self._prompt = generation.prompt_of(number).tokens
        self._scores = generation.prompt_logprobs.get(number)
        self._echoes = bool(self._request.echo)
        self._offset = 0
        """Where its text stands, for ``text_offset``."""
        self._detokenizer = Detokenizer(self._tokenizer, (), self._request.skip_special_tokens)

    def told(self, piece: Piece) -> dict[str, Any]:
        echoes, self._echoes = self._echoes, False
        return {
            "index": self._number,
            "text": (self._tokenizer.decode(self._prompt) if echoes else "") + piece.text,
            "logprobs": self._logprobs(piece, echoes=echoes) if self._request.logprobs is not None else None,
            "finish_reason": piece.finish_reason,
        }

    def told_whole(self, piece: Piece) -> dict[str, Any]:
        """A choice that is one piece, with what is only told of whole answers."""
        if (most := self._request.prompt_logprobs) is None:
            return self.told(piece)
        scored = scored_tokens(self._prompt, self._scores)
        return self.told(piece) | {"prompt_logprobs": entries(self._tokenizer, scored, most)}

    def _logprobs(self, piece: Piece, *, echoes: bool) -> dict[str, Any]:
        tokens, most, offsets = list(piece.tokens), self._request.logprobs or 0, list[int]()
        told: list[TokenLogprob | None] = list(piece.logprobs)
        if echoes:
            scored = scored_tokens(self._prompt, self._scores)
            offsets = self._offsets(Detokenizer(self._tokenizer), self._prompt)
            self._offset = len(self._tokenizer.decode(self._prompt))
            tokens = [*self._prompt, *tokens]
            # nothing comes before the first token that could make it likely or not
            told = [None, *(TokenLogprob(one.logprob, one.top[:most]) for one in scored), *told]
        return {
            "tokens": [self._spelled(token) for token in tokens],
            "token_logprobs": [one and one.logprob for one in told],
            "top_logprobs": [
                # the token itself is always among them, as in OpenAI's API
                one and self._by_text([*one.top, (token, one.logprob)])
                for token, one in zip(tokens, told, strict=True)
            ],
            "text_offset": offsets + self._offsets(self._detokenizer, piece.tokens),
        }

    def _offsets(self, detokenizer: Detokenizer, tokens: Sequence[int]) -> list[int]:
        """Where each token's text begins: of one that goes on with a character, where that does. Special tokens have
        no text unless they are told."""
        offsets = []
        for token in tokens:
            own, begun = self._tokenizer.decode([token]), self._offset
            self._offset += len(detokenizer.push([token]))
            # whole characters stand behind what is left of a character that was never completed
            whole = own and REPLACEMENT not in own
            offsets.append(max(begun, self._offset - len(own)) if whole else begun)
        return offsets

    def _by_text(self, logprobs: Sequence[tuple[int, float]]) -> dict[str, float]:
        """By the tokens' texts; of several that are spelled the same, the likeliest."""
        texts: dict[str, float] = {}
        for token, logprob in logprobs:
            texts.setdefault(self._spelled(token), logprob)
        return texts

    def _spelled(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


async def _pieces(generation: Generation) -> AsyncGenerator[Piece, None]:
    """What is told of the answer. Of one without tokens one was made all the same, for the sake of the prompt."""
    assert isinstance(generation.fields, CompletionRequest)
    async with aclosing(generation.stream()) as stream:
        async for piece in stream:
            if generation.fields.max_tokens == 0:
                generation.num_generated = 0
                yield Piece(piece.choice, "", [], [], "length")
            else:
                yield piece


async def whole(generation: Generation) -> dict[str, Any]:
    """The answer as one object (``objects.TextCompletion``)."""
    numbers = range(generation.num_choices)
    pieces: list[list[Piece]] = [[] for _ in numbers]
    async with aclosing(_pieces(generation)) as stream:
        async for piece in stream:
            pieces[piece.choice].append(piece)
    tell = partial(_told_whole, generation, [_joined(of_one) for of_one in pieces])
    choices: list[Any] = []
    if _has_logprobs(generation):
        # on another thread, to JSON: they take a while, and other requests' tokens shouldn't wait for them
        choices += await generation.service.planning.run(current_client(), lambda: [_as_json(one) for one in tell()])
    else:
        choices += tell()
    return _object(generation) | {"choices": choices, "usage": generation.usage} | timeline(generation)


def _has_logprobs(generation: Generation) -> bool:
    return any(one.logprobs is not None or one.prompt_logprobs is not None for one in generation.samplings)


def _told_whole(generation: Generation, joined: Sequence[Piece]) -> Iterator[dict[str, Any]]:
    return (_Choice(generation, one.choice).told_whole(one) for one in joined)


def _as_json(choice: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(choice))


def _joined(pieces: Sequence[Piece]) -> Piece:
    """A choice's pieces as one."""
    return Piece(
        choice=pieces[-1].choice,
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        finish_reason=pieces[-1].finish_reason,
    )


async def chunks(generation: Generation) -> AsyncGenerator[bytes, None]:
    """The answer as events (``objects.TextCompletion``)."""
    options = generation.fields.stream_options
    so_far = options is not None and options.continuous_usage_stats
    choices: dict[int, _Choice] = {}
    async with aclosing(_pieces(generation)) as stream:
        async for piece in stream:
            if (choice := choices.get(piece.choice)) is None:
                choice = choices[piece.choice] = _Choice(generation, piece.choice)
                told = await _first_told(generation, choice, piece)
            else:
                told = choice.told(piece)
            usage = {"usage": generation.usage} if so_far else {}
            yield event(_object(generation) | {"choices": [told]} | usage)
    last = timeline(generation)
    if options is not None and options.include_usage:
        yield event(_object(generation) | {"choices": [], "usage": generation.usage} | last)
    elif last:
        yield event(_object(generation) | {"choices": []} | last)
    yield DONE


async def _first_told(generation: Generation, choice: _Choice, piece: Piece) -> dict[str, Any]:
    if generation.samplings[0].prompt_logprobs is None:
        return choice.told(piece)
    # those of a whole prompt take a while, and other requests' tokens shouldn't wait for them
    return await generation.service.planning.run(current_client(), partial(choice.told, piece))


def _object(generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.service.model_name,
    }
