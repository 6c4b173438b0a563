"""From planned prompts to a stream of text: what all endpoints that generate have in common."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from triptych.api.fields import SamplingFields
from triptych.api.merging import merged
from triptych.api.prompt_logprobs import check_size
from triptych.api.service import Service
from triptych.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, UnknownModel
from triptych.messages.work import GrammarSpec, PromptLogprobs, SamplingParams, TokenLogprob, Tokens
from triptych.observe.timeline import Interval
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.media import RequestMedia
from triptych.prompt.prompt import PlannedPrompt
from triptych.prompt.tokenizer import Tokenizer
from triptych.router.stream import TokenStream

N = TypeVar("N")


@dataclass(frozen=True)
class RequestContext:
    """What of a request isn't in its body. ``scope`` names who asks, as far as the API key tells; ``expires`` is when
    the answer is of no use any more (``time.monotonic``); ``media`` gets what its URLs stand for; ``timeline`` asks for
    where the time went."""

    scope: str
    expires: float
    media: RequestMedia
    timeline: bool = False

    def within(self, timeout: float | None) -> "RequestContext":
        """The same with what a request's body says about its time, counted from now."""
        return self if timeout is None else replace(self, expires=min(self.expires, time.monotonic() + timeout))

    @asynccontextmanager
    async def in_time(self) -> AsyncGenerator[None, None]:
        """Around all that is done before instances are asked. Raises DeadlineExceeded when it isn't over in the
        request's time."""
        try:
            async with asyncio.timeout(self.remaining):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the request's time ran out while its prompt was made") from None

    @property
    def remaining(self) -> float:
        """Seconds. Raises DeadlineExceeded when there are none."""
        if (remaining := self.expires - time.monotonic()) <= 0:
            raise DeadlineExceeded("the request's time ran out before it was given to the model")
        return remaining


@dataclass(frozen=True)
class Piece:
    """What one report of the model adds to a choice: text (perhaps none) and its tokens, with log probabilities if they
    were asked for, and, with the last one, why the choice ended."""

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None


@dataclass
class Generation:
    """The answer to one request: one or several choices, each a request of its own to the router: ``samplings`` of the
    first prompt, then of the second. ``usage`` and ``intervals`` are final once ``stream`` has ended."""

    service: Service
    prompts: list[PlannedPrompt]
    samplings: list[SamplingParams]
    fields: SamplingFields
    context: RequestContext
    id: str
    intervals: list[Interval] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    num_generated: int = 0
    """Tokens, of all choices; ``num_reasoning`` of them are thoughts."""
    num_reasoning: int = 0
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By choice, from its first piece on, if they were asked for."""
    _reused: dict[int, int] = field(default_factory=dict)
    _streams: list[TokenStream] = field(default_factory=list)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * len(self.samplings)

    def prompt_of(self, choice: int) -> PlannedPrompt:
        return self.prompts[choice // len(self.samplings)]

    async def stream(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come. Ends the requests when it is closed early. Raises RequestError and
        ServiceError."""
        try:
            texts = [_Text(self.service.tokenizer, self.fields) for _ in range(self.num_choices)]
            self._streams.extend(self._submit(*numbered) for numbered in enumerate(texts))
            choices = [self._pieces(number, *one) for number, one in enumerate(zip(texts, self._streams, strict=True))]
            async with aclosing(merged(choices)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            for one in self._streams:
                self.service.router.cancel(one.request)
                self.intervals += one.intervals

    def end(self, choice: int) -> None:
        """The choice has all it needs: it is generated no further, and has no more pieces. Tokens that have come since
        its last piece were generated all the same, and count."""
        stream = self._streams[choice]
        self.service.router.complete(stream.request)
        self.num_generated += stream.num_unread
        stream.close()

    def _submit(self, choice: int, text: "_Text") -> TokenStream:
        return self.service.router.submit(
            self.prompt_of(choice),
            self.samplings[choice % len(self.samplings)],
            sorted(self.service.tokenizer.eos_token_ids),
            self.fields.cache_salt or "",
            self.context.remaining,
            priority=self.fields.priority or 0,
            read=text.read,
        )

    async def _pieces(self, number: int, text: "_Text", tokens: TokenStream) -> AsyncGenerator[Piece, None]:
        prompt = number // len(self.samplings)
        async for report in tokens:
            self._reused[prompt] = max(self._reused.get(prompt, 0), report.reused)
            if report.prompt_logprobs is not None:
                self.prompt_logprobs[number] = report.prompt_logprobs
            self.num_generated += len(report.tokens)
            shown = text.shown(report)
            yield Piece(number, text.take(report), shown, report.logprobs[: len(shown)], report.finish_reason)

    @property
    def usage(self) -> dict[str, Any]:
        """In the shape of OpenAI's ``usage``."""
        prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._reused.values())},
        } | ({"completion_tokens_details": {"reasoning_tokens": self.num_reasoning}} if self.num_reasoning else {})


class _Text:
    """One choice's text. The router has it ``read`` reports when they come, not when a client takes them: a stop string
    then ends the choice at its instance at once, and no token behind it counts."""

    def __init__(self, tokenizer: Tokenizer, fields: SamplingFields) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, fields.stop_strings, fields.skip_special_tokens, fields.min_tokens or 0
        )
        self._unread: list[str] = []
        self._by_token = False
        """Whether a token has ended the answer, not a stop string."""

    def read(self, report: Tokens) -> Tokens:
        """What of the report belongs to the answer: nothing behind the token that completes a stop string."""
        self._by_token = report.finish_reason == "stop"
        for used, token in enumerate(self.shown(report), start=1):
            self._unread.append(self._detokenizer.push([token]))
            if self._detokenizer.stopped:
                self._by_token = False
                return _cut(report, used)
        if report.finish_reason is not None:
            self._unread.append(self._detokenizer.finish())
            if self._detokenizer.stopped:
                # what was missing of it is the answer's end, and all tokens up to there were needed for it
                return _cut(report, len(report.tokens))
        return report

    def shown(self, report: Tokens) -> list[int]:
        """The tokens that are part of the text. One that ends the answer counts but isn't, special or not, as in
        vLLM."""
        return report.tokens[:-1] if self._by_token and report.finish_reason is not None else report.tokens

    def take(self, report: Tokens) -> str:
        """What became certain with the report's tokens, the next that haven't been taken."""
        count = len(report.tokens) if report.finish_reason is None else len(self._unread)
        texts, self._unread = self._unread[:count], self._unread[count:]
        return "".join(texts)


def _cut(report: Tokens, used: int) -> Tokens:
    return msgspec.structs.replace(
        report, tokens=report.tokens[:used], logprobs=report.logprobs[:used], finish_reason="stop"
    )


def check_model(service: Service, model: str | None) -> None:
    """Raises UnknownModel for a name that isn't this service's; none stands for it."""
    if model not in (None, service.model_name):
        raise UnknownModel(f"model {model!r} is not served here; {service.model_name!r} is", "model")


def samplings(
    service: Service,
    fields: SamplingFields,
    prompts: list[PlannedPrompt],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    num_scoring: int,
    grammar: GrammarSpec | None,
    param: str,
) -> list[SamplingParams]:
    """The sampling of each choice; what the request leaves open is the checkpoint's own default, as in vLLM. Of a
    prompt's choices the first ``num_scoring`` have ``prompt_logprobs``. Raises InvalidRequest for more of them than an
    answer tells of, and PromptTooLong, naming ``param``, when prompt and answer have no room; ``max_tokens`` None is
    what room there is."""
    check_size(prompts, num_scoring, prompt_logprobs, "echo" if fields.prompt_logprobs is None else "prompt_logprobs")
    num_prompt = max(len(prompt.tokens) for prompt in prompts)
    room = service.context_length - num_prompt
    if room < 1 or (max_tokens is not None and max_tokens > room):
        raise PromptTooLong(
            f"{num_prompt} prompt tokens and {max_tokens or 1} new ones exceed the context of "
            f"{service.context_length} tokens",
            param,
        )
    min_tokens = fields.min_tokens or 0
    if min_tokens > (max_tokens or room):
        raise InvalidRequest(f"min_tokens {min_tokens} exceeds max_tokens {max_tokens or room}", "min_tokens")
    defaults = service.generation_defaults
    # -1 is none, as in vLLM and llama.cpp
    seed = secrets.randbits(62) if fields.seed in (None, -1) else fields.seed
    first = SamplingParams(
        max_tokens=max_tokens or room,
        temperature=_given(fields.temperature, defaults.temperature),
        top_k=max(0, _given(fields.top_k, defaults.top_k)),
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, defaults.min_p),
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
        stop_token_ids=fields.stop_token_ids or [],
        min_tokens=min_tokens,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    return [
        msgspec.structs.replace(
            first,
            seed=(seed + number) % 2**63,  # of its own, which follows from the request's: as in vLLM
            prompt_logprobs=prompt_logprobs if number < num_scoring else None,
        )
        for number in range(fields.n or 1)
    ]


def _given(value: N | None, default: N) -> N:
    return default if value is None else value
