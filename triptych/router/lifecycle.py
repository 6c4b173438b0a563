"""The life of requests in flight: admitted, queued, dispatched, recovered from lost instances, and ended."""

import functools
import logging
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from triptych.config import AdmissionConfig
from triptych.errors import InstanceLost, MediaNotServed, Overloaded, TriptychError, Unavailable
from triptych.job_faults import Culprit
from triptych.messages.codec import Message, Send
from triptych.messages.work import (
    Cancel,
    Demand,
    Generate,
    PlacedItem,
    Prefill,
    PrefillNeeded,
    SamplingParams,
    time_left,
)
from triptych.observe.metrics import Metrics
from triptych.observe.requests import RequestRecord
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.admission import MAY_STALL, READY, Admission
from triptych.router.encode_dispatcher import EncodeDispatcher
from triptych.router.membership import InstanceLease, Membership
from triptych.router.placement import POLICIES
from triptych.router.prefix_placement import PrefixPlacement
from triptych.router.request_state import MAX_FAILURES, MAX_LOSSES, RemotePrefill, RequestPhase, RequestState
from triptych.router.request_table import RequestTable
from triptych.router.stream import TokenReader, TokenStream
from triptych.topology import Stage
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

LOST = "an instance that worked on this request was lost, and no other can continue it"
MIN_QUEUE_SECONDS = 0.002
"""Waits shorter than this (seconds) aren't recorded as queueing."""


class RequestLifecycle:
    """Owns the requests in flight, and moves them from one phase to the next.

    ``notify`` sends a message and only logs a failure; ``send`` raises."""

    def __init__(
        self,
        *,
        address: Address,
        send: Send,
        notify: Callable[[Address, Message], None],
        membership: Membership,
        config: AdmissionConfig,
        metrics: Metrics,
        expects_encoders: bool,
        clock: Callable[[], float],
    ) -> None:
        self.requests = RequestTable()
        self.admission = Admission(config, self.requests)
        self.encodes = EncodeDispatcher(
            membership=membership,
            address=address,
            send=notify,
            rate=self.admission.forecast.encode_rate,
            policy=POLICIES[config.placement],
            clock=clock,
            changed=self.requests.changes.note,
            on_trial=self._on_trial,
            others_on_trial=self._others_on_trial,
        )
        self._decode_placement = PrefixPlacement(POLICIES[config.placement])
        self._prefill_placement = PrefixPlacement(POLICIES[config.placement])
        self.draining = False
        self._address = address
        self._send = send
        self._notify = notify
        self._membership = membership
        self._config = config
        self._metrics = metrics
        self._expects_encoders = expects_encoders
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
        request = RequestId(secrets.token_hex(8))
        generate = Generate(
            request=request,
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
        choice = record.begin_choice(len(prompt.tokens), [item.number for item in prompt.items])
        stream = TokenStream(request, choice, read)
        self._metrics.admitted(stream.record)
        now = self._clock()
        state = RequestState(
            id=request,
            prompt=prompt,
            generate=generate,
            client=client,
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
        self.requests.add(state)
        self.admission.add(state)
        self.dispatch_queued()
        return stream

    @contextmanager
    def preparing(
        self, record: RequestRecord, *, has_media: bool, priority: int = 0, timeout: float | None = None
    ) -> Iterator[None]:
        """Hold an admission slot while the prompt is prepared, so that a request that can't be served never pays for
        fetching or planning. ``submit`` checks again, since conditions may have changed.

        ``timeout`` is in seconds, None for the service's own limit. Raises Overloaded if the service is full or the
        answer is not expected in time, and RateLimited if the client is at its limit. Raises Unavailable if no instance
        can serve the request now or soon, and MediaNotServed if the topology has no encode instance."""
        self._check(has_media, client=record.client, priority=priority, timeout=timeout)
        with self.admission.preparing(record.client):
            yield

    @contextmanager
    def holding_slot(self, record: RequestRecord) -> Iterator[None]:
        """Hold an admission slot for a request that needs no instance. Raises Overloaded if the service is full, and
        RateLimited if the client is at its limit."""
        try:
            self.admission.check_capacity(record.client, self._clock())
        except TriptychError as error:
            self._metrics.rejected(error)
            raise
        with self.admission.preparing(record.client):
            yield

    def _check(self, has_media: bool, *, client: str, **known: Any) -> float:
        """``Admission.check``, which also counts rejections."""
        try:
            if self.draining:
                raise Overloaded("the service is shutting down", retry_after=5)
            now = self._clock()
            if unavailable := self.unavailable(has_media, now):
                raise unavailable
            backlog = self.encodes.cost_ahead(known.get("items_cost", 0.0)) if has_media else 0.0
            return self.admission.check(client, has_media=has_media, now=now, encode_backlog=backlog, **known)
        except TriptychError as error:
            self._metrics.rejected(error)
            raise

    def unavailable(self, has_media: bool, now: float) -> TriptychError | None:
        """Return why no instance can serve a request, now or soon; None if one can."""
        members = self._membership
        if has_media and not self._expects_encoders and not members.encode_instances():
            return MediaNotServed("this service has no encode instance: it takes text alone")
        for stage in Stage if has_media else (Stage.PREFILL, Stage.DECODE):
            if not members.serves(stage, now):
                return self.missing(stage)
        return None

    def missing(self, stage: Stage) -> Unavailable:
        """Return the error of a request that needs a stage without an instance."""
        if stage is Stage.ENCODE:
            return Unavailable("no encode instance is ready, so only text can be served")
        has_decoder = stage is Stage.PREFILL and self._membership.decode_instances()
        return Unavailable(f"no {'prefill' if has_decoder else 'language'} instance is ready")

    # ── dispatch ─────────────────────────────────────────────────────────────────────────────────────────────

    def dispatch_queued(self) -> None:
        """Dispatch queued requests to instances that have room, in the order of admission."""
        while len(self.admission):
            rooms = self._rooms()
            if not any(rooms.values()):
                return
            # those that may stall aren't looked through while no instance has room for one: they may be many
            kinds = (READY, MAY_STALL) if rooms[True] else (READY,)
            request = self.admission.next(functools.partial(self._has_room, rooms), kinds)
            if request is None:
                return
            instance = self._decode_placement.place(request, self._with_room(rooms, request), request.token_cost)
            assert instance is not None
            self._dispatch(request, instance)

    def demand(self, instance: InstanceLease) -> Demand:
        """Return what there is for an instance: what it has, and all that waits."""
        requests = instance.num_ready + instance.num_stalling + len(self.admission)
        return Demand(requests, self.encodes.num_at(instance) + len(self.encodes))

    def _rooms(self) -> dict[bool, list[InstanceLease]]:
        """Return the instances that have room for a request that may stall, and for any other one."""
        ready = [lease for lease in self._membership.serving_instances() if lease.has_room]
        return {True: [lease for lease in ready if lease.has_stalling_room], False: ready}

    def _has_room(self, rooms: dict[bool, list[InstanceLease]], state: RequestState) -> bool:
        return bool(self._with_room(rooms, state))

    def _with_room(self, rooms: dict[bool, list[InstanceLease]], state: RequestState) -> list[InstanceLease]:
        """Return the instances that have room for a request."""
        return self._apart(rooms[state.may_stall], state)

    def _apart(self, instances: list[InstanceLease], state: RequestState) -> list[InstanceLease]:
        """Return the instances that a request may go to: if it is to be tried, those without another such request."""
        if state.losses < MAX_LOSSES - 1:
            return instances
        return [one for one in instances if not self._others_on_trial(state.id, one)]

    def _on_trial(self, request: RequestId) -> bool:
        state = self.requests.get(request)
        return state is not None and state.on_trial

    def _others_on_trial(self, request: RequestId, instance: InstanceLease) -> bool:
        """Return whether an instance works on another request that is on trial. Where two are at one already, each may
        have its items encoded there, one at a time: otherwise they would wait for each other."""
        own = self.requests.get(request)
        is_there = own is not None and own.works_on(instance)
        if not is_there and any(one.on_trial and one.id != request for one in self.requests.at(instance)):
            return True
        return self.encodes.encodes_other_on_trial(request, instance)

    def _dispatch(self, state: RequestState, instance: InstanceLease) -> None:
        again = state.num_dispatches > 0
        state.generate = msgspec.structs.replace(
            state.generate,
            request=RequestId(f"{state.id}.{state.num_dispatches}") if again else state.id,
            generated=list(state.generated),
            timeout=time_left(state.deadline, self._clock()),
        )
        try:
            self._send(instance.address, state.generate)
        except TriptychError as error:
            self.admission.refund(state)
            state.stream.record.error = type(error).__name__
            self._remove(state, "error")
            state.stream.put(error)
            return
        if again:
            log.info("request %s moved to %s after %d tokens", state.id, instance.name, len(state.generated))
        else:
            state.dispatched = self._clock()
            record = state.stream.record
            if (started := record.now()) - record.submitted > MIN_QUEUE_SECONDS:
                record.intervals.append(Interval("queue", record.submitted, started))
        state.num_dispatches += 1
        state.has_answered = False
        self.requests.assign(state, instance, state.token_cost)
        self.update_phase(state)

    def update_phase(self, state: RequestState) -> None:
        """Set a dispatched request's phase; call whenever its items or tokens have changed."""
        if self.encodes.is_pending(state.id):
            phase = RequestPhase.ENCODING
        elif state.stream.record.first_token:
            phase = RequestPhase.DECODING
        else:
            phase = RequestPhase.PREFILLING
        self._enter(state, phase)

    def _enter(self, state: RequestState, phase: RequestPhase) -> None:
        now = self._clock()
        if state.phase is not phase:
            state.entered = now
            self.requests.enter(state, phase)
        self.admission.phase_changed(now)

    def prefill(self, state: RequestState, needed: PrefillNeeded) -> None:
        """Send a request's prompt to a prefill instance, for the decode instance that asks for it. Without one, the
        request moves to an instance that prefills for itself, or waits."""
        self.cancel_prefill(state)
        self.encodes.release(state.id)  # its items were for the previous prefill instance
        self.update_phase(state)
        self.requests.needs_prefill(state, needed)
        cost = max(0, len(state.generate.tokens) + len(needed.generated) - needed.first_token)
        instances = self._membership.prefill_instances(begun=True)
        if (instance := self._prefill_placement.place(state, self._apart(instances, state), cost)) is None:
            if instances:
                return  # it waits until another request's trial is over
            if self._membership.serving_instances():
                self.requeue(state)
                self.dispatch_queued()
            elif not self._membership.serves(Stage.PREFILL, self._clock()):
                self.fail_missing(state, Stage.PREFILL)
            return
        self.requests.assign_prefill(state, RemotePrefill(instance, cost, needed.transfer))
        generate = msgspec.structs.replace(state.generate, timeout=time_left(state.deadline, self._clock()))
        prefill = Prefill(generate, needed.generated, needed.consumer, needed.transfer, needed.first_token)
        self._notify(instance.address, prefill)

    def prefill_waiting(self) -> None:
        """Send the prompts that wait for a prefill instance, if there is one for them now, or an instance that needs
        none. Call a few times a second, and when one has joined or a request's trial may be over."""
        if not (waiting := self.requests.waiting_for_prefill):
            return
        instances = self._membership.prefill_instances(begun=True)
        can_move = not instances and bool(self._membership.serving_instances())
        for state in waiting:
            if state.prefill_needed is not None and (can_move or self._apart(instances, state)):
                self.prefill(state, state.prefill_needed)

    def cancel_prefill(self, state: RequestState) -> None:
        """Cancel a request's remote prefill, if it has one."""
        if state.prefill is not None and self._membership.get(state.prefill.instance.address):
            self._notify(state.prefill.instance.address, Cancel(state.generate.request, state.prefill.transfer))
        self.requests.prefilled(state)

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────

    def requeue(self, state: RequestState) -> None:
        """Continue a dispatched request on another language instance from the tokens received so far, once one has
        room. Sampling is deterministic, so the same tokens follow. Call ``dispatch_queued`` afterwards."""
        assert state.decode is not None
        self._notify(state.decode.instance.address, Cancel(state.generate.request))
        self.cancel_prefill(state)
        self.requests.unassign(state)
        self.encodes.release(state.id)
        self._enter(state, RequestPhase.QUEUED)
        self.admission.add(state)

    def failed_at(self, instance: InstanceLease, state: RequestState, error: TriptychError, culprit: Culprit) -> None:
        """Handle an instance's failure to do its part of a request: the request ends with the error if it is at fault,
        or has failed too often; else it continues elsewhere, or there again."""
        if not culprit.ends_request:
            self._membership.avoid(instance, self._clock())
            state.failures += 1
            if state.failures < MAX_FAILURES:
                log.warning("request %s failed at %s (culprit: %s): %s", state.id, instance.name, culprit, error)
                self.requeue(state)
                self.encodes.dispatch()
                self.dispatch_queued()
                return
        self.fail(state, error)

    def instance_lost(self, state: RequestState, why: str) -> bool:
        """Count the loss of an instance that worked on a request. Fails the request and returns False if it may have
        been the cause."""
        state.losses += 1
        if state.losses < MAX_LOSSES:
            if state.on_trial:
                self.encodes.trial_begins(state.id)
            return True
        self.fail(
            state,
            InstanceLost(
                f"given up after {state.losses} instances were lost while they worked on it; the last one {why}"
            ),
        )
        return False

    def fail_unservable(self) -> None:
        """Fail the requests that wait for a stage that no instance runs, or will run soon."""
        now = self._clock()
        missing = [stage for stage in Stage if not self._membership.serves(stage, now)]
        if not missing:
            return
        if missing != [Stage.ENCODE] or self.admission.has_queued_items:
            for state in self.admission.queued():
                if unavailable := self.unavailable(bool(state.prompt.items), now):
                    self.fail(state, InstanceLost(LOST) if state.interrupted else unavailable)
        if Stage.ENCODE in missing and not self._membership.encode_instances(begun=True):
            for request in self.encodes.queued_requests():
                if waiting := self.requests.get(request):
                    self.fail_missing(waiting, Stage.ENCODE)
        if Stage.PREFILL in missing and not self._membership.prefill_instances(begun=True):
            for state in self.requests.waiting_for_prefill:
                self.fail_missing(state, Stage.PREFILL)

    def fail_missing(self, state: RequestState, stage: Stage) -> None:
        """Fail a dispatched request that needs a stage without an instance."""
        self.fail(state, InstanceLost(LOST) if state.interrupted else self.missing(stage))

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self, request: RequestId) -> None:
        """Abort a request whose client is gone. Does nothing if it has ended."""
        if state := self.requests.get(request):
            self.end_early(state, "abort")

    def complete(self, request: RequestId) -> None:
        """End a dispatched request whose answer is complete; it counts as stopped rather than aborted."""
        state = self.requests.get(request)
        if state is not None and state.num_dispatches:
            self.end_early(state, "stop")

    def fail(self, state: RequestState, error: TriptychError) -> None:
        """End a request with an error."""
        state.stream.record.error = type(error).__name__
        self.end_early(state, "error")
        state.stream.put(error)

    def end_early(self, state: RequestState, reason: str) -> None:
        """End a request, also at its instance."""
        decode, dispatch = state.decode, state.generate.request
        self.end(state, reason)
        if decode is not None:
            self._notify(decode.instance.address, Cancel(dispatch))

    def end(self, state: RequestState, reason: str) -> None:
        """Remove a request, set its finish reason unless it has one, and release its work."""
        self._remove(state, reason)
        self.encodes.dispatch()
        self.dispatch_queued()

    def _remove(self, state: RequestState, reason: str) -> None:
        record, now = state.stream.record, self._clock()
        record.finish_reason = record.finish_reason or reason
        self._metrics.ended(record)
        self.admission.remove(state)
        if state.num_dispatches:
            whole = record.finish_reason not in ("abort", "error")
            self.admission.ended(state, record.num_tokens, now, whole=whole)
        self.cancel_prefill(state)
        self.requests.remove(state)
        self.encodes.release(state.id)
        self.admission.phase_changed(now)

    def expire(self, late: TriptychError) -> None:
        """Fail the requests whose deadline has passed with ``late``, or because of the stage that they wait for."""
        now = self._clock()
        for state in self.requests.overdue(now):
            if not state.num_dispatches:
                self.admission.record_duration(state, now, whole=False)
            self.fail(state, self._missing_for(state) or late)

    def _missing_for(self, state: RequestState) -> TriptychError | None:
        """Return the error of a request that waits for a stage without an instance; None if it waits for none."""
        members = self._membership
        if state.phase is RequestPhase.QUEUED and not members.serving_instances():
            return self.missing(Stage.PREFILL if members.decode_instances() else Stage.DECODE)
        if state.phase is RequestPhase.ENCODING and not members.encode_instances(begun=True):
            return self.missing(Stage.ENCODE)
        if state.waits_for_prefill and not members.prefill_instances(begun=True):
            return self.missing(Stage.PREFILL)
        return None
