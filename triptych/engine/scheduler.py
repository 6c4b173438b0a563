"""Which sequence computes which tokens in the next step. Holds no device and no socket.

A sequence *waits* while nothing beyond its computed tokens is ready: its media rows, its KV or its grammar are still
to come. The others are *ready*, and are served in order of arrival. ``max_num_seqs`` of them run at a time. Decodes go
first, one token each, then prompts whose KV is being sent; what is left of the token budget goes to prefill chunks,
over the longest run of tokens that are ready.

A sequence that waits doesn't run. An answer under way that had to wait takes the place of one that arrived later
(``_give_places_back``). A sequence that waits keeps its pages, but these are the first to be taken when pages run out.
A sequence may take the pages of those that rank after it:

- First rank those that are *wholly* ready, so that they end without waiting again, in order of arrival.
- The others follow in order of arrival. They can't take pages from the first, who would take them back.
- One of the others at a time ranks with the first (``_look_who_is_first``): one that was passed ``MAX_PASSED`` times.

Who loses its pages is computed again later. While the first in rank lacks pages, nobody else gets any that it waits
for; each sequence is passed a bounded number of times; and any sequence fits in the pool alone. So everything ends.

A prefill instance sends KV from a sequence's pages, so it can't take these back. It takes all of a sequence's pages and
begins to send once the sequence is wholly ready; what it computes before that can be preempted.

A sequence begins with the pages of its prefix that the pool still knows. It holds them from its arrival on, because
what it asks the encoder for depends on them. One whose prompt's log probabilities are wanted computes all of it: of a
prefix, keys and values are known, not logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from triptych.engine.kv_cache import PagePool
from triptych.engine.prefix import extend_page_hashes
from triptych.engine.request import Sequence
from triptych.types import RequestId

MAX_SCORED = 64
"""Tokens of prompts whose log probabilities one step may tell. Each takes a row of logits: 64 take 39 MB for a
vocabulary of 152,000, and the head's work of as many sequences that decode."""

MAX_PASSED = 8
"""How often later sequences may take the pages that a waiting one has or needs. Each time it may have to compute, and
to have its media encoded, from the start."""

ReadyTokens = Callable[[Sequence], int]
"""How many of a sequence's tokens, from the first on, are ready: text always is, a media token once its row landed. Of
one that another instance prefills: all, unless it waits there."""


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
        self._first: Sequence | None = None
        """The first to have arrived of those that are ready."""
        self._protected: Sequence | None = None
        """One that isn't wholly ready, but was passed so often that it ranks as if it were."""
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
        for sequence in self._sequences.values():
            sequence.ready = ready(sequence)
            sequence.running = sequence.running and not sequence.waits
        self._give_places_back()
        self._look_who_is_first()
        for sequence in self:
            if sequence.decoding or sequence.sends_pages:
                self._add_chunk(step, sequence)
        while self._go_on(step):
            pass
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

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages; it gets others when it is its turn again."""
        self._release(sequence)

    def _give_places_back(self) -> None:
        """Answers that had to wait before their next token go on before those that arrived later: otherwise each token
        of one whose grammar takes its time would wait until another answer ends."""
        for sequence in self:
            if sequence.running or sequence.waits or not (sequence.pages and sequence.lacks_newest_only):
                continue
            if not self._has_place:
                later = [one for one in self if one.decoding and one.arrival > sequence.arrival]
                if not later:
                    return
                later[-1].running = False  # its turn comes in the next step that has a place
            sequence.running = True

    @property
    def _num_running(self) -> int:
        return sum(sequence.running for sequence in self._sequences.values())

    @property
    def _has_place(self) -> bool:
        """Whether one more may run."""
        return self._num_running < self._max_num_seqs

    def _look_who_is_first(self) -> None:
        self._first = next((one for one in self if not one.waits), None)
        partial = [one for one in self if not one.wholly_ready]
        self._protected = None
        if any(one.num_passed >= MAX_PASSED for one in partial):
            # one that can go on goes before it: the rows that it hasn't taken may hold the blocks that this one needs
            self._protected = next(one for one in partial if one.num_passed >= MAX_PASSED or not one.waits)

    def _go_on(self, step: Step) -> bool:
        """All that may have to wait for pages or a place, in order of arrival. Whether another look may find more."""
        self._look_who_is_first()
        running = self._num_running
        self._go_on_in_order(step)
        if step.chunks:
            return False
        # who found no pages has given up its place; and the first may have found in the cache all that is ready of it
        return self._num_running < running or (self._first is not None and self._first.waits)

    def _go_on_in_order(self, step: Step) -> None:
        passed: list[Sequence] = []
        for sequence in self:
            if sequence.decoding or sequence.sends_pages or sequence in step.preempted:
                continue
            had_pages = len(sequence.pages)
            go_on = self._add_chunk if sequence.prefilled_here else self._admit
            found = go_on(step, sequence)
            if not found and (sequence.wholly_ready or sequence is self._protected):
                break  # those behind it would take the pages it waits for, and new ones would do so for ever
            if not found:
                passed.append(sequence)
            elif len(sequence.pages) > had_pages:
                for other in passed:
                    other.num_passed += 1

    def _admit(self, step: Step, sequence: Sequence) -> bool:
        """Takes the pages for what another instance prefills. False when it may run and there are none. One whose
        prefill will wait for media takes only what is free, and doesn't run before its KV comes."""
        if not sequence.admitted:
            if not sequence.waits and not self._has_place:
                return True
            if not self._may_start(step, sequence):
                return sequence.wholly_ready
            if not sequence.pages:
                self._reuse(sequence, len(sequence.tokens) - 1)
            if not self._take_pages(step, sequence, len(sequence.tokens)):
                return False
            sequence.admitted = True
            if sequence.lacks_newest_only:  # it had lost its pages, and others have kept all that is needed
                sequence.ready = len(sequence.tokens)
            else:
                step.admitted.append(sequence)
        if not sequence.waits and self._has_place:
            sequence.running = True
        return not sequence.decoding or self._add_chunk(step, sequence)

    def _add_chunk(self, step: Step, sequence: Sequence) -> bool:
        """Adds what the budget allows of a sequence's ready tokens. False when there are no pages for them."""
        if sequence.waits or step.num_tokens >= self._budget or not (sequence.running or self._has_place):
            return True
        keeps_pages = sequence.sends_pages or (not sequence.decoded_here and sequence.wholly_ready)
        begins = not sequence.running and sequence.num_computed == sequence.num_reused
        if (begins or (keeps_pages and not sequence.sends_pages)) and not self._may_start(step, sequence):
            sequence.running = False
            return sequence.wholly_ready
        if not sequence.pages:
            self._reuse_late(sequence)
        length = min(sequence.ready - sequence.num_computed, self._budget - step.num_tokens)
        if sequence.ends_alone and (before_newest := len(sequence.tokens) - 1 - sequence.num_computed):
            length = min(length, before_newest)
        if sequence.scores_prompt:
            length = min(length, MAX_SCORED - step.num_scored)
        if length <= 0:
            return True
        wanted = len(sequence.tokens) if keeps_pages else sequence.num_computed + length
        if not self._take_pages(step, sequence, wanted):
            sequence.running = False  # whoever has the pages may need its place
            return False
        sequence.running, sequence.sends_pages = True, keeps_pages
        step.chunks.append(Chunk(sequence, sequence.num_computed, length))
        return True

    def _may_start(self, step: Step, sequence: Sequence) -> bool:
        """Without this, sequences that don't fit beside the running ones would start, be preempted, and start again."""
        if sequence in (self._first, self._protected):
            return True
        missing = self.pool.pages_for(len(sequence.tokens)) - len(sequence.pages) - self.pool.num_free
        if missing <= 0 or sequence.waits:
            return missing <= 0  # what it takes from others, others would take again
        waiting = [other.pages for other in self._victims(step, sequence) if other.waits]
        return missing <= self.pool.freed_with(waiting)

    def _take_pages(self, step: Step, sequence: Sequence, tokens: int) -> bool:
        """Makes the sequence's pages enough for that many tokens, if need be at others' expense. False when that isn't
        possible; then nobody loses any."""
        missing = self.pool.pages_for(tokens) - len(sequence.pages)
        if missing > self.pool.num_free:
            victims = self._victims(step, sequence)
            if missing > self.pool.num_free + self.pool.freed_with(victim.pages for victim in victims):
                return False
            victims.sort(key=lambda victim: (victim.waits, victim.arrival))
            while missing > self.pool.num_free:
                self._preempt(step, victims.pop(), sequence)
        if missing > 0:
            sequence.pages += self.pool.take(missing)
        return True

    def _preempt(self, step: Step, victim: Sequence, for_whom: Sequence) -> None:
        victim.num_passed += victim.arrival < for_whom.arrival
        if victim in step.admitted:
            step.admitted.remove(victim)
        self._release(victim)
        step.preempted.append(victim)
        self.num_preemptions += 1

    def _victims(self, step: Step, sequence: Sequence) -> list[Sequence]:
        """Those that hold pages which ``sequence`` may take, and that aren't in this step already."""
        busy = {id(chunk.sequence) for chunk in step.chunks}
        holders = (one for one in self._sequences.values() if one.pages and not one.sends_pages)
        return [one for one in holders if id(one) not in busy and self._rank(one) > self._rank(sequence)]

    def _rank(self, sequence: Sequence) -> tuple[bool, int]:
        """Lower ones may take the pages of higher ones."""
        return not (sequence.wholly_ready or sequence is self._protected), sequence.arrival

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.pages)
        sequence.pages = []
        sequence.running = sequence.admitted = sequence.sends_pages = False
        sequence.ready = sequence.num_computed = sequence.num_published = sequence.num_reused = 0
        sequence.prompt_logprobs = []

    # ── prefixes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _may_reuse(self, sequence: Sequence) -> bool:
        return self._reuse_prefixes and not sequence.scores_prompt

    def _reuse(self, sequence: Sequence, num_tokens: int) -> None:
        """Begins with what is known of the first ``num_tokens`` tokens, in whole pages."""
        if not self._may_reuse(sequence):
            return
        num_pages = num_tokens // self.pool.page_size
        extend_page_hashes(sequence, self.pool.page_size, num_pages)
        sequence.pages = self.pool.find(sequence.page_hashes[:num_pages])
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
        extend_page_hashes(sequence, self.pool.page_size, full)
        for index in range(sequence.num_published, full):
            self.pool.publish(sequence.pages[index], sequence.page_hashes[index])
        sequence.num_published = full
