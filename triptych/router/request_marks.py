"""Marks of the requests in flight, as snapshots show them."""

from itertools import islice

from triptych.observe.pipeline import RequestMark
from triptych.router.launcher_view import STAGE_NAMES
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.load_window import queued_stage
from triptych.router.membership import Membership
from triptych.router.request_state import RequestPhase, RequestState
from triptych.topology import Stage

MAX_MARKS = 200


def request_marks(membership: Membership, lifecycle: RequestLifecycle, epoch: float) -> list[RequestMark]:
    """Return the marks of the oldest requests of clients, probes left out, in the order of their arrival. ``epoch`` is
    when the router's clock was 0, in seconds since the epoch."""
    queued = STAGE_NAMES[queued_stage(membership)]
    shown = (state for state in lifecycle.requests if state.stream.record.counted)
    return [
        RequestMark(
            key=state.id,
            id=state.http_id,
            phase=state.phase,
            instances=instances_of(lifecycle, state),
            entered=round(epoch + state.entered, 3),
            num_items=len(state.prompt.items),
            num_tokens=len(state.generated),
            queue=_queue(lifecycle, state, queued),
        )
        for state in islice(shown, MAX_MARKS)
    ]


def instances_of(lifecycle: RequestLifecycle, state: RequestState) -> list[str]:
    """Return the names of the instances that work on a request, the one that it waits for first."""
    names = [] if state.decode is None else [state.decode.instance.name]
    if state.prefill is not None:
        names.insert(0, state.prefill.instance.name)
    if state.phase is RequestPhase.ENCODING:
        names = [*lifecycle.encodes.working_on(state.id), *names]
    return names


def _queue(lifecycle: RequestLifecycle, state: RequestState, queued: str) -> str:
    """Return the stage in whose queue (``stage_queue``) a request is; ``queued`` is that of those without an
    instance."""
    if state.phase is RequestPhase.QUEUED:
        return queued
    if state.phase is RequestPhase.ENCODING and not lifecycle.encodes.working_on(state.id):
        return STAGE_NAMES[Stage.ENCODE]
    return STAGE_NAMES[Stage.PREFILL] if state.waits_for_prefill else ""
