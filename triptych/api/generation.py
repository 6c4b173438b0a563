"""Generation from planned prompts to a stream of text: what all generating endpoints share."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from triptych.api.context import ApiContext
from triptych.api.fields import SamplingFields
from triptych.api.merge_streams import merge_streams
from triptych.api.prompt_logprobs import check_num_logprobs
from triptych.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, UnknownModel
from triptych.messages.work import PromptLogprobs, ReasoningBudget, SamplingParams, TokenLogprob, Tokens
from triptych.observe.requests import RequestRecord
from triptych.observe.timeline import Interval, as_json
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.media import RequestMedia
from triptych.prompt.prompt import PlannedPrompt
from triptych.prompt.tokenizer import Tokenizer
from triptych.router.stream import TokenStream

N = TypeVar("N")

TOKEN_BYTES, LOGPROB_BYTES, INT32_BYTES = 400, 100, 4
"""About the bytes of memory of a token in a report, and of a log probability; bytes of a token in an array."""
NO_MODEL = (None, "", "default", "dummy")
"""What clients send that were given no model's name: huggingface_hub sends ``dummy``, and SGLang's examples
``default``."""


@dataclass(frozen=True)
class RequestContext:
    """Properties of a request that its body doesn't hold."""

    record: RequestRecord
    """Record of the HTTP request."""
    scope: str
    """Digest of the client's API key. Cached media are visible only to requests of the same scope."""
    deadline: float
    """When the request expires, by its record's clock."""
    media: RequestMedia
    """Source of the request's media."""
    hold: Callable[[int], object] = lambda _: None
    """Called with bytes that are kept for the answer, negative ones when they are not kept any more; it may raise."""
    timeline: bool = False
    """Whether the answer includes its timeline."""

    def with_timeout(self, timeout: float | None) -> "RequestContext":
        """Return this context with a deadline at most ``timeout`` seconds from now."""
        if timeout is None:
            return self
        return replace(self, deadline=min(self.deadline, self.record.clock.now() + timeout))

    @asynccontextmanager
    async def within_deadline(self) -> AsyncGenerator[None, None]:
        """Raise DeadlineExceeded if the body, which prepares the prompt, doesn't end before the deadline."""
        try:
            async with asyncio.timeout(self.remaining):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while its prompt was prepared") from None

    @property
    def remaining(self) -> float:
        """Seconds until the deadline. Raises DeadlineExceeded when it has passed."""
        if (remaining := self.deadline - self.record.clock.now()) <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was dispatched")
        return remaining


@dataclass(frozen=True)
class ChoiceOutput:
    """What one message from the engine adds to a choice."""

    choice: int
    pieces: list[str]
    """The text that each token adds, and last what the end adds. May be empty."""
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """One for each token if the request asks for them, otherwise none."""
    finish_reason: str | None
    """Set in a choice's last output."""
    begins_text: bool = False
    """Whether the first token is the first one of a text."""
    ids: list[int] = field(default_factory=list)
    """All tokens, a stop token included, which ``tokens`` doesn't have."""
    stop_reason: str | int | None = None
    """The stop string, or the token of ``stop_token_ids``, that ended the choice; in its last output."""

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(self.pieces)


@dataclass
class Generation:
    """The answer to one HTTP request: one or more choices, each a request of its own to the router.

    Choices are numbered prompt by prompt. ``usage`` and ``intervals`` are final once ``stream`` has ended."""

    api: ApiContext
    prompts: list[PlannedPrompt]
    sampling_params: list[SamplingParams]
    """For each choice of a prompt; the same for every prompt."""
    fields: SamplingFields
    context: RequestContext
    id: str
    intervals: list[Interval] = field(default_factory=list)
    keep_special: Collection[int] = ()
    """Special tokens that are part of the text although ``fields.skip_special_tokens`` is True."""
    preceding: Sequence[Sequence[int]] = ()
    """For each prompt the tokens whose text its answers continue; none for answers that begin a text."""
    created: int = field(default_factory=lambda: int(time.time()))
    num_generated: int = 0
    """Generated tokens of all choices."""
    num_reasoning: int = 0
    """How many of the generated tokens are reasoning."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By choice, available from its first output on, if the request asks for them."""
    _cached: dict[int, int] = field(default_factory=dict)
    """By prompt, the number of its tokens that were in the KV cache."""
    _streams: list[TokenStream] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The name of the model that answers."""
        return self.api.model_name

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * len(self.sampling_params)

    def prompt_of(self, choice: int) -> PlannedPrompt:
        return self.prompts[choice // len(self.sampling_params)]

    def preceding_of(self, choice: int) -> Sequence[int]:
        """Return the tokens whose text a choice continues."""
        return self.preceding[choice // len(self.sampling_params)] if self.preceding else ()

    @property
    def timeline(self) -> dict[str, Any]:
        """The field ``timeline`` of the answer if the request asks for it, otherwise nothing."""
        return {"timeline": as_json(self.intervals)} if self.context.timeline else {}

    async def stream(self) -> AsyncGenerator[ChoiceOutput, None]:
        """Yield the outputs of all choices as they arrive. Cancels the requests if it is closed early.

        Raises RequestError and ServiceError."""
        try:
            texts = [
                ChoiceText(self.api.tokenizer, self.fields, self.keep_special, self.preceding_of(number))
                for number in range(self.num_choices)
            ]
            self._streams.extend(self._submit(*numbered) for numbered in enumerate(texts))
            choices = [self._outputs(number, *one) for number, one in enumerate(zip(texts, self._streams, strict=True))]
            async with aclosing(merge_streams(choices)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            for one in self._streams:
                self.api.lifecycle.cancel(one.request)
                self.intervals += one.intervals

    def end(self, choice: int) -> None:
        """Stop generating a choice; it has no further outputs.

        Tokens that arrived since its last output were generated, so they count."""
        stream = self._streams[choice]
        self.api.lifecycle.complete(stream.request)
        self.num_generated += stream.num_unread
        stream.close()

    def _submit(self, choice: int, text: "ChoiceText") -> TokenStream:
        prompt = self.prompt_of(choice)
        if self.api.recorder is not None:
            self.api.recorder.asked(self.context.record, prompt)
        return self.api.lifecycle.submit(
            self.context.record,
            prompt,
            self.sampling_params[choice % len(self.sampling_params)],
            sorted(self.api.tokenizer.eos_token_ids),
            self.fields.cache_salt or "",
            timeout=self.context.remaining,
            priority=self.fields.priority or 0,
            read=partial(self._read, text),
        )

    def _read(self, text: "ChoiceText", report: Tokens) -> Tokens:
        """Return the part of a report that belongs to the answer, after holding its memory. Raises what ``hold``
        does."""
        part = text.read(report)
        self.context.hold(_num_bytes(part))
        return part

    async def _outputs(
        self, number: int, text: "ChoiceText", tokens: TokenStream
    ) -> AsyncGenerator[ChoiceOutput, None]:
        prompt = number // len(self.sampling_params)
        begins_text = not self.preceding_of(number)
        async for report in tokens:
            self._cached[prompt] = max(self._cached.get(prompt, 0), report.reused)
            if report.prompt_logprobs is not None:
                self.prompt_logprobs[number] = report.prompt_logprobs
            self.num_generated += len(report.tokens)
            shown = text.shown(report)
            yield ChoiceOutput(
                choice=number,
                pieces=text.take(report),
                tokens=shown,
                logprobs=report.logprobs[: len(shown)],
                finish_reason=report.finish_reason,
                begins_text=begins_text,
                ids=report.tokens,
                stop_reason=self._stop_reason(text, report),
            )
            begins_text = begins_text and not shown
            # the client has read it; an answer that isn't streamed keeps log probabilities until its end
            self.context.hold(-_num_bytes(report) if self.fields.stream else -TOKEN_BYTES * len(report.tokens))

    def _stop_reason(self, text: "ChoiceText", report: Tokens) -> str | int | None:
        if report.finish_reason != "stop" or text.stop_string is not None or not report.tokens:
            return text.stop_string if report.finish_reason == "stop" else None
        last, ends = report.tokens[-1], () if self.fields.ignore_eos else self.api.tokenizer.eos_token_ids
        return last if last in (self.fields.stop_token_ids or ()) and last not in ends else None

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in the format of OpenAI's ``usage``."""
        prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        } | ({"completion_tokens_details": {"reasoning_tokens": self.num_reasoning}} if self.num_reasoning else {})


class ChoiceText:
    """Detokenized text of one choice.

    The router calls ``read`` when a message arrives, not when the client takes it. So a stop string ends the choice at
    its instance at once, and no token after it counts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        fields: SamplingFields,
        keep_special: Collection[int] = (),
        preceding: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            fields.stop_strings,
            fields.skip_special_tokens,
            fields.min_tokens or 0,
            keep_special=keep_special,
            preceding=preceding,
        )
        self._untaken: list[str] = []
        self._by_token = False
        """Whether a stop token has ended the answer, not a stop string."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ends the answer, once it was found."""
        return self._detokenizer.stop_string

    def read(self, report: Tokens) -> Tokens:
        """Return the report up to the token that completes a stop string."""
        self._by_token = report.finish_reason == "stop"
        for used, token in enumerate(self.shown(report), start=1):
            self._untaken.append(self._detokenizer.push([token]))
            if self._detokenizer.stopped:
                self._by_token = False
                return _cut(report, used)
        if report.finish_reason is not None:
            self._untaken.append(self._detokenizer.finish())
            if self._detokenizer.stopped:
                # the stop string was completed by the end of the text, so every token belongs to the answer
                return _cut(report, len(report.tokens))
        return report

    def shown(self, report: Tokens) -> list[int]:
        """Return the tokens that are part of the text: all but a stop token, as in vLLM."""
        return report.tokens[:-1] if self._by_token and report.finish_reason is not None else report.tokens

    def take(self, report: Tokens) -> list[str]:
        """Return the text that each of the report's tokens adds, and what the end adds. Reports must be passed in
        order."""
        count = len(report.tokens) if report.finish_reason is None else len(self._untaken)
        texts, self._untaken = self._untaken[:count], self._untaken[count:]
        return texts


def _num_bytes(report: Tokens) -> int:
    """Return about how much memory a report takes, in bytes."""
    listed = sum(1 + len(one.top) for one in report.logprobs)
    prompt = len(report.prompt_logprobs.tokens) // INT32_BYTES if report.prompt_logprobs else 0
    return TOKEN_BYTES * len(report.tokens) + LOGPROB_BYTES * (listed + prompt)


def _cut(report: Tokens, used: int) -> Tokens:
    return msgspec.structs.replace(
        report, tokens=report.tokens[:used], logprobs=report.logprobs[:used], finish_reason="stop"
    )


def check_model(api: ApiContext, model: str | None) -> None:
    """Raise UnknownModel unless the name is that of the served model, of one that a language server has beside it, or
    none."""
    if model not in (*NO_MODEL, api.model_name) and not (api.servers and model and api.servers.knows(model)):
        raise UnknownModel(f"model {model!r} is not served here; {api.model_name!r} is", "model")


def make_sampling_params(
    api: ApiContext,
    fields: SamplingFields,
    prompts: list[PlannedPrompt],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    num_scoring: int,
    grammar: str | None,
    param: str,
    reasoning_budget: ReasoningBudget | None = None,
) -> list[SamplingParams]:
    """Return the sampling parameters of each choice; unset fields take the checkpoint's defaults, as in vLLM.

    ``max_tokens`` None means what ``default_room`` says. The first ``num_scoring`` choices of a prompt return
    ``prompt_logprobs``. Raises InvalidRequest for too many of those or a contradiction, and PromptTooLong, naming
    ``param`` or the answer's length, if prompt and answer exceed the context."""
    check_num_logprobs(
        prompts, num_scoring, prompt_logprobs, "echo" if fields.prompt_logprobs is None else "prompt_logprobs"
    )
    num_prompt = max(len(prompt.tokens) for prompt in prompts)
    room = api.context_length - num_prompt
    if room < 1 or (max_tokens is not None and max_tokens > room):
        if room >= 1:
            param = "max_completion_tokens" if getattr(fields, "max_completion_tokens", None) else "max_tokens"
        raise PromptTooLong.of(api.context_length, num_prompt, max_tokens or 1, param=param)
    min_tokens = fields.min_tokens or 0
    max_tokens = max_tokens or default_room(room, num_prompt, min_tokens, api.prompt_builder.short_length)
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {min_tokens} exceeds max_tokens {max_tokens}", "min_tokens")
    defaults = api.generation_defaults
    # -1 means no seed, as in vLLM and llama.cpp
    seed = secrets.randbits(62) if fields.seed in (None, -1) else fields.seed
    first = SamplingParams(
        max_tokens=max_tokens,
        temperature=given(fields.temperature, defaults.temperature),
        top_k=max(0, given(fields.top_k, defaults.top_k)),
        top_p=given(fields.top_p, defaults.top_p),
        min_p=given(fields.min_p, defaults.min_p),
        repetition_penalty=given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=given(fields.presence_penalty, 0.0),
        frequency_penalty=given(fields.frequency_penalty, 0.0),
        logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
        stop_token_ids=fields.stop_token_ids or [],
        min_tokens=min_tokens,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        reasoning_budget=reasoning_budget,
    )
    return [
        msgspec.structs.replace(
            first,
            seed=(seed + number) % 2**63,  # each choice has its own, as in vLLM
            prompt_logprobs=prompt_logprobs if number < num_scoring else None,
        )
        for number in range(fields.n or 1)
    ]


def default_room(room: int, num_prompt: int, min_tokens: int, short_length: int | None) -> int:
    """Return the tokens that an answer may have if the request doesn't say: ``room``, the rest of the context.

    Where ropes depend on a request's length, a short prompt keeps the frequencies of short requests, as in
    transformers; a client that names more tokens decides otherwise.
    """
    if short_length is None or num_prompt > short_length:
        return room
    short = short_length + 1 - num_prompt  # the last token of the answer isn't computed
    return room if min_tokens > short else min(room, short)


def given(value: N | None, default: N) -> N:
    """Return the value, or the default for none."""
    return default if value is None else value
