"""The steps in the life of a request once it is admitted: it is given to an instance, goes back to the queue, and ends.

They change state and send what instances must hear of that. ``Pump`` has what waits go on afterwards.
"""

import logging
from collections.abc import Callable, Collection

import msgspec

from triptych.clock import Clock
from triptych.errors import InstanceLost, TriptychError
from triptych.job_faults import Culprit
from triptych.messages.codec import Message, Send
from triptych.messages.work import Cancel, Prefill, PrefillNeeded, time_left
from triptych.observe.metrics import Metrics
from triptych.observe.timeline import Interval
from triptych.router.admission import Admission
from triptych.router.availability import Availability
from triptych.router.encode_dispatcher import EncodeDispatcher
from triptych.router.instance import Instance, WorkKind
from triptych.router.membership import Membership
from triptych.router.quarantine import MAX_LOSSES, Quarantine
from triptych.router.request_state import MAX_FAILURES, RemotePrefill, RequestPhase, RequestState
from triptych.router.request_table import RequestTable
from triptych.router.row_requests import RowRequests
from triptych.topology import Stage
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

LOST = "an instance that worked on this request was lost, and no other can continue it"
MIN_QUEUE_SECONDS = 0.002
"""Waits shorter than this (seconds) aren't recorded as queueing."""


class Transitions:
    """Moves requests from one phase to the next.

    ``notify`` sends a message and only logs a failure; ``send`` raises."""

    def __init__(
        self,
        *,
        requests: RequestTable,
        admission: Admission,
        encodes: EncodeDispatcher,
        rows: RowRequests,
        quarantine: Quarantine,
        membership: Membership,
        availability: Availability,
        metrics: Metrics,
        send: Send,
        notify: Callable[[Address, Message], None],
        clock: Clock,
    ) -> None:
        self._requests = requests
        self._admission = admission
        self._encodes = encodes
        self._rows = rows
        self._quarantine = quarantine
        self._membership = membership
        self._availability = availability
        self._metrics = metrics
        self._send = send
        self._notify = notify
        self._clock = clock
        self.num_freed = 0
        """Requests that have ended or gone back to the queue so far: each may have made room for others."""

    # ── dispatch ─────────────────────────────────────────────────────────────────────────────────────────────

    def dispatch(self, state: RequestState, instance: Instance) -> None:
        """Send a request that was dequeued to a language instance."""
        again = state.num_dispatches > 0
        state.generate = msgspec.structs.replace(
            state.generate,
            request=RequestId(f"{state.id}.{state.num_dispatches}") if again else state.id,
            generated=list(state.generated),
            timeout=time_left(state.deadline, self._clock.now()),
            items=self._encodes.divide(state) if instance.role.prefills else state.generate.items,
        )
        try:
            self._send(instance.address, state.generate)
        except TriptychError as error:
            self._admission.refund(state)
            state.stream.record.error = type(error).__name__
            self.end(state, "error")
            state.stream.put(error)
            return
        if again:
            log.info("request %s moved to %s after %d tokens", state.id, instance.name, len(state.generated))
        else:
            state.dispatched = self._clock.now()
            record = state.stream.record
            if (started := record.now()) - record.submitted > MIN_QUEUE_SECONDS:
                record.intervals.append(Interval("queue", record.submitted, started))
        state.num_dispatches += 1
        self._requests.assign(state, instance)
        self.update_phase(state)

    def collect(self, state: RequestState) -> None:
        """Ask for all rows of a request that they answer."""
        state.generate = msgspec.structs.replace(state.generate, items=self._encodes.divide(state))
        self._rows.begin(state)

    def lend(self, state: RequestState) -> None:
        """Decide how a request's items are divided, for which an engine of another project will ask."""
        state.generate = msgspec.structs.replace(state.generate, items=self._encodes.divide(state))
        self.update_phase(state)

    def update_phase(self, state: RequestState) -> None:
        """Set a dispatched request's phase; call whenever its items or tokens have changed."""
        if state.only_encodes or self._encodes.is_pending(state.id):
            phase = RequestPhase.ENCODING
        elif state.stream.record.first_token:
            phase = RequestPhase.DECODING
        else:
            phase = RequestPhase.PREFILLING
        self._enter(state, phase)

    def _enter(self, state: RequestState, phase: RequestPhase) -> None:
        now = self._clock.now()
        if state.phase is not phase:
            state.entered = now
            self._requests.enter(state, phase)
        self._admission.phase_changed(now)

    def needs_prefill(self, state: RequestState, needed: PrefillNeeded) -> None:
        """Have a request's prompt wait for a prefill instance, for the decode instance that asks for it."""
        self.cancel_prefill(state)
        self._encodes.release(state)  # its items were for the previous prefill instance
        self.update_phase(state)
        self._requests.needs_prefill(state, needed)

    def prefill(self, state: RequestState, needed: PrefillNeeded, instance: Instance) -> None:
        """Send a waiting prompt to a prefill instance."""
        work = RemotePrefill(
            instance=instance,
            request=state.id,
            client=state.client,
            kind=WorkKind.PROMPT,
            cost=state.num_to_prefill(needed),
            transfer=needed.transfer,
        )
        self._requests.assign_prefill(state, work)
        state.generate = msgspec.structs.replace(
            state.generate, timeout=time_left(state.deadline, self._clock.now()), items=self._encodes.divide(state)
        )
        prefill = Prefill(state.generate, needed.generated, needed.consumer, needed.transfer, needed.first_token)
        self._notify(instance.address, prefill)

    def cancel_prefill(self, state: RequestState) -> None:
        """Cancel a request's remote prefill, if it has one."""
        if state.prefill is not None and self._membership.get(state.prefill.instance.address):
            self._notify(state.prefill.instance.address, Cancel(state.generate.request, state.prefill.transfer))
        self._requests.prefilled(state)

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────────────────

    def requeue(self, state: RequestState) -> None:
        """Continue a dispatched request on another language instance from the tokens received so far, once one has
        room. Sampling is deterministic, so the same tokens follow. One that rows answer asks for all of them again."""
        self.num_freed += 1
        if state.is_lent:
            self.fail(state, InstanceLost(LOST))  # its engine is to be asked again
            return
        if state.rows is not None:
            self._encodes.release(state)
            self.collect(state)
            return
        assert state.decode is not None
        self._notify(state.decode.instance.address, Cancel(state.generate.request))
        self.cancel_prefill(state)
        self._requests.unassign(state)
        self._encodes.release(state)
        self._enter(state, RequestPhase.QUEUED)
        self._admission.add(state)

    def failed_at(self, instance: Instance, state: RequestState, error: TriptychError, culprit: Culprit) -> None:
        """Handle an instance's failure to do its part of a request, as ``failed``."""
        if not culprit.ends_request:
            self._membership.avoid(instance, self._clock.now())
        self.failed(state, error, culprit, instance.name)

    def failed(self, state: RequestState, error: TriptychError, culprit: Culprit, where: str) -> None:
        """Handle a failure: the request ends with the error if it is at fault, or has failed too often; else it
        continues elsewhere, or there again."""
        if not culprit.ends_request:
            state.failures += 1
            if state.failures < MAX_FAILURES:
                log.warning("request %s failed at %s (culprit: %s): %s", state.id, where, culprit, error)
                self.requeue(state)
                return
        self.fail(state, error)

    def blame(self, requests: Collection[RequestState], why: str) -> list[RequestId]:
        """Blame the loss of an instance on requests that it worked on. Fails those that have lost too many. Returns
        those that are blamed."""
        blamed = self._quarantine.lost(requests)
        for state in requests:
            if state.losses >= MAX_LOSSES:
                lost = f"{state.losses} instances were lost while they worked on it; the last one {why}"
                self.fail(state, InstanceLost(f"given up after {lost}"))
            elif self._quarantine.is_suspect(state):
                self._encodes.queue_again(state)
        return [state.id for state in blamed]

    def forgive(self, requests: Collection[RequestId]) -> None:
        """Take back the blame for an instance that is here again."""
        for state in filter(None, map(self._requests.get, requests)):
            self._quarantine.forgive(state)
            self._encodes.queue_again(state)
            self._requests.num_openings += 1  # it may be where it might not be as a suspect

    def fail_missing(self, state: RequestState, stage: Stage) -> None:
        """Fail a dispatched request that needs a stage without an instance."""
        self.fail(state, InstanceLost(LOST) if state.interrupted else self._availability.missing(stage))

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────

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
        self.num_freed += 1
        record, now = state.stream.record, self._clock.now()
        record.finish_reason = record.finish_reason or reason
        self._metrics.ended(record)
        self._admission.remove(state)
        if state.num_dispatches:
            whole = record.finish_reason not in ("abort", "error")
            self._admission.ended(state, record.num_tokens, now, whole=whole)
        self.cancel_prefill(state)
        self._encodes.release(state)
        self._rows.release(state)
        self._requests.remove(state)
        self._quarantine.ended(state)
        self._admission.phase_changed(now)
