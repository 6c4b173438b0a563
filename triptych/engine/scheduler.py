"""Decides which request computes which tokens in the next step. Holds no device and no socket.

A request is *blocked* while none of its uncomputed tokens is ready: media embeddings, KV or a grammar mask have yet to
arrive. The others are served in order of arrival, at most ``max_num_seqs`` at a time. Decodes go first, with one token
each, then prompts whose KV is being sent. The rest of the token budget goes to prefill chunks of ready tokens.

A blocked request occupies no slot. When an answer under way is no longer blocked, it takes the slot of one that
arrived later (``_resume_blocked_answers``). A blocked request keeps its pages, but is the first to be preempted when
pages run out. A request may preempt those of lower precedence:

- *Fully* ready requests come first, in order of arrival: they end without being blocked again.
- The others follow, in order of arrival. They can't preempt the first group, which would take the pages back.
- One of the others at a time joins the first group (``_update_precedence``): one bypassed ``MAX_BYPASSED`` times.

Preempted requests are recomputed later. While the request of highest precedence lacks pages, no other gets pages that
it needs. Each request is bypassed a bounded number of times, and any request fits in the pool by itself. So every
request finishes.

A prefill instance sends KV from a request's pages, so these can't be preempted. It allocates all of a request's pages
and begins to send once the request is fully ready; what it computes before that can be preempted. In layers with a
sliding window it allocates them step by step, and so begins only if the pools have room for all that send to hold as
many pages as they may need at a time.

A request starts with the cached pages of its prefix. It retains them from its arrival on, because they decide which
items need an encoder. A request for prompt log probabilities reuses no prefix: the cache holds keys and values, not
logits.

A model with state adds a slot to what a request needs (``engine/state_slots.py``). A step ends where a snapshot is
taken.

No chunk ends within an atomic span. A request whose next span doesn't fit in what decodes and earlier requests leave
of the budget has it reserved in the next step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from triptych.engine.cache_manager import CacheManager
from triptych.engine.prefix import extend_page_hashes
from triptych.engine.request import Request
from triptych.engine.state_slots import StateSlots
from triptych.types import RequestId

MAX_SCORED = 64
"""Prompt tokens whose log probabilities one step may compute. Each takes a row of logits, and as much work in the head
as a request that decodes."""

MAX_BYPASSED = 8
"""Maximum times that later requests may take pages that a blocked one holds or needs. Each time, it may be recomputed
and its media encoded again."""

CountReadyTokens = Callable[[Request], int]
"""Returns a request's number of ready leading tokens. A media token is ready once its embedding has arrived, and text
always, except for short text before a media token that isn't. Requests prefilled elsewhere are fully ready unless
blocked there."""


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + length)`` of a request, to be computed in one step."""

    request: Request
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the request's newest token, so that the step samples the next one."""
        return self.start + self.length == len(self.request.tokens)

    @property
    def num_scored(self) -> int:
        """How many leading tokens of this chunk score a following prompt token."""
        if not self.request.wants_prompt_logprobs:
            return 0
        return min(self.start + self.length, self.request.num_prompt - 1) - self.start

    @property
    def wanted(self) -> range:
        """Tokens whose logits are needed, relative to the chunk's start."""
        num_scored, samples = self.num_scored, self.samples
        first = 0 if num_scored else self.length - samples
        return range(first, self.length if samples else first + num_scored)


@dataclass
class SchedulerOutput:
    """One scheduler decision."""

    chunks: list[Chunk] = field(default_factory=list)
    """What to compute in this step."""
    admitted: list[Request] = field(default_factory=list)
    """Requests prefilled elsewhere, which now have their pages."""
    preempted: list[Request] = field(default_factory=list)
    """Preempted requests. They have lost their pages and their media embeddings."""
    num_tokens: int = 0
    """Tokens of all chunks."""
    num_scored: int = 0
    """Tokens of all chunks that score a following prompt token."""

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.num_tokens += chunk.length
        self.num_scored += chunk.num_scored


class Scheduler:
    """Continuous batching over pools of KV pages."""

    def __init__(
        self,
        cache: CacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        reuse_prefixes: bool = True,
        layout: str = "",
    ) -> None:
        """``layout`` is the digest of the KV cache's layout, which names of cached pages cover."""
        self.cache = cache
        self._layout = layout
        self._reuse_prefixes = reuse_prefixes
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._reserved_for: Request | None = None
        """The request for whose span the current step has room reserved."""
        self._lacks_room: Request | None = None
        """The first request whose span didn't fit in the current step."""
        self._requests: dict[RequestId, Request] = {}
        self._first: Request | None = None
        """Earliest request that isn't blocked."""
        self._protected: Request | None = None
        """A request that isn't fully ready, but was bypassed so often that it has the precedence of one that is."""
        self._arrivals = 0
        self.num_running = 0
        """Requests with a slot: those whose ``running`` is set."""
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of the largest step."""
        return self._budget

    def add(self, request: Request) -> None:
        """Append a request to the queue, with the cached pages of its prefix."""
        request.arrival = self._arrivals
        request.tables = self.cache.new_tables()
        self._arrivals += 1
        self._requests[request.id] = request
        self._reuse_prefix(request, len(request.tokens) - 1)  # the last token is always computed, for its logits
        self.num_prefix_queries += len(request.tokens) if self._can_reuse(request) else 0
        self.num_prefix_hits += request.num_reused

    def remove(self, request_id: RequestId) -> Request | None:
        """Remove a request in any state and release its pages. Returns it, or None if it isn't there."""
        if request := self._requests.pop(request_id, None):
            self._release(request)
        return request

    def get(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def schedule(self, ready: CountReadyTokens) -> SchedulerOutput:
        """Decide the next step and allocate its pages. A step without chunks means that nothing is ready."""
        step = SchedulerOutput()
        for request in self._requests.values():
            request.num_ready = ready(request)
            if request.running and request.blocked:
                self._set_running(request, False)
        lacked_room, self._lacks_room = self._lacks_room, None
        self._reserved_for = lacked_room if lacked_room in self._requests.values() else None
        self._fill(step)
        if self._reserved_for is not None and not step.chunks:
            self._reserved_for = None  # it lacks more than room
            self._fill(step)
        return step

    def _fill(self, step: SchedulerOutput) -> None:
        """Add chunks to a step that has none."""
        self._resume_blocked_answers()
        self._update_precedence()
        for request in self._requests.values():  # first: beside answers, it would wait for all of them to end
            if request.runs_alone and (request.prefilled_here or request.decoding):
                self._add_chunk(step, request)
        for request in self._requests.values():
            if (request.decoding or request.sends_pages) and not request.runs_alone:
                self._add_chunk(step, request)
        while self._schedule_round(step):
            pass

    def mark_computed(self, chunks: Sequence[Chunk]) -> None:
        """Record that a step has run: the chunks' tokens are in the KV cache."""
        for chunk in chunks:
            if self._requests.get(chunk.request.id) is chunk.request:
                chunk.request.num_computed = chunk.start + chunk.length
                self._cache_full_pages(chunk.request)
                if self.cache.states is not None:
                    self._keep_snapshot(self.cache.states, chunk.request)

    def mark_received(self, request: Request, num_tokens: int) -> None:
        """Record that the first ``num_tokens`` tokens of a request that another instance prefills are in its pages."""
        self.cache.note_received(request.tables, request.num_computed, num_tokens)
        request.num_computed = num_tokens
        self._cache_full_pages(request)

    def preempt(self, request: Request) -> None:
        """Release a request's pages; it gets new ones when it is scheduled again."""
        self._release(request)

    def _resume_blocked_answers(self) -> None:
        """Give answers that were blocked before their next token the slots of later arrivals. Otherwise an answer with
        a slow grammar would wait for another answer to end before each token."""
        for request in self._requests.values():
            if request.running or request.blocked or not (request.holds_pages and request.only_newest_left):
                continue
            if not self._has_free_slot:
                later = [one for one in self._requests.values() if one.decoding and one.arrival > request.arrival]
                if not later:
                    return
                self._set_running(later[-1], False)  # resumes in the next step with a free slot
            self._set_running(request, True)

    def _set_running(self, request: Request, running: bool) -> None:
        """Give the request a slot, or take it."""
        self.num_running += running - request.running
        request.running = running

    @property
    def _has_free_slot(self) -> bool:
        """Whether one more request may run."""
        return self.num_running < self._max_num_seqs

    def _update_precedence(self) -> None:
        self._first = next((one for one in self._requests.values() if not one.blocked), None)
        partial = [one for one in self._requests.values() if not one.fully_ready]
        self._protected = None
        if any(one.num_bypassed >= MAX_BYPASSED for one in partial):
            # unblocked requests first: their unread rows may occupy the receive blocks that this one needs
            self._protected = next(one for one in partial if one.num_bypassed >= MAX_BYPASSED or not one.blocked)

    def _schedule_round(self, step: SchedulerOutput) -> bool:
        """Schedule, in order of arrival, requests that may lack pages or a slot. Returns whether another round may find
        more."""
        self._update_precedence()
        running = self.num_running
        self._schedule_in_order(step)
        if step.chunks:
            return False
        # a request without pages has released its slot, or the prefix cache had all ready tokens of the first one
        return self.num_running < running or (self._first is not None and self._first.blocked)

    def _schedule_in_order(self, step: SchedulerOutput) -> None:
        bypassed: list[Request] = []
        for request in self._requests.values():
            if request.decoding or request.sends_pages or request in step.preempted:
                continue
            had_pages = request.num_allocated
            schedule_one = self._add_chunk if request.prefilled_here else self._admit
            scheduled = schedule_one(step, request)
            if not scheduled and (request.fully_ready or request is self._protected):
                break  # later requests, and new ones forever, would take the pages that it needs
            if not scheduled:
                bypassed.append(request)
            elif request.num_allocated > had_pages:
                for other in bypassed:
                    other.num_bypassed += other not in step.preempted  # counted already

    def _admit(self, step: SchedulerOutput, request: Request) -> bool:
        """Allocate pages for a request that another instance prefills. Returns False if it may run but there are none.
        A request whose prefill will wait for media takes only free pages, and occupies no slot before its KV
        arrives."""
        if not request.admitted:
            if not request.blocked and not self._has_free_slot:
                return True
            if not self._can_start(step, request):
                return request.fully_ready
            if not request.holds_pages:
                self._reuse_prefix(request, len(request.tokens) - 1)
            # only what the newest token reads, or the next one, will come
            self.cache.trim(request.tables, len(request.tokens) - 1)
            if not self._allocate_pages(step, request, len(request.tokens)):
                return False
            request.admitted = True
            if request.only_newest_left:  # it was preempted, and the prefix cache still has all its pages
                request.num_ready = len(request.tokens)
            else:
                step.admitted.append(request)
        if not request.blocked and self._has_free_slot:
            self._set_running(request, True)
        return not request.decoding or self._add_chunk(step, request)

    def _add_chunk(self, step: SchedulerOutput, request: Request) -> bool:
        """Add as many of a request's ready tokens as the budget allows. Returns False if there are no pages for
        them."""
        room = self._room(step, request)
        if request.blocked or room <= 0 or not (request.running or self._has_free_slot):
            return True
        if step.chunks and (request.runs_alone or step.chunks[0].request.runs_alone):
            return True
        keeps_pages = request.sends_pages or (not request.decoded_here and request.fully_ready)
        begins = not request.running and request.num_computed == request.num_reused
        if (begins or (keeps_pages and not request.sends_pages)) and not self._can_start(step, request):
            self._set_running(request, False)
            return request.fully_ready
        if not request.holds_pages:
            self._reuse_text_prefix(request)
        length = self._chunk_length(step, request, room)
        if length <= 0:
            return True
        self.cache.trim(request.tables, request.num_computed)
        at_once = len(request.tokens) if keeps_pages else 0
        can_send = not keeps_pages or request.sends_pages or self._can_send(request)
        if not can_send or not self._allocate_pages(step, request, request.num_computed + length, at_once):
            self._set_running(request, False)  # a request that holds pages may need the slot
            return False
        self._set_running(request, True)
        request.sends_pages = keeps_pages
        if self._takes_snapshots(request) and request.num_computed + length == self._next_snapshot(request):
            self._plan_snapshot(request, request.num_computed + length)
        step.add(Chunk(request, request.num_computed, length))
        if request is self._reserved_for:
            self._reserved_for = None
        return True

    def _chunk_length(self, step: SchedulerOutput, request: Request, room: int) -> int:
        """Return how many of the request's ready tokens its next chunk has, at most ``room``; none if not positive."""
        length = min(request.num_ready - request.num_computed, room)
        if request.samples_alone and (before_newest := len(request.tokens) - 1 - request.num_computed):
            length = min(length, before_newest)
        if request.wants_prompt_logprobs:
            length = min(length, MAX_SCORED - step.num_scored)
        if self._takes_snapshots(request):
            length = min(length, self._next_snapshot(request) - request.num_computed)
        return self._between_spans(request, length, room) if length > 0 else 0

    def _room(self, step: SchedulerOutput, request: Request) -> int:
        """Return how many tokens the request may add to the step."""
        room = self._budget - step.num_tokens
        other = self._reserved_for
        if other is None or other is request or (span := other.span_across(other.num_computed + 1)) is None:
            return room
        return room - (span.end - other.num_computed)

    def _between_spans(self, request: Request, length: int, room: int) -> int:
        """Return the length of the request's next chunk, about ``length``, that doesn't end within an atomic span; 0 if
        its next span isn't ready or ``room`` tokens aren't enough for it."""
        span = request.span_across(request.num_computed + length)
        if span is None:
            return length
        if span.start > request.num_computed:
            return span.start - request.num_computed
        if span.end > request.num_ready:
            return 0
        whole = span.end - request.num_computed
        if whole <= room:
            return whole
        self._lacks_room = self._lacks_room or request
        return 0

    def _can_start(self, step: SchedulerOutput, request: Request) -> bool:
        """Whether a request may start. Without this check, a request that doesn't fit beside the running ones would be
        preempted and restarted repeatedly."""
        if request in (self._first, self._protected):
            return True
        missing = self.cache.missing_at_most(request.tables, len(request.tokens), self._budget)
        if self.cache.fits(missing) or request.blocked:
            return self.cache.fits(missing)  # pages that it preempts would be preempted again
        # not only blocked ones: others lack pages, or only hold their prefixes, and would wait for this one's
        waiting = [other.tables for other in self._victims(step, request) if not other.running]
        return self.cache.fits(missing, releasing=waiting)

    def _can_send(self, request: Request) -> bool:
        """Whether the request can begin to send its pages, so that all that send them can be computed to their ends."""
        sending = [len(other.tokens) for other in self._requests.values() if other.sends_pages]
        return self.cache.can_send([*sending, len(request.tokens)], self._budget)

    def _allocate_pages(self, step: SchedulerOutput, request: Request, tokens: int, at_once: int = 0) -> bool:
        """Extend the request's pages to hold ``tokens`` tokens, and ``at_once`` where it keeps all, preempting others
        if necessary. Returns False, and preempts none, if that isn't enough."""
        missing = self.cache.missing(request.tables, tokens, at_once)
        if max(missing) <= 0:
            return True
        if not self.cache.fits(missing):
            victims = self._victims(step, request)
            if not self.cache.fits(missing, releasing=[victim.tables for victim in victims]):
                return False
            victims.sort(key=lambda victim: (victim.blocked, not victim.running, victim.arrival))
            while not self.cache.fits(missing):
                self._preempt(step, victims.pop(), request)
        self.cache.allocate(request.tables, missing)
        return True

    def _preempt(self, step: SchedulerOutput, victim: Request, beneficiary: Request) -> None:
        victim.num_bypassed += victim.arrival < beneficiary.arrival
        if victim in step.admitted:
            step.admitted.remove(victim)
        self._release(victim)
        step.preempted.append(victim)
        self.num_preemptions += 1

    def _victims(self, step: SchedulerOutput, request: Request) -> list[Request]:
        """Return the requests that ``request`` may preempt and that aren't part of this step. One that sends pages may
        preempt all others: they may wait for its pages, so it can't wait for theirs."""
        busy = {id(chunk.request) for chunk in step.chunks}
        holders = (one for one in self._requests.values() if one.holds_pages and not one.sends_pages)
        rank = self._rank(request)
        return [one for one in holders if id(one) not in busy and (request.sends_pages or self._rank(one) > rank)]

    def _rank(self, request: Request) -> tuple[bool, int]:
        """Sort key of a request's precedence: a request may preempt those with larger keys."""
        return not (request.fully_ready or request is self._protected), request.arrival

    def _release(self, request: Request) -> None:
        self.cache.release(request.tables)
        self._set_running(request, False)
        request.admitted = request.sends_pages = False
        request.num_ready = request.num_computed = request.num_cached_pages = request.num_reused = 0
        request.prompt_logprobs = []

    # ── prefixes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _can_reuse(self, request: Request) -> bool:
        return self._reuse_prefixes and not request.wants_prompt_logprobs

    def _reuse_prefix(self, request: Request, num_tokens: int) -> None:
        """Start with the cached pages of the first ``num_tokens`` tokens."""
        if not self._can_reuse(request):
            return
        if self.cache.states is not None and not request.prefilled_here:
            # a state comes with the last token's keys and values, so at least these have to come
            num_tokens = max(0, min(num_tokens, len(request.tokens) - 2))
        num_pages = num_tokens // self.cache.page_size
        extend_page_hashes(request, self.cache.page_size, num_pages, self._layout)
        request.tables, request.num_cached_pages = self.cache.lookup(
            request.page_hashes[:num_pages], with_state=request.prefilled_here
        )
        request.num_computed = request.num_reused = request.num_cached_pages * self.cache.page_size

    def _reuse_text_prefix(self, request: Request) -> None:
        """Start with the cached pages before the first media item. For a request whose media transfers are already in
        progress: it waited for pages, or was preempted."""
        media = request.items[0].placement.start if request.items else len(request.tokens)
        self._reuse_prefix(request, min(media, len(request.tokens) - 1))

    def _takes_snapshots(self, request: Request) -> bool:
        """Whether steps end where snapshots of the request's state are taken."""
        states = self.cache.states
        has_room = states is not None and states.snapshots.num_pages > 0
        return has_room and self._reuse_prefixes and request.prefilled_here

    def _next_snapshot(self, request: Request) -> int:
        """Return the number of tokens after which the next snapshot is taken."""
        assert self.cache.states is not None
        return self.cache.states.next_position(request.num_computed, request.num_prompt)

    def _plan_snapshot(self, request: Request, position: int) -> None:
        """Have the next step end with a snapshot of the state after ``position`` tokens, which are whole pages."""
        assert self.cache.states is not None
        num_pages = position // self.cache.page_size
        extend_page_hashes(request, self.cache.page_size, num_pages, self._layout)
        self.cache.states.plan(request.tables, request.page_hashes[num_pages - 1])

    def _keep_snapshot(self, states: StateSlots, request: Request) -> None:
        """Cache the snapshot that the request's step has taken, if any."""
        num_pages, rest = divmod(request.num_computed, self.cache.page_size)
        is_planned = states.planned(request.tables) and not rest
        states.computed(request.tables, request.page_hashes[num_pages - 1] if is_planned else None)

    def _cache_full_pages(self, request: Request) -> None:
        """Add newly filled pages to the prefix cache."""
        if not self._reuse_prefixes:
            return
        full = request.num_computed // self.cache.page_size
        extend_page_hashes(request, self.cache.page_size, full, self._layout)
        self.cache.cache(request.tables, request.page_hashes, request.num_cached_pages, full)
        request.num_cached_pages = full
