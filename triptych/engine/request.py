"""A request as the engine sees it: its tokens, and which of them are in the KV cache on which pages."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from triptych.engine.history import History
from triptych.engine.page_tables import PageTables
from triptych.errors import InvalidRequest, PromptTooLong
from triptych.layers.decoder_config import SECOND
from triptych.layers.rope_config import LENGTH_AXIS, LengthRule
from triptych.messages.work import Generate, PlacedItem, PromptLogprobs, SamplingParams
from triptych.types import RequestId, Span


@dataclass(eq=False)
class Request:
    """Prompt, output and progress of one request."""

    id: RequestId
    tokens: list[int]
    """The prompt, followed by the generated tokens, which the loop appends."""
    positions: NDArray[np.float64]
    """Rope positions of the prompt, of shape (3, prompt tokens)."""
    next_position: float
    """Rope position of the first generated token."""
    items: list[PlacedItem]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    cache_salt: str = ""
    rope_length: int | None = None
    """What ``LengthRule.of`` returns for prompt and answer, as long as that may be; None if ropes don't depend on a
    request's length."""
    lora: int | None = None
    """Its LoRA, by its place in ``DecoderConfig.loras``; None: it has none."""
    timeout: float = 0.0
    """Seconds between the request's arrival and its deadline."""
    prefilled_here: bool = True
    """Whether this instance prefills the request. If not, its KV is received from a prefill instance."""
    decoded_here: bool = True
    """Whether this instance decodes the request. If not, its KV is sent to a decode instance."""
    history: History = field(init=False)
    media_spans: list[Span] = field(init=False)
    """The spans of all items, in order: ``make_request`` refuses others."""
    atomic_spans: list[Span] = field(init=False)
    second_spans: list[Span] = field(init=False)
    """Those with tokens of second weights, in order."""

    # Set by the scheduler.
    arrival: int = 0
    """Position in the queue."""
    num_ready: int = 0
    """Ready tokens when the scheduler last checked."""
    running: bool = False
    """Whether the request occupies one of the ``max_num_seqs`` slots."""
    admitted: bool = False
    """Whether a request that another instance prefills has its pages. Its KV follows."""
    sends_pages: bool = False
    """Whether KV is being sent from the pages. Then the request has the pages of all its tokens and can't be
    preempted."""
    num_bypassed: int = 0
    """Times that later requests have taken pages that this one held or needed."""
    num_computed: int = 0
    """Leading tokens whose keys and values have been computed or received; ``tables`` have those that are read."""
    num_reused: int = 0
    """Leading tokens of the prompt that were found in the prefix cache."""
    num_cached_pages: int = 0
    """Leading pages that are, or were, in the prefix cache."""
    tables: PageTables = field(default_factory=list)
    """The request's pages in each group of layers; empty before it is scheduled."""
    page_hashes: list[bytes] = field(default_factory=list)
    alone_until: int = 0
    """Number of tokens up to which it is computed in steps of its own, since a step with its state failed. Set by the
    loop."""

    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's computed chunks, if requested. Set by the loop."""

    def __post_init__(self) -> None:
        self.history = History(self.tokens, len(self.tokens))
        self.media_spans = [span for item in self.items for span in item.placement.spans]
        self.atomic_spans = [span for span in self.media_spans if span.atomic]
        self.second_spans = [span for span in self.media_spans if span.second]

    @property
    def content(self) -> Hashable:
        """Equal for requests whose prompts are."""
        return hash((*self.tokens[: self.num_prompt], *(item.key for item in self.items)))

    @property
    def holds_pages(self) -> bool:
        return any(table.pages for table in self.tables)

    @property
    def num_allocated(self) -> int:
        """Pages in all groups, including released ones."""
        return sum(table.end for table in self.tables)

    @property
    def num_prompt(self) -> int:
        return self.history.num_prompt

    @property
    def num_generated(self) -> int:
        return self.history.num_generated

    @property
    def max_length(self) -> int:
        """Largest number of tokens that the request can reach, including the last one, which is never computed."""
        return self.num_prompt + self.sampling.max_tokens

    @property
    def decoding(self) -> bool:
        """Whether the request runs and exactly its newest token is left to compute."""
        return self.running and self.only_newest_left

    @property
    def only_newest_left(self) -> bool:
        """Whether generation has begun and all but the newest token are computed."""
        return self.num_generated > 0 and self.num_computed == len(self.tokens) - 1

    @property
    def fully_ready(self) -> bool:
        """Whether all tokens are ready."""
        return self.num_ready >= len(self.tokens)

    @property
    def blocked(self) -> bool:
        """Whether nothing is to be computed before media embeddings, KV or a grammar mask arrive."""
        return self.num_ready <= self.num_computed if self.prefilled_here else not self.fully_ready

    @property
    def runs_alone(self) -> bool:
        """Whether its next step must have no other requests."""
        return self.num_computed < self.alone_until

    @property
    def samples_alone(self) -> bool:
        """Whether the newest token is computed in a step of its own. Logits differ in their last bits with the chunk's
        length; with a grammar they must not depend on when the mask arrives."""
        return self.sampling.grammar is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log probabilities are still to be sent. They go out with the first token."""
        return self.sampling.prompt_logprobs is not None and not self.num_generated

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end generation. A grammar ends with the model's own end tokens, even if ``ignore_eos`` is set."""
        ignored = self.sampling.ignore_eos and self.sampling.grammar is None
        return frozenset(self.sampling.stop_token_ids) | (frozenset() if ignored else self.eos_token_ids)

    def finish_reason(self) -> str | None:
        """Return why generation ends with the newest token; None if it doesn't."""
        if self.tokens[-1] in self.end_token_ids and self.num_generated > self.sampling.min_tokens:
            return "stop"
        return "length" if self.num_generated >= self.sampling.max_tokens else None

    def has_media(self, start: int, end: int) -> bool:
        """Return whether one of the tokens ``[start, end)`` has a media embedding."""
        index = bisect_left(self.media_spans, end, key=lambda span: span.start) - 1
        return index >= 0 and self.media_spans[index].end > start

    def span_across(self, token: int) -> Span | None:
        """Return the atomic span that has both ``token`` and the one before it."""
        if not self.atomic_spans:
            return None
        index = bisect_left(self.atomic_spans, token, key=lambda span: span.start) - 1
        return self.atomic_spans[index] if index >= 0 and token < self.atomic_spans[index].end else None

    def ends_of(self, start: int, count: int) -> list[int]:
        """Return where the keys end that each of the tokens ``[start, start + count)`` attends to; nothing if each
        attends up to itself. A span that the tokens end within is cut off there."""
        if not self.atomic_spans:
            return []
        end = start + count
        index = bisect_right(self.atomic_spans, start, key=lambda span: span.end)
        if index == len(self.atomic_spans) or self.atomic_spans[index].start >= end:
            return []
        ends = list(range(start + 1, end + 1))
        for span in self.atomic_spans[index:]:
            if span.start >= end:
                break
            first, last = max(span.start, start), min(span.end, end)
            ends[first - start : last - start] = [last] * (last - first)
        return ends

    @property
    def has_own_weights(self) -> bool:
        """Whether some of its tokens have others than the decoder's weights."""
        return self.lora is not None or bool(self.second_spans)

    def weights_of(self, start: int, count: int) -> list[int | None]:
        """Return the numbers of the weights of tokens ``[start, start + count)``, as in ``TokenChoice``."""
        numbers, end = [self.lora] * count, start + count
        for span in self.second_spans:
            first, last = max(span.start, start), min(span.start + span.second, end)
            if first < last:
                numbers[first - start : last - start] = [SECOND] * (last - first)
        return numbers

    def positions_of(self, start: int, count: int) -> list[list[float]]:
        """Return the rope positions of tokens ``[start, start + count)``: three lists."""
        num_prompt = self.num_prompt
        known = 0 if start >= num_prompt else min(num_prompt - start, count)
        offset = self.next_position - num_prompt
        generated = [token + offset for token in range(start + known, start + count)]
        axes = [generated] * 3
        if known:
            axes = [axis + generated for axis in self.positions[:, start : start + known].tolist()]
        if self.rope_length is not None:
            axes[LENGTH_AXIS] = [float(self.rope_length)] * count
        return axes


def make_request(  # noqa: PLR0917 (a message, and the model's limits)
    message: Generate,
    generated: list[int],
    context_length: int,
    vocab_size: int,
    length_rule: LengthRule | None = None,
    loras: Sequence[str] = (),
    *,
    step_tokens: int | None = None,
    has_second_weights: bool = False,
) -> Request:
    """Convert a message to a request. ``length_rule`` and ``loras``, their names, are those of ``DecoderConfig``, and
    ``step_tokens`` the largest step's tokens; None where prompts aren't computed. ``has_second_weights`` says whether
    the decoder has any. Raises RequestError for an invalid message: other processes aren't trusted."""
    num_tokens = len(message.tokens)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty")
    if num_tokens + message.sampling.max_tokens > context_length:
        raise PromptTooLong.of(context_length, num_tokens, message.sampling.max_tokens, param=None)
    sampling = message.sampling
    if len(generated) >= sampling.max_tokens:
        raise InvalidRequest("the answer already has max_tokens tokens")
    _check_vocabulary(message, generated, vocab_size)
    if len(message.positions) != 3 * 8 * num_tokens:
        raise InvalidRequest("positions don't match the prompt's length")
    if message.lora and message.lora not in loras:
        raise InvalidRequest(f"the model has no LoRA {message.lora[:50]!r}")
    end = 0
    for item in message.items:
        for span in item.placement.spans:
            if span.start < end or span.length < 1 or span.end > num_tokens:
                raise InvalidRequest("an item's span is not in the prompt, or not in order")
            if span.second > (span.length if has_second_weights else 0):
                raise InvalidRequest("an item's span has tokens with second weights that the model doesn't have")
            end = span.end
        if not item.placement.spans:
            raise InvalidRequest("an item has no span in the prompt")
        if any(section.rows < 1 for section in item.sections):
            raise InvalidRequest("an item's sections are not in order")
    request = Request(
        id=message.request,
        tokens=list(message.tokens),
        positions=np.frombuffer(message.positions, dtype="<f8").reshape(3, num_tokens),
        next_position=message.next_position,
        items=message.items,
        sampling=message.sampling,
        eos_token_ids=frozenset(message.eos_token_ids),
        cache_salt=message.cache_salt,
        lora=loras.index(message.lora) if message.lora else None,
        timeout=message.timeout,
        # the last token of the answer isn't computed
        rope_length=None if length_rule is None else length_rule.of(num_tokens + message.sampling.max_tokens - 1),
    )
    _check_spans(request, step_tokens)
    request.tokens += generated
    return request


def _check_vocabulary(message: Generate, generated: list[int], vocab_size: int) -> None:
    budget = message.sampling.reasoning_budget
    named: dict[str, Collection[int]] = {
        "prompt": [*message.tokens, *generated],
        "stop_token_ids": [*message.eos_token_ids, *message.sampling.stop_token_ids],
        "logit_bias": message.sampling.logit_bias,
        "thinking_token_budget": () if budget is None else (*budget.opening, *budget.end),
    }
    for param, ids in named.items():
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"{param}: token {token} is out of vocabulary, which has {vocab_size}", param)


def _check_spans(request: Request, step_tokens: int | None) -> None:
    longest = max((span.length for span in request.atomic_spans), default=0)
    if step_tokens is not None and longest > step_tokens:
        raise InvalidRequest(
            f"one step must compute the {longest} tokens of an item, but --max-num-batched-tokens is {step_tokens}"
        )
    if longest and request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "there are no prompt_logprobs with such items, whose tokens attend to later ones", "prompt_logprobs"
        )
