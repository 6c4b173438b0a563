"""``/v1/completions``: answers to texts and tokens without a chat template."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from triptych.api.completion_schemas import CompletionRequest
from triptych.api.generation import ChoiceOutput, Generation, RequestContext, check_model, make_sampling_params
from triptych.api.prompt_logprobs import prompt_logprob_entries, scored_tokens
from triptych.api.service import Service
from triptych.api.sse import DONE, event
from triptych.errors import InvalidRequest
from triptych.messages.work import TokenLogprob
from triptych.observe.timeline import Interval
from triptych.prompt.detokenize import REPLACEMENT, Detokenizer
from triptych.prompt.prompt import PlannedPrompt


async def prepare(service: Service, request: CompletionRequest, context: RequestContext) -> Generation:
    """Plan the request's prompts and fix its sampling. Raises RequestError and ServiceError."""
    context = context.with_timeout(request.timeout)
    check_model(service, request.model)
    num_choices = len(request.prompts) * (request.n or 1)
    if num_choices > (limit := service.frontend.admission.max_queue):
        raise InvalidRequest(f"prompt: {num_choices} choices exceed the limit of {limit}", "prompt")
    started = time.time()
    with service.lifecycle.preparing(
        context.record, has_media=False, priority=request.priority or 0, timeout=context.remaining
    ):
        async with context.within_deadline():
            prompts = await service.executor.run(context.record.client, partial(_plan_prompts, service, request))
    planning = Interval("plan", started, time.time())
    context.record.note(planning)
    return Generation(
        service=service,
        prompts=prompts,
        sampling_params=make_sampling_params(
            service,
            request,
            prompts,
            max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.scores_prompt,
            num_scoring=request.n or 1,  # every choice has the prompt's
            grammar=request.grammar_spec,
            param="prompt",
        ),
        fields=request,
        context=context,
        id=f"cmpl-{secrets.token_hex(12)}",
        intervals=[planning],
    )


def _plan_prompts(service: Service, request: CompletionRequest) -> list[PlannedPrompt]:
    return [
        service.prompt_builder.build_text(
            prompt, service.context_length, param=param, add_special_tokens=request.add_special_tokens
        )
        for param, prompt in request.prompts
    ]


class _ChoiceFormatter:
    """Formats the outputs of one choice; with ``echo``, the first begins with the prompt."""

    def __init__(self, generation: Generation, number: int) -> None:
        assert isinstance(generation.fields, CompletionRequest)
        self._request = generation.fields
        self._number = number
        self._tokenizer = generation.service.tokenizer
        self._prompt = generation.prompt_of(number).tokens
        self._scores = generation.prompt_logprobs.get(number)
        self._echoes = bool(self._request.echo)
        self._offset = 0
        """Length of the text so far, for ``text_offset``."""
        self._detokenizer = Detokenizer(self._tokenizer, (), self._request.skip_special_tokens)

    def format(self, output: ChoiceOutput) -> dict[str, Any]:
        """Return the output as a choice of a chunk (``objects.CompletionChoice``)."""
        echoes, self._echoes = self._echoes, False
        return {
            "index": self._number,
            "text": (self._tokenizer.decode(self._prompt) if echoes else "") + output.text,
            "logprobs": self._logprobs(output, echoes=echoes) if self._request.logprobs is not None else None,
            "finish_reason": output.finish_reason,
        }

    def format_complete(self, output: ChoiceOutput) -> dict[str, Any]:
        """Return a complete choice, with the fields that chunks don't have."""
        if (num_top := self._request.prompt_logprobs) is None:
            return self.format(output)
        scored = scored_tokens(self._prompt, self._scores)
        return self.format(output) | {"prompt_logprobs": prompt_logprob_entries(self._tokenizer, scored, num_top)}

    def _logprobs(self, output: ChoiceOutput, *, echoes: bool) -> dict[str, Any]:
        tokens, num_top, offsets = list(output.tokens), self._request.logprobs or 0, list[int]()
        logprobs: list[TokenLogprob | None] = list(output.logprobs)
        if echoes:
            scored = scored_tokens(self._prompt, self._scores)
            offsets = self._offsets(Detokenizer(self._tokenizer), self._prompt)
            self._offset = len(self._tokenizer.decode(self._prompt))
            tokens = [*self._prompt, *tokens]
            # the first token has no log probability, because nothing precedes it
            logprobs = [None, *(TokenLogprob(one.logprob, one.top[:num_top]) for one in scored), *logprobs]
        return {
            "tokens": [self._token_text(token) for token in tokens],
            "token_logprobs": [one and one.logprob for one in logprobs],
            "top_logprobs": [
                # always includes the token itself, as in OpenAI's API
                one and self._by_text([*one.top, (token, one.logprob)])
                for token, one in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets + self._offsets(self._detokenizer, output.tokens),
        }

    def _offsets(self, detokenizer: Detokenizer, tokens: Sequence[int]) -> list[int]:
        """Return where each token's text begins, in characters.

        A token that continues a character has the character's offset. Skipped special tokens have no text."""
        offsets = []
        for token in tokens:
            own, start = self._tokenizer.decode([token]), self._offset
            self._offset += len(detokenizer.push([token]))
            # complete characters follow the replacement of a character that was never completed
            is_complete = own and REPLACEMENT not in own
            offsets.append(max(start, self._offset - len(own)) if is_complete else start)
        return offsets

    def _by_text(self, logprobs: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the log probabilities by text; of tokens with the same text, the likeliest's."""
        texts: dict[str, float] = {}
        for token, logprob in logprobs:
            texts.setdefault(self._token_text(token), logprob)
        return texts

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


async def _outputs(generation: Generation) -> AsyncGenerator[ChoiceOutput, None]:
    """Yield the outputs to send. With ``max_tokens: 0``, one token was generated to score the prompt; it is dropped."""
    assert isinstance(generation.fields, CompletionRequest)
    async with aclosing(generation.stream()) as stream:
        async for output in stream:
            if generation.fields.max_tokens == 0:
                generation.num_generated = 0
                yield ChoiceOutput(output.choice, "", [], [], "length")
            else:
                yield output


async def full_response(generation: Generation) -> dict[str, Any]:
    """Return the answer as one object (``objects.TextCompletion``)."""
    outputs: list[list[ChoiceOutput]] = [[] for _ in range(generation.num_choices)]
    async with aclosing(_outputs(generation)) as stream:
        async for output in stream:
            outputs[output.choice].append(output)
    format_all = partial(_format_choices, generation, [_joined(of_choice) for of_choice in outputs])
    choices: list[Any] = []
    if _has_logprobs(generation):
        # formatted and encoded on another thread, because it takes long enough to delay other requests' tokens
        choices += await generation.service.executor.run(
            generation.context.record.client, lambda: [_as_json(one) for one in format_all()]
        )
    else:
        choices += format_all()
    return _object(generation) | {"choices": choices, "usage": generation.usage} | generation.timeline


def _has_logprobs(generation: Generation) -> bool:
    return any(one.logprobs is not None or one.prompt_logprobs is not None for one in generation.sampling_params)


def _format_choices(generation: Generation, joined: Sequence[ChoiceOutput]) -> Iterator[dict[str, Any]]:
    return (_ChoiceFormatter(generation, one.choice).format_complete(one) for one in joined)


def _as_json(choice: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(choice))


def _joined(outputs: Sequence[ChoiceOutput]) -> ChoiceOutput:
    """Return all outputs of a choice as one."""
    return ChoiceOutput(
        choice=outputs[-1].choice,
        text="".join(output.text for output in outputs),
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=[logprob for output in outputs for logprob in output.logprobs],
        finish_reason=outputs[-1].finish_reason,
    )


async def stream_response(generation: Generation) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events (``objects.TextCompletion``)."""
    options = generation.fields.stream_options
    continuous_usage = options is not None and options.continuous_usage_stats
    formatters: dict[int, _ChoiceFormatter] = {}
    async with aclosing(_outputs(generation)) as stream:
        async for output in stream:
            if (formatter := formatters.get(output.choice)) is None:
                formatter = formatters[output.choice] = _ChoiceFormatter(generation, output.choice)
                choice = await _format_first(generation, formatter, output)
            else:
                choice = formatter.format(output)
            usage = {"usage": generation.usage} if continuous_usage else {}
            yield event(_object(generation) | {"choices": [choice]} | usage)
    last = generation.timeline
    if options is not None and options.include_usage:
        yield event(_object(generation) | {"choices": [], "usage": generation.usage} | last)
    elif last:
        yield event(_object(generation) | {"choices": []} | last)
    yield DONE


async def _format_first(generation: Generation, formatter: _ChoiceFormatter, output: ChoiceOutput) -> dict[str, Any]:
    if generation.sampling_params[0].prompt_logprobs is None:
        return formatter.format(output)
    # on another thread, because a prompt's log probabilities take long enough to delay other requests' tokens
    return await generation.service.executor.run(generation.context.record.client, partial(formatter.format, output))


def _object(generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.service.model_name,
    }
