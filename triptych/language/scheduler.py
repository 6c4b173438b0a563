"""Which sequence computes which tokens in the next step. Holds no device and no socket.

Decodes go first, one token each; what is left of the token budget goes to prefill chunks, in order of arrival, over
the longest run of tokens that are ready. A sequence starts when the pages for all its tokens are free, and takes them
as it needs them; when none is left, the sequence that arrived last gives up its own and is computed again later. The
first to have arrived need not wait and can take every page there is, and any sequence fits in the pool alone, so
everything ends.

A sequence begins with the pages of its prefix that the pool still knows. It holds them from its arrival on, because
what it asks the encoder for depends on them; like all pages, those who arrived before it can take them away. One whose
prompt's log probabilities are wanted computes all of it: of a prefix, keys and values are known, not logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from triptych.language.kv_cache import PagePool
from triptych.language.prefix import extend_page_keys
from triptych.language.sequence import Sequence
from triptych.types import RequestId

MAX_SCORED = 64
"""Tokens of prompts whose log probabilities one step may tell. Each takes a row of logits: 64 take 39 MB for a
vocabulary of 152,000, and the head's work of as many sequences that decode."""

ReadyTokens = Callable[[Sequence], int]
"""How many of a sequence's tokens, from the first on, are ready: text always is, a media token once its row landed."""


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + length)`` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the newest token, so that the step yields the next one."""
        return self.start + self.length == len(self.sequence.tokens)

    @property
    def num_scored(self) -> int:
        """Of how many of its first tokens the logits tell of the prompt: of all that have another behind them."""
        if not self.sequence.scores_prompt:
            return 0
        return min(self.start + self.length, self.sequence.num_prompt - 1) - self.start

    @property
    def wanted(self) -> range:
        """The tokens whose logits are wanted, counted from the chunk's first."""
        first = 0 if self.num_scored else self.length - self.samples
        return range(first, self.length if self.samples else first + self.num_scored)


@dataclass
class Step:
    """One scheduler decision. ``admitted`` sequences, whose prefill is another's work, have got their pages;
    ``preempted`` ones have lost theirs, and with them their media rows."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_scored(self) -> int:
        return sum(chunk.num_scored for chunk in self.chunks)


class Scheduler:
    """Continuous batching over a pool of KV pages."""

    def __init__(
        self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int, *, reuse_prefixes: bool = True
    ) -> None:
        self.pool = pool
        self._reuse_prefixes = reuse_prefixes
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._sequences: dict[RequestId, Sequence] = {}
        self._arrivals = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the line, with the pages of its prefix that are known."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._sequences[sequence.request] = sequence
        self._reuse(sequence, len(sequence.tokens) - 1)  # the last token must be computed: its logits are wanted
        self.num_prefix_queries += len(sequence.tokens) if self._may_reuse(sequence) else 0
        self.num_prefix_hits += sequence.num_reused

    def remove(self, request: RequestId) -> Sequence | None:
        """Takes a sequence out, whatever it was doing, and its pages back."""
        if sequence := self._sequences.pop(request, None):
            self._release(sequence)
        return sequence

    def get(self, request: RequestId) -> Sequence | None:
        return self._sequences.get(request)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._sequences.values()))

    def __len__(self) -> int:
        return len(self._sequences)

    def schedule(self, ready: ReadyTokens) -> Step:
        """Decides the next step and takes its pages. A step without chunks: nothing is ready."""
        step = Step()
        running = list(self._sequences.values())[: self._max_num_seqs]
        for sequence in running:
            if sequence.decoding:
                self._add_chunk(step, sequence, len(sequence.tokens))
        for sequence in running:
            if sequence.decoding:
                continue
            if sequence.prefilled_here:
                found = self._add_chunk(step, sequence, ready(sequence))
            else:
                found = self._admit(step, sequence)
            if not found:
                break  # those behind it would take the pages it waits for, and new ones would do so for ever
        return step

    def computed(self, step: Step) -> None:
        """The step has run: its tokens are in the cache."""
        for chunk in step.chunks:
            if self._sequences.get(chunk.sequence.request) is chunk.sequence:
                chunk.sequence.num_computed = chunk.start + chunk.length
                self._publish(chunk.sequence)

    def arrived(self, sequence: Sequence, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of a sequence that another instance prefills are in its pages."""
        sequence.num_computed = num_tokens
        self._publish(sequence)

    def start_over(self, sequence: Sequence) -> None:
        """Takes a sequence's pages; it gets others when it is its turn again."""
        self._release(sequence)

    def _admit(self, step: Step, sequence: Sequence) -> bool:
        """Takes the pages for what another instance prefills. False when they are this sequence's turn to have, and
        aren't there."""
        if sequence.running or sequence in step.preempted or not self._may_start(sequence):
            return True
        if not sequence.pages:
            self._reuse(sequence, len(sequence.tokens) - 1)
        if not self._take_pages(step, sequence, len(sequence.tokens)):
            return False
        sequence.running = True
        if not sequence.decoding:  # of one that lost its pages, others may have kept all that is needed
            step.admitted.append(sequence)
        return True

    def _add_chunk(self, step: Step, sequence: Sequence, ready: int) -> bool:
        """Adds what the budget allows of the tokens below ``ready``. False when a sequence under way finds no pages
        for them."""
        if ready <= sequence.num_computed or step.num_tokens >= self._budget or sequence in step.preempted:
            return True
        if not sequence.running:
            if not self._may_start(sequence):
                return True
            if not sequence.pages:
                self._reuse_late(sequence)
        length = min(ready - sequence.num_computed, self._budget - step.num_tokens)
        if sequence.scores_prompt:
            length = min(length, MAX_SCORED - step.num_scored)
        if length <= 0:
            return True
        wanted = sequence.num_computed + length if sequence.decoded_here else len(sequence.tokens)
        if not self._take_pages(step, sequence, wanted):
            return False
        sequence.running = True
        step.chunks.append(Chunk(sequence, sequence.num_computed, length))
        return True

    def _may_start(self, sequence: Sequence) -> bool:
        """Without this, sequences that don't fit beside the running ones would start, be preempted, and start again.

        One that keeps its pages, since its KV is being sent, starts in its turn only: if it passed another, it could
        wait for rows that find no room beside the other's, which waits for its pages."""
        if not sequence.decoded_here:
            return sequence is next(other for other in self._sequences.values() if not other.running)
        first = next(iter(self._sequences.values()))
        missing = self.pool.pages_for(len(sequence.tokens)) - len(sequence.pages)
        return sequence is first or missing <= self.pool.num_free

    def _take_pages(self, step: Step, sequence: Sequence, tokens: int) -> bool:
        missing = self.pool.pages_for(tokens) - len(sequence.pages)
        while missing > self.pool.num_free:
            victim = self._victim(step, sequence)
            if victim is None:
                return False
            self._release(victim)
            step.preempted.append(victim)
            self.num_preemptions += 1
        if missing > 0:
            sequence.pages += self.pool.take(missing)
        return True

    def _victim(self, step: Step, sequence: Sequence) -> Sequence | None:
        """The last to have arrived of those behind ``sequence`` that hold pages and aren't in this step already."""
        busy = {id(chunk.sequence) for chunk in step.chunks}
        behind = (s for s in self._sequences.values() if s.pages and s.arrival > sequence.arrival)
        holders = (s for s in behind if id(s) not in busy and (s.decoded_here or not s.running))
        return max(holders, key=lambda s: s.arrival, default=None)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.pages)
        sequence.pages = []
        sequence.running = False
        sequence.num_computed = sequence.num_published = sequence.num_reused = 0
        sequence.prompt_logprobs = []

    # ── prefixes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _may_reuse(self, sequence: Sequence) -> bool:
        return self._reuse_prefixes and not sequence.scores_prompt

    def _reuse(self, sequence: Sequence, num_tokens: int) -> None:
        """Begins with what is known of the first ``num_tokens`` tokens, in whole pages."""
        if not self._may_reuse(sequence):
            return
        num_pages = num_tokens // self.pool.page_size
        extend_page_keys(sequence, self.pool.page_size, num_pages)
        sequence.pages = self.pool.find(sequence.page_keys[:num_pages])
        sequence.num_published = len(sequence.pages)
        sequence.num_computed = sequence.num_reused = len(sequence.pages) * self.pool.page_size

    def _reuse_late(self, sequence: Sequence) -> None:
        """The same for one that begins only now, or again. Its media rows are on their way already."""
        media = sequence.items[0].placement.start if sequence.items else len(sequence.tokens)
        self._reuse(sequence, min(media, len(sequence.tokens) - 1))

    def _publish(self, sequence: Sequence) -> None:
        """Lets others find the pages that are full now."""
        if not self._reuse_prefixes:
            return
        full = sequence.num_computed // self.pool.page_size
        extend_page_keys(sequence, self.pool.page_size, full)
        for index in range(sequence.num_published, full):
            self.pool.publish(sequence.pages[index], sequence.page_keys[index])
        sequence.num_published = full
