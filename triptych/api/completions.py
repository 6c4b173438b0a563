"""``/v1/completions``: answers to texts and tokens without a chat template."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from triptych.api.completion_schemas import CompletionRequest
from triptych.api.context import ApiContext
from triptych.api.generation import ChoiceOutput, Generation, RequestContext, check_model, make_sampling_params
from triptych.api.prompt_logprobs import prompt_logprob_entries, scored_tokens
from triptych.api.sse import DONE, event
from triptych.api.text_offsets import TextOffsets, TokenPlace
from triptych.errors import InvalidRequest
from triptych.messages.work import TokenLogprob
from triptych.observe.timeline import Interval
from triptych.prompt.answer_grammar import AnswerGrammar
from triptych.prompt.prompt import PlannedPrompt


async def prepare(api: ApiContext, request: CompletionRequest, context: RequestContext) -> Generation:
    """Plan the request's prompts and fix its sampling. Raises RequestError and ServiceError."""
    context = context.with_timeout(request.timeout)
    check_model(api, request.model)
    num_choices = len(request.prompts) * (request.n or 1)
    if num_choices > (limit := api.frontend.admission.max_queue):
        raise InvalidRequest(f"prompt: {num_choices} choices exceed the limit of {limit}", "prompt")
    started = context.record.now()
    with api.lifecycle.preparing(
        context.record, has_media=False, priority=request.priority or 0, timeout=context.remaining
    ):
        async with context.within_deadline():
            prompts = await api.executor.run(context.record.client, partial(_plan_prompts, api, request))
    grammar = None
    if request.is_constrained:
        grammar = await api.grammars.checked(context.record.client, partial(_answer_grammar, request))
    planning = Interval("plan", started, context.record.now())
    context.record.note(planning)
    return Generation(
        api=api,
        prompts=prompts,
        sampling_params=make_sampling_params(
            api,
            request,
            prompts,
            max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.scores_prompt,
            num_scoring=request.n or 1,  # every choice has the prompt's
            grammar=grammar,
            param="prompt",
        ),
        fields=request,
        context=context,
        id=f"cmpl-{secrets.token_hex(12)}",
        intervals=[planning],
        preceding=[_preceding(api, request, prompt) for prompt in prompts],
    )


def _answer_grammar(request: CompletionRequest) -> AnswerGrammar | None:
    text = request.text_grammar
    return text.alone() if text is not None else None


def _plan_prompts(api: ApiContext, request: CompletionRequest) -> list[PlannedPrompt]:
    return [
        api.prompt_builder.build_text(
            prompt, api.context_length, param=param, add_special_tokens=request.add_special_tokens
        )
        for param, prompt in request.prompts
    ]


def _preceding(api: ApiContext, request: CompletionRequest, prompt: PlannedPrompt) -> list[int]:
    """Return the tokens whose text the answer continues: the prompt's own, and of its special tokens those in the
    text."""
    before, after = prompt.num_added
    own = prompt.tokens[before : len(prompt.tokens) - after]
    return api.tokenizer.context_of(own, skip_special_tokens=request.skip_special_tokens and not request.echo)


class _ChoiceFormatter:
    """Formats the outputs of one choice; with ``echo``, the first begins with the prompt."""

    def __init__(self, generation: Generation, number: int) -> None:
        assert isinstance(generation.fields, CompletionRequest)
        self._request = generation.fields
        self._number = number
        self._tokenizer = generation.api.tokenizer
        self._prompt = generation.prompt_of(number)
        self._scores = generation.prompt_logprobs.get(number)
        self.echoes = bool(self._request.echo)
        """Whether the next output begins with the prompt."""
        self._is_first = True
        self._hidden = self._tokenizer.special_ids if self._request.skip_special_tokens else frozenset()
        self._offsets = TextOffsets(self._tokenizer, () if self.echoes else generation.preceding_of(number))

    def format(self, output: ChoiceOutput) -> dict[str, Any]:
        """Return the output as a choice of a chunk (``objects.CompletionChoice``)."""
        is_first, self._is_first = self._is_first, False
        echo = self._echo() if self.echoes else []
        text = self._offsets.text if self.echoes else ""
        self.echoes = False
        made = {
            "index": self._number,
            "text": text + output.text,
            "logprobs": self._logprobs(output, echo) if self._request.logprobs is not None else None,
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason:
            made["stop_reason"] = output.stop_reason
        if self._request.return_token_ids:
            made |= ({"prompt_token_ids": self._prompt.tokens} if is_first else {}) | {"token_ids": output.ids}
        return made

    def format_complete(self, output: ChoiceOutput) -> dict[str, Any]:
        """Return a complete choice, with the fields that chunks don't have."""
        if (num_top := self._request.prompt_logprobs) is None:
            return {"prompt_token_ids": None, "prompt_logprobs": None} | self.format(output)
        scored = scored_tokens(self._prompt.tokens, self._scores)
        return self.format(output) | {"prompt_logprobs": prompt_logprob_entries(self._tokenizer, scored, num_top)}

    def _echo(self) -> list[TokenPlace]:
        """Decode the prompt and return the places of its tokens. Those that the tokenizer put around a text aren't part
        of it; all others are, special ones included."""
        before, after = self._prompt.num_added
        end = len(self._prompt.tokens) - after
        places = [
            self._offsets.add(token) if before <= number < end else self._offsets.end
            for number, token in enumerate(self._prompt.tokens)
        ]
        self._offsets.pause()
        return places

    def _logprobs(self, output: ChoiceOutput, echo: list[TokenPlace]) -> dict[str, Any]:
        tokens, num_top = list(output.tokens), self._request.logprobs or 0
        logprobs: list[TokenLogprob | None] = list(output.logprobs)
        # skipped special tokens have no text
        own = [self._offsets.end if token in self._hidden else self._offsets.add(token) for token in tokens]
        if echo:
            scored = scored_tokens(self._prompt.tokens, self._scores)
            tokens = [*self._prompt.tokens, *tokens]
            # the first token has no log probability, because nothing precedes it
            logprobs = [None, *(TokenLogprob(one.logprob, one.top[:num_top]) for one in scored), *logprobs]
        places = echo + own
        return {
            "tokens": [self._spelled(token, place) for token, place in zip(tokens, places, strict=True)],
            "token_logprobs": [one and one.logprob for one in logprobs],
            "top_logprobs": [
                # always includes the token itself, as in OpenAI's API
                one and self._by_text([*one.top, (token, one.logprob)], place)
                for token, one, place in zip(tokens, logprobs, places, strict=True)
            ],
            "text_offset": [place.offset for place in places],
        }

    def _by_text(self, logprobs: Sequence[tuple[int, float]], place: TokenPlace) -> dict[str, float]:
        """Return the log probabilities by text; of tokens with the same text, the likeliest's."""
        texts: dict[str, float] = {}
        for token, logprob in logprobs:
            texts.setdefault(self._spelled(token, place), logprob)
        return texts

    def _spelled(self, token: int, place: TokenPlace) -> str:
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._tokenizer.text_of(token, first=place.is_first)


async def _outputs(generation: Generation) -> AsyncGenerator[ChoiceOutput, None]:
    """Yield the outputs to send. With ``max_tokens: 0``, one token was generated to score the prompt; it is dropped."""
    assert isinstance(generation.fields, CompletionRequest)
    async with aclosing(generation.stream()) as stream:
        async for output in stream:
            if generation.fields.max_tokens == 0:
                generation.num_generated = 0
                yield ChoiceOutput(output.choice, [], [], [], "length")
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
    if _takes_long(generation):
        # formatted and encoded on another thread, because it takes long enough to delay other requests' tokens
        choices += await generation.api.executor.run(
            generation.context.record.client, lambda: [_as_json(one) for one in format_all()]
        )
    else:
        choices += format_all()
    return _object(generation) | {"choices": choices, "usage": generation.usage} | generation.timeline


def _takes_long(generation: Generation) -> bool:
    assert isinstance(generation.fields, CompletionRequest)
    scored = any(one.logprobs is not None or one.prompt_logprobs is not None for one in generation.sampling_params)
    return scored or bool(generation.fields.echo)


def _format_choices(generation: Generation, joined: Sequence[ChoiceOutput]) -> Iterator[dict[str, Any]]:
    return (_ChoiceFormatter(generation, one.choice).format_complete(one) for one in joined)


def _as_json(choice: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(choice))


def _joined(outputs: Sequence[ChoiceOutput]) -> ChoiceOutput:
    """Return all outputs of a choice as one."""
    return ChoiceOutput(
        choice=outputs[-1].choice,
        pieces=[piece for output in outputs for piece in output.pieces],
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=[logprob for output in outputs for logprob in output.logprobs],
        finish_reason=outputs[-1].finish_reason,
        ids=[token for output in outputs for token in output.ids],
        stop_reason=outputs[-1].stop_reason,
    )


async def stream_response(generation: Generation) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events (``objects.TextCompletion``).

    A token without text, such as a hidden one, has no event: what belongs to it comes with the next. With the usage so
    far, it has one, so that clients see when each token came."""
    options = generation.fields.stream_options
    continuous_usage = options is not None and options.include_usage and options.continuous_usage_stats
    formatters: dict[int, _ChoiceFormatter] = {}
    held: dict[int, list[ChoiceOutput]] = {}
    async with aclosing(_outputs(generation)) as stream:
        async for one in stream:
            held.setdefault(one.choice, []).append(one)
            if not one.text and one.finish_reason is None and not continuous_usage:
                continue
            output = _joined(held.pop(one.choice))
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
    if generation.sampling_params[0].prompt_logprobs is None and not formatter.echoes:
        return formatter.format(output)
    # on another thread, because a prompt takes long enough to delay other requests' tokens
    return await generation.api.executor.run(generation.context.record.client, partial(formatter.format, output))


def _object(generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.model,
    }
