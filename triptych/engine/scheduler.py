"""Which request computes which tokens in the next step. Holds no device and no socket.

A request *waits* while nothing beyond its computed tokens is ready: its media rows, its KV or its grammar are still
to come. The others are *ready*, and are served in order of arrival. ``max_num_seqs`` of them run at a time. Decodes go
first, one token each, then prompts whose KV is being sent; what is left of the token budget goes to prefill chunks,
over the longest run of tokens that are ready.

A request that waits doesn't run. An answer under way that had to wait takes the place of one that arrived later
(``_give_places_back``). A request that waits keeps its pages, but these are the first to be taken when pages run out.
A request may take the pages of those that rank after it:

- First rank those that are *wholly* ready, so that they end without waiting again, in order of arrival.
- The others follow in order of arrival. They can't take pages from the first, who would take them back.
- One of the others at a time ranks with the first (``_look_who_is_first``): one that was passed ``MAX_PASSED`` times.

Who loses its pages is computed again later. While the first in rank lacks pages, nobody else gets any that it waits
for; each request is passed a bounded number of times; and any request fits in the pool alone. So everything ends.

A prefill instance sends KV from a request's pages, so it can't take these back. It takes all of a request's pages and
begins to send once the request is wholly ready; what it computes before that can be preempted.

A request begins with the pages of its prefix that the pool still knows. It holds them from its arrival on, because
what it asks the encoder for depends on them. One whose prompt's log probabilities are wanted computes all of it: of a
prefix, keys and values are known, not logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from triptych.engine.kv_cache import PagePool
from triptych.engine.prefix import extend_page_hashes
from triptych.engine.request import Request
from triptych.types import RequestId

MAX_SCORED = 64
"""Tokens of prompts whose log probabilities one step may tell. Each takes a row of logits: 64 take 39 MB for a
vocabulary of 152,000, and the head's work of as many requests that decode."""

MAX_PASSED = 8
"""How often later requests may take the pages that a waiting one has or needs. Each time it may have to compute, and
to have its media encoded, from the start."""

ReadyTokens = Callable[[Request], int]
"""How many of a request's tokens, from the first on, are ready: text always is, a media token once its row landed. Of
one that another instance prefills: all, unless it waits there."""


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + length)`` of a request, to be computed in this step."""

    request: Request
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the newest token, so that the step yields the next one."""
        return self.start + self.length == len(self.request.tokens)

    @property
    def num_scored(self) -> int:
        """Of how many of its first tokens the logits tell of the prompt: of all that have another behind them."""
        if not self.request.scores_prompt:
            return 0
        return min(self.start + self.length, self.request.num_prompt - 1) - self.start

    @property
    def wanted(self) -> range:
        """The tokens whose logits are wanted, counted from the chunk's first."""
        first = 0 if self.num_scored else self.length - self.samples
        return range(first, self.length if self.samples else first + self.num_scored)


@dataclass
class Step:
    """One scheduler decision. ``admitted`` requests, whose prefill is another's work, have got their pages;
    ``preempted`` ones have lost theirs, and with them their media rows."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

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
        self._requests: dict[RequestId, Request] = {}
        self._first: Request | None = None
        """The first to have arrived of those that are ready."""
        self._protected: Request | None = None
        """One that isn't wholly ready, but was passed so often that it ranks as if it were."""
        self._arrivals = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    def add(self, request: Request) -> None:
        """Puts a request at the end of the line, with the pages of its prefix that are known."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.id] = request
        self._reuse(request, len(request.tokens) - 1)  # the last token must be computed: its logits are wanted
        self.num_prefix_queries += len(request.tokens) if self._may_reuse(request) else 0
        self.num_prefix_hits += request.num_reused

    def remove(self, request_id: RequestId) -> Request | None:
        """Takes a request out, whatever it was doing, and its pages back."""
        if request := self._requests.pop(request_id, None):
            self._release(request)
        return request

    def get(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def schedule(self, ready: ReadyTokens) -> Step:
        """Decides the next step and takes its pages. A step without chunks: nothing is ready."""
        step = Step()
        for request in self._requests.values():
            request.ready = ready(request)
            request.running = request.running and not request.waits
        self._give_places_back()
        self._look_who_is_first()
        for request in self:
            if request.decoding or request.sends_pages:
                self._add_chunk(step, request)
        while self._go_on(step):
            pass
        return step

    def computed(self, step: Step) -> None:
        """The step has run: its tokens are in the cache."""
        for chunk in step.chunks:
            if self._requests.get(chunk.request.id) is chunk.request:
                chunk.request.num_computed = chunk.start + chunk.length
                self._publish(chunk.request)

    def arrived(self, request: Request, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens of a request that another instance prefills are in its pages."""
        request.num_computed = num_tokens
        self._publish(request)

    def preempt(self, request: Request) -> None:
        """Takes a request's pages; it gets others when it is its turn again."""
        self._release(request)

    def _give_places_back(self) -> None:
        """Answers that had to wait before their next token go on before those that arrived later: otherwise each token
        of one whose grammar takes its time would wait until another answer ends."""
        for request in self:
            if request.running or request.waits or not (request.pages and request.lacks_newest_only):
                continue
            if not self._has_place:
                later = [one for one in self if one.decoding and one.arrival > request.arrival]
                if not later:
                    return
                later[-1].running = False  # its turn comes in the next step that has a place
            request.running = True

    @property
    def _num_running(self) -> int:
        return sum(request.running for request in self._requests.values())

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
        passed: list[Request] = []
        for request in self:
            if request.decoding or request.sends_pages or request in step.preempted:
                continue
            had_pages = len(request.pages)
            go_on = self._add_chunk if request.prefilled_here else self._admit
            found = go_on(step, request)
            if not found and (request.wholly_ready or request is self._protected):
                break  # those behind it would take the pages it waits for, and new ones would do so for ever
            if not found:
                passed.append(request)
            elif len(request.pages) > had_pages:
                for other in passed:
                    other.num_passed += 1

    def _admit(self, step: Step, request: Request) -> bool:
        """Takes the pages for what another instance prefills. False when it may run and there are none. One whose
        prefill will wait for media takes only what is free, and doesn't run before its KV comes."""
        if not request.admitted:
            if not request.waits and not self._has_place:
                return True
            if not self._may_start(step, request):
                return request.wholly_ready
            if not request.pages:
                self._reuse(request, len(request.tokens) - 1)
            if not self._take_pages(step, request, len(request.tokens)):
                return False
            request.admitted = True
            if request.lacks_newest_only:  # it had lost its pages, and others have kept all that is needed
                request.ready = len(request.tokens)
            else:
                step.admitted.append(request)
        if not request.waits and self._has_place:
            request.running = True
        return not request.decoding or self._add_chunk(step, request)

    def _add_chunk(self, step: Step, request: Request) -> bool:
        """Adds what the budget allows of a request's ready tokens. False when there are no pages for them."""
        if request.waits or step.num_tokens >= self._budget or not (request.running or self._has_place):
            return True
        keeps_pages = request.sends_pages or (not request.decoded_here and request.wholly_ready)
        begins = not request.running and request.num_computed == request.num_reused
        if (begins or (keeps_pages and not request.sends_pages)) and not self._may_start(step, request):
            request.running = False
            return request.wholly_ready
        if not request.pages:
            self._reuse_late(request)
        length = min(request.ready - request.num_computed, self._budget - step.num_tokens)
        if request.ends_alone and (before_newest := len(request.tokens) - 1 - request.num_computed):
            length = min(length, before_newest)
        if request.scores_prompt:
            length = min(length, MAX_SCORED - step.num_scored)
        if length <= 0:
            return True
        wanted = len(request.tokens) if keeps_pages else request.num_computed + length
        if not self._take_pages(step, request, wanted):
            request.running = False  # whoever has the pages may need its place
            return False
        request.running, request.sends_pages = True, keeps_pages
        step.chunks.append(Chunk(request, request.num_computed, length))
        return True

    def _may_start(self, step: Step, request: Request) -> bool:
        """Without this, requests that don't fit beside the running ones would start, be preempted, and start again."""
        if request in (self._first, self._protected):
            return True
        missing = self.pool.pages_for(len(request.tokens)) - len(request.pages) - self.pool.num_free
        if missing <= 0 or request.waits:
            return missing <= 0  # what it takes from others, others would take again
        waiting = [other.pages for other in self._victims(step, request) if other.waits]
        return missing <= self.pool.freed_with(waiting)

    def _take_pages(self, step: Step, request: Request, tokens: int) -> bool:
        """Makes the request's pages enough for that many tokens, if need be at others' expense. False when that isn't
        possible; then nobody loses any."""
        missing = self.pool.pages_for(tokens) - len(request.pages)
        if missing > self.pool.num_free:
            victims = self._victims(step, request)
            if missing > self.pool.num_free + self.pool.freed_with(victim.pages for victim in victims):
                return False
            victims.sort(key=lambda victim: (victim.waits, victim.arrival))
            while missing > self.pool.num_free:
                self._preempt(step, victims.pop(), request)
        if missing > 0:
            request.pages += self.pool.take(missing)
        return True

    def _preempt(self, step: Step, victim: Request, for_whom: Request) -> None:
        victim.num_passed += victim.arrival < for_whom.arrival
        if victim in step.admitted:
            step.admitted.remove(victim)
        self._release(victim)
        step.preempted.append(victim)
        self.num_preemptions += 1

    def _victims(self, step: Step, request: Request) -> list[Request]:
        """Those that hold pages which ``request`` may take, and that aren't in this step already."""
        busy = {id(chunk.request) for chunk in step.chunks}
        holders = (one for one in self._requests.values() if one.pages and not one.sends_pages)
        return [one for one in holders if id(one) not in busy and self._rank(one) > self._rank(request)]

    def _rank(self, request: Request) -> tuple[bool, int]:
        """Lower ones may take the pages of higher ones."""
        return not (request.wholly_ready or request is self._protected), request.arrival

    def _release(self, request: Request) -> None:
        self.pool.free(request.pages)
        request.pages = []
        request.running = request.admitted = request.sends_pages = False
        request.ready = request.num_computed = request.num_published = request.num_reused = 0
        request.prompt_logprobs = []

    # ── prefixes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _may_reuse(self, request: Request) -> bool:
        return self._reuse_prefixes and not request.scores_prompt

    def _reuse(self, request: Request, num_tokens: int) -> None:
        """Begins with what is known of the first ``num_tokens`` tokens, in whole pages."""
        if not self._may_reuse(request):
            return
        num_pages = num_tokens // self.pool.page_size
        extend_page_hashes(request, self.pool.page_size, num_pages)
        request.pages = self.pool.find(request.page_hashes[:num_pages])
        request.num_published = len(request.pages)
        request.num_computed = request.num_reused = len(request.pages) * self.pool.page_size

    def _reuse_late(self, request: Request) -> None:
        """The same for one that begins only now, or again. Its media rows are on their way already."""
        media = request.items[0].placement.start if request.items else len(request.tokens)
        self._reuse(request, min(media, len(request.tokens) - 1))

    def _publish(self, request: Request) -> None:
        """Lets others find the pages that are full now."""
        if not self._reuse_prefixes:
            return
        full = request.num_computed // self.pool.page_size
        extend_page_hashes(request, self.pool.page_size, full)
        for index in range(request.num_published, full):
            self.pool.publish(request.pages[index], request.page_hashes[index])
        request.num_published = full
