"""Snapshots of a service at work, made of what the router knows."""

import time
from itertools import islice
from operator import attrgetter
from typing import Any

from triptych import __version__
from triptych.messages.operations import LaunchedInstance
from triptych.messages.stats import InstanceStats
from triptych.observe.pipeline import (
    InstanceView,
    Pipeline,
    PoolView,
    RequestMark,
    ServiceView,
    StageView,
    Verdict,
)
from triptych.observe.timeline import Interval
from triptych.router.launcher_view import STAGE_NAMES
from triptych.router.load_window import busy_share, queued_stage, stage_queue, step_seconds
from triptych.router.membership import InstanceLease
from triptych.router.request_state import RequestPhase, RequestState
from triptych.router.router import Router
from triptych.router.stage_metrics import saturation
from triptych.router.stats_history import MEMORY
from triptych.router.verdict import verdict
from triptych.topology import Stage, Topology
from triptych.types import RequestId

MAX_MARKS = 200
COUNT_EVERY = 1.0
"""Seconds between two times that the tokens of requests are counted: else each mark would differ from the last."""

_STAGES = {
    RequestPhase.QUEUED: "queue",
    RequestPhase.ENCODING: "encode",
    RequestPhase.PREFILLING: "prefill",
    RequestPhase.DECODING: "decode",
}
"""The stage of a timeline that a request is in."""
_QUEUED, _ENCODING = RequestPhase.QUEUED, RequestPhase.ENCODING  # looking members up is slow
_Parts = tuple[Any, ...]
"""What a view or a mark was made of: while it is the same, so are they."""
_PARTS = attrgetter("phase", "entered", "decode", "prefill", "prefill_needed")
"""Returns a mark's, without those that only some phases have. One call, because each snapshot asks all requests."""


class PipelineView:
    """Makes snapshots of a router. What is as it was in the last snapshot is the same object in the next one."""

    def __init__(self, router: Router, model: str) -> None:
        """``model`` is its name in the API."""
        self._router = router
        self._model = model
        self._began = time.time()
        self._epoch = self._began - router.clock()
        """When the router's clock was 0. Fixed, so that times don't change when the system's clock is set."""
        self._judged = -1
        self._views: dict[InstanceLease, tuple[_Parts, InstanceView]] = {}
        """Of the instances that have joined."""
        self._marks: dict[RequestId, tuple[_Parts, RequestMark]] = {}
        self._count_at = float("-inf")

    def snapshot(self) -> Pipeline:
        """Return the service as it is now."""
        now = self._router.clock()
        joined = self._joined(now)
        return Pipeline(
            time=round(self._epoch + now, 3),
            service=self._service(),
            stages=[self._stage(stage, joined, now) for stage in Stage],
            instances=[*(view for _, view in joined), *map(_expected, self._router.membership.expected(now))],
            requests=self._requests(now),
            events=list(self._router.events),
            verdict=self._latest_verdict(),
        )

    def current(self, request: str) -> list[Interval]:
        """Return what is done now for an HTTP request, as intervals that end now: one for each of its choices."""
        now, wall = self._router.clock(), time.time()
        return [
            Interval(_STAGES[state.phase], wall - (now - state.entered), wall, engine=(*self._working(state), "")[0])
            for state in self._router.lifecycle.requests
            if state.http_id == request
        ]

    def _latest_verdict(self) -> Verdict:
        """Return the verdict, which changes with each sample of the load."""
        load = self._router.load
        if load.number != self._judged:
            self._judged = load.number
            self._verdict = verdict(load.samples, self._router.control)
        return self._verdict

    def _service(self) -> ServiceView:
        router = self._router
        why_not = ""
        if router.draining or router.leaving:
            why_not = "the service is shutting down"
        elif not router.can_serve:
            why_not = router.missing_stages() or "a stage has no instance"
        return ServiceView(
            model=self._model,
            version=__version__,
            topology=str(Topology.of(lease.role for lease in router.membership)),
            ready=not why_not,
            why_not=why_not,
            began=self._began,
            num_requests=router.num_requests,
        )

    def _stage(self, stage: Stage, joined: list[tuple[InstanceLease, InstanceView]], now: float) -> StageView:
        shares = [view.busy for lease, view in joined if stage in lease.role.stages]
        queue = stage_queue(self._router.membership, self._router.lifecycle, stage, now)
        return StageView(
            name=STAGE_NAMES[stage],
            queued=queue.length,
            oldest_wait=round(queue.wait, 3),
            saturation=saturation(self._router.membership, stage),
            busy=sum(shares) / len(shares) if shares else 0.0,
        )

    def _joined(self, now: float) -> list[tuple[InstanceLease, InstanceView]]:
        """Return the instances that have joined."""
        membership, known, self._views = self._router.membership, self._views, {}
        launched = {one.name: (one.restarts, one.node) for one in membership.launched.processes(now)}
        for lease in membership:
            of_process = launched.get(lease.name, (0, ""))
            parts = lease.last_seen, lease.stats, lease.state, lease.next_role, of_process
            if (entry := known.get(lease)) is None or entry[0] != parts:
                entry = parts, _joined(lease, *of_process)
            self._views[lease] = entry
        return [(lease, view) for lease, (_, view) in self._views.items()]

    def _requests(self, now: float) -> list[RequestMark]:
        """Return the marks of the oldest requests."""
        lifecycle, known, self._marks = self._router.lifecycle, self._marks, {}
        shown = (state for state in lifecycle.requests if state.stream.record.counted)
        queued = STAGE_NAMES[queued_stage(self._router.membership)]
        if counts := now >= self._count_at:
            self._count_at = now + COUNT_EVERY
        for state in islice(shown, MAX_MARKS):
            parts = _PARTS(state)
            if state.phase is _QUEUED:
                parts += (queued,)
            elif state.phase is _ENCODING:
                parts += (lifecycle.encodes.working_on(state.id),)
            entry = known.get(state.id)
            if entry is None or entry[0] != parts or (counts and entry[1].num_tokens != len(state.generated)):
                entry = parts, self._mark(state, queued)
            self._marks[state.id] = entry
        return [mark for _, mark in self._marks.values()]

    def _mark(self, state: RequestState, queued: str) -> RequestMark:
        return RequestMark(
            key=state.id,
            id=state.http_id,
            phase=state.phase,
            instances=self._working(state),
            entered=round(self._epoch + state.entered, 3),
            num_items=len(state.prompt.items),
            num_tokens=len(state.generated),
            queue=self._queue(state, queued),
        )

    def _queue(self, state: RequestState, queued: str) -> str:
        """Return the stage in whose queue (``stage_queue``) a request is. ``queued`` is the one of those that no
        instance has."""
        if state.phase is RequestPhase.QUEUED:
            return queued
        if state.phase is RequestPhase.ENCODING and not self._router.lifecycle.encodes.working_on(state.id):
            return STAGE_NAMES[Stage.ENCODE]
        return STAGE_NAMES[Stage.PREFILL] if state.waits_for_prefill else ""

    def _working(self, state: RequestState) -> list[str]:
        """Return the names of the instances that work on a request, the one that it waits for first."""
        names = [] if state.decode is None else [state.decode.instance.name]
        if state.prefill is not None:
            names.insert(0, state.prefill.instance.name)
        if state.phase is RequestPhase.ENCODING:
            names = [*self._router.lifecycle.encodes.working_on(state.id), *names]
        return names


def _joined(lease: InstanceLease, restarts: int, node: str) -> InstanceView:
    history, load = lease.history, lease.stats.load
    hits = (_prefix_hits, _prefix_queries) if lease.role.has_decoder else (_item_hits, _item_queries)
    return InstanceView(
        name=lease.name,
        role=lease.role,
        state=lease.state,
        busy=busy_share(lease),
        running=load.running,
        waiting=load.waiting,
        step_seconds=step_seconds(lease),
        pools=[PoolView(pool.name, pool.size, pool.used, pool.cached) for pool in load.pools],
        received_rate=history.rate(_received),
        sent_rate=history.rate(_sent),
        cache_hit_rate=history.ratio(*hits, MEMORY),
        restarts=restarts,
        node=node,
        next_role=lease.next_role or "",
    )


def _expected(one: LaunchedInstance) -> InstanceView:
    return InstanceView(
        name=one.name,
        role=one.role or "",
        state=one.state,
        busy=0.0,
        running=0,
        waiting=0,
        step_seconds=0.0,
        pools=[],
        received_rate=0.0,
        sent_rate=0.0,
        cache_hit_rate=None,
        restarts=one.restarts,
        node=one.node,
        pending=one.pending,
    )


def _received(stats: InstanceStats) -> float:
    return stats.received.counters.bytes if stats.received else 0


def _sent(stats: InstanceStats) -> float:
    return stats.sent.bytes if stats.sent else 0


def _prefix_hits(stats: InstanceStats) -> float:
    return stats.language.prefix_hits if stats.language else 0


def _prefix_queries(stats: InstanceStats) -> float:
    return stats.language.prefix_queries if stats.language else 0


def _item_hits(stats: InstanceStats) -> float:
    return stats.encode.cache_hits if stats.encode else 0


def _item_queries(stats: InstanceStats) -> float:
    return stats.encode.cache_queries if stats.encode else 0
