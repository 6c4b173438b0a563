"""The requests in flight: admits and queues them for clients, and ends them when a client or the time says so."""

import math
import secrets
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from triptych.clock import Clock
from triptych.config import AdmissionConfig
from triptych.errors import Overloaded, TriptychError
from triptych.messages.codec import Message, Send
from triptych.messages.rows import RowLayout
from triptych.messages.work import (
    Demand,
    Generate,
    PlacedItem,
    SamplingParams,
)
from triptych.observe.metrics import Metrics
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.admission import Admission
from triptych.router.admission_policy import Expected
from triptych.router.availability import Availability
from triptych.router.encode_dispatcher import EncodeDispatcher
from triptych.router.instance import Instance, WorkKind
from triptych.router.membership import Membership
from triptych.router.placement import POLICIES
from triptych.router.pump import Pump
from triptych.router.quarantine import Quarantine
from triptych.router.request_state import RequestState, RowAnswer
from triptych.router.request_table import RequestTable
from triptych.router.row_requests import RowRequests
from triptych.router.stream import TokenReader, TokenStream
from triptych.router.transitions import Transitions
from triptych.topology import Stage
from triptych.types import Address, RequestId


class RequestLifecycle:
    """Owns the requests in flight, their queues and the steps that they take.

    ``notify`` sends a message and only logs a failure; ``send`` raises."""

    def __init__(
        self,
        *,
        address: Address,
        send: Send,
        notify: Callable[[Address, Message], None],
        membership: Membership,
        rows: RowRequests,
        config: AdmissionConfig,
        metrics: Metrics,
        availability: Availability,
        clock: Clock,
    ) -> None:
        self.requests = RequestTable()
        self.rows = rows
        self.quarantine = Quarantine()
        self.admission = Admission(config, self.requests)
        self.encodes = EncodeDispatcher(
            membership=membership,
            address=address,
            send=notify,
            rate=self.admission.forecast.encode_rate,
            policy=POLICIES[config.placement],
            clock=clock,
            requests=self.requests,
            quarantine=self.quarantine,
            note_wait=metrics.waits_for_other,
        )
        self.transitions = Transitions(
            requests=self.requests,
            admission=self.admission,
            encodes=self.encodes,
            rows=rows,
            quarantine=self.quarantine,
            membership=membership,
            availability=availability,
            metrics=metrics,
            send=send,
            notify=notify,
            clock=clock,
        )
        self.pump = Pump(
            requests=self.requests,
            admission=self.admission,
            encodes=self.encodes,
            transitions=self.transitions,
            membership=membership,
            availability=availability,
            quarantine=self.quarantine,
            policy=POLICIES[config.placement],
            clock=clock,
        )
        self.draining = False
        self._address = address
        self._membership = membership
        self._availability = availability
        self._config = config
        self._metrics = metrics
        self._clock = clock

    # ── admission ────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        record: RequestRecord,
        prompt: PlannedPrompt,
        sampling: SamplingParams,
        eos_token_ids: list[int],
        cache_salt: str = "",
        *,
        timeout: float = math.inf,
        priority: int = 0,
        read: TokenReader | None = None,
    ) -> TokenStream:
        """Admit and queue a request, and return its token stream.

        Lower ``priority`` goes first. ``timeout`` is in seconds, at most what is left of the service's own limit.
        ``read`` filters each report and may end the answer early. Raises as ``preparing`` does."""
        client = record.client
        timeout = min(timeout, self._config.request_timeout - record.seconds_spent)
        cost = self.admission.forecast.cost(len(prompt.tokens), sampling.max_tokens)
        items_cost = sum(item.plan.cost for item in prompt.items)
        expected = self._check(
            bool(prompt.items), client=client, cost=cost, items_cost=items_cost, priority=priority, timeout=timeout
        )
        choice = record.begin_choice(len(prompt.tokens), [item.number for item in prompt.items])
        state = self._state(
            TokenStream(RequestId(secrets.token_hex(8)), choice, read),
            record,
            prompt,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            cache_salt=cache_salt,
            timeout=timeout,
            priority=priority,
            cost=cost,
            items_cost=items_cost,
            expected=expected.seconds,
        )
        self._metrics.admitted(choice)
        self.requests.add(state)
        self.admission.add(state)
        self.pump.run()
        return state.stream

    def collect(
        self,
        record: RequestRecord,
        prompt: PlannedPrompt,
        layout: RowLayout,
        cache_salt: str = "",
        *,
        timeout: float = math.inf,
        priority: int = 0,
    ) -> tuple[TokenStream, RowAnswer]:
        """Admit a request whose items are only encoded. Return a stream, which ends without a token once it is
        answered, and the answer, which is complete then.

        ``layout`` is ``row_layout``'s. The rest is as in ``submit``. Raises as ``preparing`` and ``RowRequests.open``
        do."""
        timeout = min(timeout, self._config.request_timeout - record.seconds_spent)
        items_cost = sum(item.plan.cost for item in prompt.items)
        self._check(
            True, client=record.client, items_cost=items_cost, priority=priority, timeout=timeout, generates=False
        )
        self.rows.open(layout)
        state = self._items_alone(record, prompt, cache_salt, timeout=timeout, priority=priority)
        state.rows = answer = RowAnswer(self._address, layout)
        self.requests.add(state)
        self.transitions.collect(state)
        self.pump.run()
        return state.stream, answer

    def lend(
        self,
        record: RequestRecord,
        prompt: PlannedPrompt,
        consumers: Container[Address],
        cache_salt: str = "",
        *,
        timeout: float = math.inf,
        priority: int = 0,
    ) -> tuple[TokenStream, RequestState]:
        """Have a request's items encoded as far as an engine of another project asks for them: one of ``consumers``.
        Return a stream, which ends with an error if they can't be, and the request. ``cancel`` ends it."""
        state = self._items_alone(record, prompt, cache_salt, timeout=timeout, priority=priority)
        state.lent_to = consumers
        self.requests.add(state)
        self.transitions.lend(state)
        return state.stream, state

    def _items_alone(
        self, record: RequestRecord, prompt: PlannedPrompt, cache_salt: str, *, timeout: float, priority: int
    ) -> RequestState:
        """Return a request whose items are encoded, and for which no instance of this service generates."""
        choice = record.begin_choice(len(prompt.tokens), [item.number for item in prompt.items])
        choice.counted = False  # metrics of generations are about answers of tokens
        return self._state(
            TokenStream(RequestId(secrets.token_hex(8)), choice),
            record,
            prompt,
            sampling=SamplingParams(max_tokens=1),
            eos_token_ids=[],
            cache_salt=cache_salt,
            timeout=timeout,
            priority=priority,
            items_cost=sum(item.plan.cost for item in prompt.items),
        )

    @property
    def media_layout(self) -> RowLayout | None:
        """Layout of the rows that encode instances make; None while none has joined."""
        layouts = (instance.media_layout for instance in self._membership.encode_instances(begun=True))
        return next(filter(None, layouts), None)

    def row_layout(self) -> RowLayout:
        """Return ``media_layout``. Raises Unavailable while there is none."""
        if (layout := self.media_layout) is None:
            raise self._availability.missing(Stage.ENCODE)
        return layout

    def _state(
        self,
        stream: TokenStream,
        record: RequestRecord,
        prompt: PlannedPrompt,
        *,
        sampling: SamplingParams,
        eos_token_ids: list[int],
        cache_salt: str,
        timeout: float,
        priority: int,
        cost: float = 0.0,
        items_cost: float,
        expected: float = 0.0,
    ) -> RequestState:
        generate = Generate(
            request=stream.request,
            tokens=prompt.tokens,
            positions=prompt.positions.prompt.astype("<f8").tobytes(),
            next_position=prompt.positions.next_position,
            items=[PlacedItem(item.key, item.placement, item.plan.part_rows) for item in prompt.items],
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            reply_to=self._address,
            cache_salt=cache_salt,
            lora=prompt.lora,
        )
        now = self._clock.now()
        return RequestState(
            id=stream.request,
            prompt=prompt,
            generate=generate,
            client=record.client,
            priority=priority,
            stream=stream,
            submitted=now,
            deadline=now + timeout,
            expected=expected,
            cost=cost,
            items_cost=items_cost,
            http_id=record.id,
            entered=now,
        )

    @contextmanager
    def preparing(
        self,
        record: RequestRecord,
        *,
        has_media: bool,
        number: int = 1,
        priority: int = 0,
        timeout: float | None = None,
        generates: bool = True,
    ) -> Iterator[None]:
        """Hold an admission slot while the prompt is prepared, so that a request that can't be served never pays for
        fetching or planning. ``submit`` checks again, since conditions may have changed.

        ``number`` is how many answers it asks for, for which there must be room: those are held only later.
        ``timeout`` is in seconds, None for the service's own limit. Raises Overloaded if the service is full or the
        answer is not expected in time, and RateLimited if the client is at its limit. Raises Unavailable if no instance
        can serve the request now or soon, and MediaNotServed if the topology has no encode instance. A request whose
        items are only encoded ``generates`` nothing, and needs no language instance."""
        known: dict[str, Any] = {"number": number, "priority": priority, "timeout": timeout, "generates": generates}
        self._check(has_media, client=record.client, **known)
        with self.admission.preparing(record.client, self._clock.now()):
            yield

    @contextmanager
    def holding_slot(self, record: RequestRecord) -> Iterator[None]:
        """Hold an admission slot for a request that needs no instance. Raises Overloaded if the service is full, and
        RateLimited if the client is at its limit."""
        try:
            self.admission.check_capacity(record.client, self._clock.now())
        except TriptychError as error:
            self._metrics.rejected(error)
            raise
        with self.admission.preparing(record.client, self._clock.now()):
            yield

    @contextmanager
    def holding_choices(self, record: RequestRecord, number: int) -> Iterator[None]:
        """Hold an admission slot for each answer of a request that another engine answers. Raises as
        ``holding_slot``."""
        try:
            self.admission.check_capacity(record.client, self._clock.now(), number)
        except TriptychError as error:
            self._metrics.rejected(error)
            raise
        with self.admission.holding(record.client, number):
            yield

    def expected(
        self,
        record: RequestRecord,
        prompt: PlannedPrompt,
        max_tokens: int,
        *,
        timeout: float,
        priority: int = 0,
        generates: bool = True,
    ) -> Expected:
        """Return the forecast times of a request that isn't submitted. Raises what ``submit`` would raise now, and
        counts no rejection. ``generates`` is as in ``preparing``."""
        return self._expected(
            bool(prompt.items),
            client=record.client,
            cost=self.admission.forecast.cost(len(prompt.tokens), max_tokens),
            items_cost=sum(item.plan.cost for item in prompt.items),
            priority=priority,
            timeout=min(timeout, self._config.request_timeout - record.seconds_spent),
            generates=generates,
        )

    def _check(self, has_media: bool, *, client: str, **known: Any) -> Expected:
        """``_expected``, which also counts rejections."""
        try:
            return self._expected(has_media, client=client, **known)
        except TriptychError as error:
            self._metrics.rejected(error)
            raise

    def _expected(self, has_media: bool, *, client: str, generates: bool = True, **known: Any) -> Expected:
        """``Admission.check``, after what speaks against any request."""
        if self.draining:
            raise Overloaded("the service is shutting down", retry_after=5)
        now = self._clock.now()
        if unavailable := self._availability.unavailable(has_media=has_media, generates=generates):
            raise unavailable
        backlog = self.encodes.cost_ahead(known.get("items_cost", 0.0)) if has_media else 0.0
        known |= {"generates": generates, "encode_backlog": backlog}
        return self.admission.check(client, has_media=has_media, now=now, **known)

    def demand(self, instance: Instance) -> Demand:
        """Return what there is for an instance: what it has, and all that waits."""
        account = instance.account
        requests = account.num(WorkKind.READY) + account.num(WorkKind.MAY_STALL) + len(self.admission)
        return Demand(requests, self.encodes.num_at(instance) + len(self.encodes))

    def note_kept(self, instance: Instance) -> None:
        """Note what an instance's heartbeat says of its encoder cache, if placement is by caches."""
        if POLICIES[self._config.placement].uses_caches:
            instance.note_kept()

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self, request: RequestId) -> None:
        """Abort a request whose client is gone. Does nothing if it has ended."""
        if state := self.requests.get(request):
            self.transitions.end_early(state, "abort")
            self.pump.run()

    def complete(self, request: RequestId) -> None:
        """End a dispatched request whose answer is complete; it counts as stopped rather than aborted."""
        state = self.requests.get(request)
        if state is not None and state.num_dispatches:
            self.transitions.end_early(state, "stop")
            self.pump.run()

    def expire(self, late: TriptychError) -> None:
        """Fail the requests whose deadline has passed with ``late``, or because of the stage that they wait for."""
        now = self._clock.now()
        for state in self.requests.overdue(now):
            if not state.num_dispatches:
                self.admission.record_duration(state, now, whole=False)
            self.transitions.fail(state, self._availability.missing_for(state) or late)
