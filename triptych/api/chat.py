"""``/v1/chat/completions``: from a validated request to a stream of text, and from that to OpenAI's objects."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from triptych.api.errors import body_of
from triptych.api.merging import merged
from triptych.api.schemas import ChatCompletionRequest, ChatMessage, ImagePart
from triptych.api.service import Service
from triptych.api.sse import DONE, event
from triptych.errors import InternalError, InvalidRequest, PromptTooLong, RequestError, TriptychError, UnknownModel
from triptych.messages.work import Sampling, TokenLogprob
from triptych.observe.requests import note
from triptych.observe.timeline import Interval, as_json
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.media import fetch
from triptych.prompt.prompt import PlannedPrompt, image_param
from triptych.router.stream import TokenStream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """What one report of the model adds to a choice: text (perhaps none), its tokens' log probabilities if they were
    asked for, and, with the last one, why the choice ended."""

    choice: int
    text: str
    logprobs: list[dict[str, Any]]
    finish_reason: str | None


@dataclass
class Completion:
    """The answer to one request: one or several choices, each a request of its own to the router. ``usage`` and
    ``intervals`` are final once ``stream`` has ended."""

    service: Service
    prompt: PlannedPrompt
    samplings: list[Sampling]
    stop_strings: list[str]
    cache_salt: str
    intervals: list[Interval]
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    num_generated: int = 0
    num_reused: int = 0

    async def stream(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come. Ends the requests when it is closed early. Raises RequestError and
        ServiceError."""
        streams: list[TokenStream] = []
        try:
            for sampling in self.samplings:
                streams.append(self._submit(sampling))
            async with aclosing(merged([self._choice(number, one) for number, one in enumerate(streams)])) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            for one in streams:
                self.service.router.cancel(one.request)
                self.intervals += one.intervals

    def _submit(self, sampling: Sampling) -> TokenStream:
        eos_token_ids = sorted(self.service.tokenizer.eos_token_ids)
        return self.service.router.submit(self.prompt, sampling, eos_token_ids, self.cache_salt)

    async def _choice(self, number: int, tokens: TokenStream) -> AsyncGenerator[Piece, None]:
        detokenizer = Detokenizer(self.service.tokenizer, self.stop_strings)
        async for report in tokens:
            self.num_generated += len(report.tokens)
            self.num_reused = max(self.num_reused, report.reused)
            # the token that ended it counts, but isn't part of the answer, special or not: as in vLLM
            shown = len(report.tokens) - (report.finish_reason == "stop")
            text = detokenizer.push(report.tokens[:shown])
            logprobs = self._logprobs(report.tokens[:shown], report.logprobs)
            if detokenizer.stopped:
                tokens.record.finish_reason = "stop"
                yield Piece(number, text, logprobs, "stop")
                return
            if report.finish_reason:
                text += detokenizer.finish()
            yield Piece(number, text, logprobs, "stop" if detokenizer.stopped else report.finish_reason)

    def _logprobs(self, tokens: list[int], logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        """In the shape of the OpenAI API's ``choices[].logprobs.content``."""
        return [
            self._logprob(token, one.logprob) | {"top_logprobs": [self._logprob(*other) for other in one.top]}
            for token, one in zip(tokens, logprobs, strict=False)  # none unless they were asked for
        ]

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.service.tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    @property
    def usage(self) -> dict[str, Any]:
        prompt = len(self.prompt.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_reused},
        }


async def prepare(service: Service, request: ChatCompletionRequest) -> Completion:
    """Fetches and plans the request's media, builds its prompt and fixes its sampling. Raises RequestError."""
    if request.model != service.model_name:
        raise UnknownModel(f"model {request.model!r} is not served here; {service.model_name!r} is", "model")
    urls = _image_urls(request.messages)
    if len(urls) > service.front_door.max_images:
        raise InvalidRequest(f"{len(urls)} images, at most {service.front_door.max_images} are allowed", "messages")
    # what can't be served now shouldn't cost a fetch and a plan; ``submit`` asks again, because time passes until then
    service.router.check_admission(has_media=bool(urls))
    began = time.time()
    messages = await _with_media(service, request.messages, urls)
    fetched = time.time()
    # off the loop: a long text takes a while to tokenize, and other requests' tokens shouldn't wait for it
    prompt = await asyncio.to_thread(service.prompt_builder.build, messages, service.context_length)
    intervals = [Interval("fetch", began, fetched), Interval("plan", fetched, time.time())]
    note(*intervals)
    return Completion(
        service=service,
        prompt=prompt,
        samplings=_samplings(service, request, len(prompt.tokens)),
        stop_strings=request.stop_strings,
        cache_salt=request.cache_salt or "",
        intervals=intervals,
    )


async def whole(completion: Completion, timeline: bool) -> dict[str, Any]:
    """The answer as one ``chat.completion`` object."""
    pieces: list[list[Piece]] = [[] for _ in completion.samplings]
    async with aclosing(completion.stream()) as stream:
        async for piece in stream:
            pieces[piece.choice].append(piece)
    choices = [_choice(completion, number, parts) for number, parts in enumerate(pieces)]
    answer = _object(completion, "chat.completion") | {"choices": choices, "usage": completion.usage}
    return answer | ({"timeline": as_json(completion.intervals)} if timeline else {})


def _choice(completion: Completion, number: int, pieces: list[Piece]) -> dict[str, Any]:
    return {
        "index": number,
        "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces)},
        "logprobs": _content(completion, [entry for piece in pieces for entry in piece.logprobs]),
        "finish_reason": pieces[-1].finish_reason,
    }


async def chunks(completion: Completion, include_usage: bool, timeline: bool) -> AsyncGenerator[bytes, None]:
    """The answer as events. The first is yielded only once the model has begun to answer, so that a request that
    fails before that still gets its HTTP status. A failure after that is an error event; then the stream ends."""
    begun: set[int] = set()
    running = len(completion.samplings)
    try:
        async with aclosing(completion.stream()) as stream:
            async for piece in stream:
                if piece.choice not in begun:
                    begun.add(piece.choice)
                    yield _chunk(completion, piece.choice, {"role": "assistant", "content": ""})
                # an empty piece too: clients take the time between tokens from the chunks, as vLLM sends them
                yield _chunk(completion, piece.choice, {"content": piece.text}, logprobs=piece.logprobs)
                if piece.finish_reason:
                    running -= 1
                    if running:
                        yield _chunk(completion, piece.choice, {}, piece.finish_reason)
                    else:
                        ending = piece
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, TriptychError):
            log.error("answer %s failed", completion.id, exc_info=error)
            error = InternalError("internal error")
        yield event(body_of(error))
        return
    last = {"timeline": as_json(completion.intervals)} if timeline else {}
    yield _chunk(completion, ending.choice, {}, ending.finish_reason, **({} if include_usage else last))
    if include_usage:
        yield event(_object(completion, "chat.completion.chunk") | {"choices": [], "usage": completion.usage} | last)
    yield DONE


def _chunk(
    completion: Completion,
    choice: int,
    delta: dict[str, str],
    finish_reason: str | None = None,
    *,
    logprobs: list[dict[str, Any]] | None = None,
    **extra: Any,
) -> bytes:
    body = {
        "index": choice,
        "delta": delta,
        "logprobs": None if logprobs is None else _content(completion, logprobs),
        "finish_reason": finish_reason,
    }
    return event(_object(completion, "chat.completion.chunk") | {"choices": [body]} | extra)


def _content(completion: Completion, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
    return None if completion.samplings[0].logprobs is None else {"content": logprobs}


def _object(completion: Completion, kind: str) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": kind,
        "created": completion.created,
        "model": completion.service.model_name,
    }


def _image_urls(messages: list[ChatMessage]) -> dict[tuple[int, int], str]:
    """The URL of every image, by the numbers of its message and of its part within."""
    return {
        (m, p): part.image_url.url
        for m, message in enumerate(messages)
        if not isinstance(message.content, str)
        for p, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    }


async def _with_media(
    service: Service, messages: list[ChatMessage], urls: dict[tuple[int, int], str]
) -> list[dict[str, Any]]:
    """The messages as the prompt builder takes them, every image's URL replaced by its bytes."""
    data = await asyncio.gather(*(_fetch(service, place, url) for place, url in urls.items()))
    images = dict(zip(urls, data, strict=True))
    return [_message(m, message, images) for m, message in enumerate(messages)]


async def _fetch(service: Service, place: tuple[int, int], url: str) -> bytes:
    try:
        return await fetch(url, service.front_door.allowed_media_domains, service.media)
    except RequestError as error:
        error.param = image_param(*place)
        raise


def _message(m: int, message: ChatMessage, images: dict[tuple[int, int], bytes]) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts: list[dict[str, Any]] = [
        {"type": "image", "data": images[m, p]} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for p, part in enumerate(message.content)
    ]
    return {"role": role, "content": parts}


def _samplings(service: Service, request: ChatCompletionRequest, num_prompt: int) -> list[Sampling]:
    """The sampling of each choice; what the request leaves open is the checkpoint's own default, as in vLLM."""
    room = service.context_length - num_prompt
    wanted = request.max_completion_tokens or request.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise PromptTooLong(
            f"{num_prompt} prompt tokens and {wanted or 1} new ones exceed the context of "
            f"{service.context_length} tokens",
            "messages",
        )
    max_tokens = wanted or room
    if request.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {request.min_tokens} exceeds max_tokens {max_tokens}", "min_tokens")
    defaults = service.generation_defaults
    temperature = request.temperature if request.temperature is not None else defaults.temperature
    top_k = request.top_k if request.top_k is not None else defaults.top_k
    seed = request.seed if request.seed is not None else secrets.randbits(62)
    first = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=request.top_p if request.top_p is not None else defaults.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        stop_token_ids=request.stop_token_ids or [],
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=request.grammar,
    )
    # each choice a seed of its own, which follows from the request's: as in vLLM
    return [msgspec.structs.replace(first, seed=(seed + number) % 2**63) for number in range(request.n or 1)]
