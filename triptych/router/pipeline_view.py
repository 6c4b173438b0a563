"""Snapshots of a service at work, made of what the router knows."""

import time
from itertools import islice

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

MAX_MARKS = 200

_STAGES = {
    RequestPhase.QUEUED: "queue",
    RequestPhase.ENCODING: "encode",
    RequestPhase.PREFILLING: "prefill",
    RequestPhase.DECODING: "decode",
}
"""The stage of a timeline that a request is in."""


class PipelineView:
    """Makes snapshots of a router."""

    def __init__(self, router: Router, model: str) -> None:
        """``model`` is its name in the API."""
        self._router = router
        self._model = model
        self._began = time.time()
        self._judged = -1

    def snapshot(self) -> Pipeline:
        """Return the service as it is now."""
        router = self._router
        now = router.clock()
        return Pipeline(
            time=time.time(),
            service=self._service(),
            stages=[self._stage(stage, now) for stage in Stage],
            instances=self._instances(now),
            requests=self._marks(now),
            events=list(router.events),
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

    def _stage(self, stage: Stage, now: float) -> StageView:
        members = [lease for lease in self._router.membership if stage in lease.role.stages]
        queue = stage_queue(self._router.membership, self._router.lifecycle, stage, now)
        return StageView(
            name=STAGE_NAMES[stage],
            queued=queue.length,
            oldest_wait=queue.wait,
            saturation=saturation(self._router.membership, stage),
            busy=sum(busy_share(lease) for lease in members) / len(members) if members else 0.0,
        )

    def _instances(self, now: float) -> list[InstanceView]:
        membership = self._router.membership
        launched = {one.name: one for one in membership.launched.processes(now)}
        joined = [_joined(lease, launched.get(lease.name)) for lease in membership]
        return joined + [_expected(one) for one in membership.expected(now)]

    def _marks(self, now: float) -> list[RequestMark]:
        """Return the marks, by position, because they are most of the work of a snapshot."""
        shown = (state for state in self._router.lifecycle.requests if state.stream.record.counted)
        queued = STAGE_NAMES[queued_stage(self._router.membership)]
        return [
            RequestMark(
                state.http_id,
                state.phase,
                self._working(state),
                round(now - state.entered, 2),
                len(state.prompt.items),
                len(state.generated),
                self._queue(state, queued),
            )
            for state in islice(shown, MAX_MARKS)
        ]

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


def _joined(lease: InstanceLease, launched: LaunchedInstance | None) -> InstanceView:
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
        restarts=launched.restarts if launched else 0,
        node=launched.node if launched else "",
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
