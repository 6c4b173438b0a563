"""``/v1/chat/completions``: from a validated request to a stream of text, and from that to OpenAI's objects."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from triptych.api.errors import body_of
from triptych.api.schemas import ChatCompletionRequest, ChatMessage, ImagePart
from triptych.api.service import Service
from triptych.api.sse import DONE, event
from triptych.errors import InternalError, InvalidRequest, PromptTooLong, RequestError, TriptychError, UnknownModel
from triptych.messages.work import Sampling
from triptych.observe.timeline import Interval, as_json
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.media import fetch
from triptych.prompt.prompt import PlannedPrompt

log = logging.getLogger(__name__)


@dataclass
class Completion:
    """One answer under way. ``stream`` yields text; the other fields are final once it has ended."""

    service: Service
    prompt: PlannedPrompt
    sampling: Sampling
    stop_strings: list[str]
    intervals: list[Interval]
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    finish_reason: str = ""
    num_generated: int = 0

    async def stream(self) -> AsyncGenerator[str, None]:
        """Pieces of text, some of them empty: one for each time the model reports. Ends the request when it is
        closed early. Raises RequestError and ServiceError."""
        tokenizer, router = self.service.tokenizer, self.service.router
        tokens = router.submit(self.prompt, self.sampling, sorted(tokenizer.eos_token_ids))
        detokenizer = Detokenizer(tokenizer, self.stop_strings)
        try:
            async for report in tokens:
                self.num_generated += len(report.tokens)
                text = detokenizer.push(report.tokens)
                self.finish_reason = "stop" if detokenizer.stopped else report.finish_reason or ""
                if self.finish_reason:
                    yield text if detokenizer.stopped else text + detokenizer.finish()
                    return
                yield text
        finally:
            router.cancel(tokens.request)
            self.intervals += tokens.intervals

    @property
    def usage(self) -> dict[str, int]:
        prompt = len(self.prompt.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": prompt + self.num_generated,
        }


async def prepare(service: Service, request: ChatCompletionRequest) -> Completion:
    """Fetches and plans the request's media, builds its prompt and fixes its sampling. Raises RequestError."""
    if request.model != service.model_name:
        raise UnknownModel(f"model {request.model!r} is not served here; {service.model_name!r} is", "model")
    began = time.time()
    messages = await _with_media(service, request.messages)
    fetched = time.time()
    # off the loop: a long text takes a while to tokenize, and other requests' tokens shouldn't wait for it
    prompt = await asyncio.to_thread(service.prompt_builder.build, messages)
    planned = time.time()
    return Completion(
        service=service,
        prompt=prompt,
        sampling=_sampling(service, request, len(prompt.tokens)),
        stop_strings=request.stop_strings,
        intervals=[Interval("fetch", began, fetched), Interval("plan", fetched, planned)],
    )


async def whole(completion: Completion, timeline: bool) -> dict[str, Any]:
    """The answer as one ``chat.completion`` object."""
    async with aclosing(completion.stream()) as stream:
        text = "".join([piece async for piece in stream])
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": None,
        "finish_reason": completion.finish_reason,
    }
    answer = _object(completion, "chat.completion") | {"choices": [choice], "usage": completion.usage}
    return answer | ({"timeline": as_json(completion.intervals)} if timeline else {})


async def chunks(completion: Completion, include_usage: bool, timeline: bool) -> AsyncGenerator[bytes, None]:
    """The answer as events. The first is yielded only once the model has begun to answer, so that a request that
    fails before that still gets its HTTP status. A failure after that is an error event; then the stream ends."""
    async with aclosing(completion.stream()) as stream:
        pieces = aiter(stream)
        first = await anext(pieces)
        yield _chunk(completion, {"role": "assistant", "content": ""})
        try:
            async for piece in _chain(first, pieces):
                # an empty piece too: clients take the time between tokens from the chunks, as vLLM sends them
                yield _chunk(completion, {"content": piece})
        except Exception as error:
            if not isinstance(error, TriptychError):
                log.error("answer %s failed", completion.id, exc_info=error)
                error = InternalError("internal error")
            yield event(body_of(error))
            return
    last = {"timeline": as_json(completion.intervals)} if timeline else {}
    yield _chunk(completion, {}, completion.finish_reason, **({} if include_usage else last))
    if include_usage:
        yield event(_object(completion, "chat.completion.chunk") | {"choices": [], "usage": completion.usage} | last)
    yield DONE


def _chunk(completion: Completion, delta: dict[str, str], finish_reason: str | None = None, **extra: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return event(_object(completion, "chat.completion.chunk") | {"choices": [choice]} | extra)


def _object(completion: Completion, kind: str) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": kind,
        "created": completion.created,
        "model": completion.service.model_name,
    }


async def _chain(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for piece in rest:
        yield piece


async def _with_media(service: Service, messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as the prompt builder takes them, every image's URL replaced by its bytes."""
    urls = {
        (m, p): part.image_url.url
        for m, message in enumerate(messages)
        if not isinstance(message.content, str)
        for p, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    }
    if len(urls) > service.front_door.max_images:
        raise InvalidRequest(f"{len(urls)} images, at most {service.front_door.max_images} are allowed", "messages")
    data = await asyncio.gather(*(_fetch(service, place, url) for place, url in urls.items()))
    images = dict(zip(urls, data, strict=True))
    return [_message(m, message, images) for m, message in enumerate(messages)]


async def _fetch(service: Service, place: tuple[int, int], url: str) -> bytes:
    try:
        return await fetch(url, service.front_door.allowed_media_domains, service.media)
    except RequestError as error:
        error.param = f"messages[{place[0]}].content[{place[1]}].image_url.url"
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


def _sampling(service: Service, request: ChatCompletionRequest, num_prompt: int) -> Sampling:
    """The request's sampling; what it leaves open is the checkpoint's own default, as in vLLM."""
    room = service.context_length - num_prompt
    wanted = request.max_completion_tokens or request.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise PromptTooLong(
            f"{num_prompt} prompt tokens and {wanted or 1} new ones exceed the context of "
            f"{service.context_length} tokens",
            "messages",
        )
    defaults = service.generation_defaults
    temperature = request.temperature if request.temperature is not None else defaults.temperature
    top_k = request.top_k if request.top_k is not None else defaults.top_k
    return Sampling(
        max_tokens=wanted or room,
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=request.top_p if request.top_p is not None else defaults.top_p,
        seed=(request.seed if request.seed is not None else secrets.randbits(62)) % 2**63,
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=request.ignore_eos,
    )
