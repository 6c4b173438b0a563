"""Snapshots of a service at work, made of what the router knows."""

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from triptych import __version__
from triptych.messages.operations import LaunchedInstance
from triptych.messages.stats import InstanceStats
from triptych.observe.pipeline import (
    ALONE,
    EventView,
    FrontendNames,
    InstanceView,
    Pipeline,
    PoolView,
    RequestMark,
    ServiceView,
    StageView,
    Verdict,
)
from triptych.observe.timeline import Interval
from triptych.router.instance import Instance
from triptych.router.launcher_view import STAGE_NAMES
from triptych.router.load_window import busy_share, stage_queue, step_seconds
from triptych.router.request_marks import RequestMarks, instances_of
from triptych.router.request_state import RequestPhase
from triptych.router.router import Router
from triptych.router.stage_metrics import saturation
from triptych.router.stats_history import MEMORY
from triptych.router.verdict import verdict
from triptych.running_time import STILL_SECONDS
from triptych.topology import Stage, Topology

COUNT_EVERY = 1.0
"""Seconds between two times that the tokens of requests are counted."""

_STAGES = {
    RequestPhase.QUEUED: "queue",
    RequestPhase.ENCODING: "encode",
    RequestPhase.PREFILLING: "prefill",
    RequestPhase.DECODING: "decode",
}
"""The stage of a timeline that a request is in."""
Value = TypeVar("Value")
_Versions = tuple[tuple[int, ...], tuple[Any, ...], float, int, int]
"""Versions of the instances, the work, the counts of tokens, the events and the verdict."""
_Made = tuple[Any, ...]
"""What a view was made of: while it is the same, so is the view."""


class _Part(Generic[Value]):
    """A part of snapshots. It stays the same object while it is equal, and isn't made while its version is the same."""

    _version: object = None
    _value: Value | None = None

    def at(self, version: object, make: Callable[[], Value]) -> Value:
        """Return the part. ``version`` must be another one whenever what it is made of has changed, and not None."""
        if self._value is None or version != self._version:
            if (made := make()) != self._value:
                self._value = made
            self._version = version
        assert self._value is not None
        return self._value


class PipelineView:
    """Makes snapshots of a router. What is as it was in the last snapshot is the same object in the next one, and only
    what may have changed is looked at."""

    def __init__(
        self,
        router: Router,
        model: str,
        among: FrontendNames = ALONE,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``model`` is its name in the API. ``wall`` and ``monotonic`` are the clocks, in seconds, of which the second
        one isn't set and counts pauses."""
        self._router = router
        self._lifecycle = router.lifecycle
        self._model = model
        self._among = among
        self._wall, self._monotonic = wall, monotonic
        self._began = wall()
        self._ticks = monotonic()
        """When it began, by the monotonic clock: times don't change when the system's clock is set."""
        self._epoch = self._began - router.clock()
        """When the router's clock was 0, or would have been without the pauses that it doesn't count."""
        self._views: dict[Instance, tuple[_Made, InstanceView]] = {}
        """What is shown of the instances that have joined."""
        self._marks = RequestMarks(router.membership, router.lifecycle, lambda: self._epoch)
        self._instances = _Part[list[InstanceView]]()
        self._service = _Part[ServiceView]()
        self._stages = _Part[list[StageView]]()
        self._requests = _Part[list[RequestMark]]()
        self._tokens = _Part[dict[str, int]]()
        self._events = _Part[list[EventView]]()
        self._verdict = _Part[Verdict]()
        self._moving = True
        """Whether the last snapshot had something that changes with the time alone: a wait, or when it ends."""
        self._seen: _Versions | None = None
        """Those of the last snapshot."""

    @property
    def is_current(self) -> bool:
        """Whether nothing but the time has changed since the last snapshot."""
        return self._versions(self._router.clock()) == self._seen

    def snapshot(self) -> Pipeline:
        """Return the service as it is now."""
        router, now = self._router, self._router.clock()
        paused = self._began + self._monotonic() - self._ticks - (self._epoch + now)
        if paused > STILL_SECONDS:
            self._epoch += paused
        members, work, counted, events, judged = self._versions(now)
        instances = self._instances.at(members, lambda: self._look_at_instances(now))
        service = self._service.at(work, self._look_at_service)
        stages = self._stages.at(work, lambda: self._look_at_stages(now))
        self._moving = bool(service.why_not) or any(stage.queued for stage in stages)
        self._seen = self._versions(now)
        return Pipeline(
            time=round(self._epoch + now, 3),
            service=service,
            stages=stages,
            instances=instances,
            requests=self._requests.at(work, self._marks.look),
            tokens=self._tokens.at(counted, self._marks.count),
            events=self._events.at(events, lambda: list(router.events)),
            verdict=self._verdict.at(
                judged, lambda: verdict(router.load.samples, self._among.control or router.control)
            ),
        )

    def _versions(self, now: float) -> _Versions:
        router = self._router
        members, requests = router.membership.version(now), self._lifecycle.requests.changes.number
        work = members, requests, router.draining, router.leaving, now if self._moving else None
        return members, work, now // COUNT_EVERY, router.events.number, router.load.number

    def current(self, request: str) -> list[Interval]:
        """Return what is done now for an HTTP request, as intervals that end now: one for each of its choices."""
        now, wall = self._router.clock(), self._wall()
        return [
            Interval(
                _STAGES[state.phase],
                wall - (now - state.entered),
                wall,
                engine=(*instances_of(self._lifecycle, state), "")[0],
            )
            for state in self._lifecycle.requests
            if state.http_id == request
        ]

    def _look_at_service(self) -> ServiceView:
        router = self._router
        why_not = ""
        if router.draining or router.leaving:
            why_not = "the service is shutting down"
        elif not router.availability.can_serve:
            why_not = router.availability.missing_stages() or "a stage has no instance"
        instances = list(router.membership)
        num_frontends = max([1, len(self._among.ports), *(instance.num_frontends for instance in instances)])
        join = next((instance.join for instance in instances if instance.num_frontends > 1), "")
        return ServiceView(
            model=self._model,
            version=__version__,
            topology=str(Topology.of(instance.role for instance in instances)),
            ready=not why_not,
            why_not=why_not,
            began=self._began,
            num_requests=router.num_requests,
            num_frontends=num_frontends,
            frontend=(self._among.own or join) if num_frontends > 1 else "",
            frontend_ports=dict(self._among.ports),
        )

    def _look_at_stages(self, now: float) -> list[StageView]:
        return [self._stage(stage, now) for stage in Stage]

    def _stage(self, stage: Stage, now: float) -> StageView:
        shares = [view.busy for instance, (_, view) in self._views.items() if stage in instance.role.stages]
        queue = stage_queue(self._router.membership, self._lifecycle, stage, now)
        return StageView(
            name=STAGE_NAMES[stage],
            queued=queue.length,
            oldest_wait=round(queue.wait, 3),
            saturation=saturation(self._router.membership, stage),
            busy=sum(shares) / len(shares) if shares else 0.0,
        )

    def _look_at_instances(self, now: float) -> list[InstanceView]:
        membership, known, self._views = self._router.membership, self._views, {}
        launched = {one.name: (one.restarts, one.node) for one in membership.launched.processes(now)}
        for instance in membership:
            of_process = launched.get(instance.name, (0, ""))
            made_of = instance.last_seen, instance.stats, instance.state, instance.next_role, of_process
            if (entry := known.get(instance)) is None or entry[0] != made_of:
                entry = made_of, _joined(instance, *of_process)
            self._views[instance] = entry
        return [*(view for _, view in self._views.values()), *map(_expected, membership.expected(now))]


def _joined(instance: Instance, restarts: int, node: str) -> InstanceView:
    history, load = instance.history, instance.stats.load
    hits = (_prefix_hits, _prefix_queries) if instance.role.has_decoder else (_item_hits, _item_queries)
    return InstanceView(
        name=instance.name,
        role=instance.role,
        state=instance.state,
        busy=busy_share(instance),
        running=load.running,
        waiting=load.waiting,
        step_seconds=step_seconds(instance),
        pools=[PoolView(pool.name, pool.size, pool.used, pool.cached) for pool in load.pools],
        received_rate=history.rate(_received),
        sent_rate=history.rate(_sent),
        cache_hit_rate=history.ratio(*hits, MEMORY),
        restarts=restarts,
        node=node,
        next_role=instance.next_role or "",
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
