"""Snapshots of a service at work, made of what the router knows."""

from collections.abc import Mapping

from triptych import __version__
from triptych.gateway.servers import Server
from triptych.messages.operations import LaunchedInstance
from triptych.messages.stats import InstanceStats
from triptych.observe.pipeline import (
    ALONE,
    FrontendNames,
    InstanceView,
    Pipeline,
    PoolView,
    ServiceView,
    StageView,
    Verdict,
)
from triptych.observe.timeline import Interval
from triptych.router.instance import Instance
from triptych.router.launcher_view import STAGE_NAMES
from triptych.router.load_window import busy_share, stage_queue, step_seconds
from triptych.router.request_marks import instances_of, request_marks
from triptych.router.request_state import RequestPhase
from triptych.router.router import Router
from triptych.router.stage_metrics import saturation
from triptych.router.stats_history import MEMORY
from triptych.router.verdict import FRONTEND, verdict
from triptych.running_time import STILL_SECONDS
from triptych.topology import Role, Stage, Topology

IDLE = 0.1
"""Busy share of the frontend below which it counts as idle: its viewers and heartbeats alone would be news."""
UNREADY = "service"
"""What a verdict calls a service that isn't ready."""
_STAGES = {
    RequestPhase.QUEUED: "queue",
    RequestPhase.ENCODING: "encode",
    RequestPhase.PREFILLING: "prefill",
    RequestPhase.DECODING: "decode",
}
"""The stage of a timeline that a request is in."""


class PipelineView:
    """Makes snapshots of a router."""

    def __init__(self, router: Router, model: str, among: FrontendNames = ALONE, *, kills: bool = False) -> None:
        """``model`` is its name in the API. ``kills`` says whether the page may kill instances."""
        self._router = router
        self._lifecycle = router.lifecycle
        self._model = model
        self._among = among
        self._kills = kills
        self._began = router.clock.wall()
        self._ticks = router.clock.monotonic()
        """When it began, by the monotonic clock: times don't change when the system's clock is set."""
        self._epoch = self._began - router.clock.now()
        """When the router's clock was 0, or would have been without the pauses that it doesn't count."""

    def snapshot(self) -> Pipeline:
        """Return the service as it is now."""
        router, now = self._router, self._router.clock.now()
        paused = self._began + router.clock.monotonic() - self._ticks - (self._epoch + now)
        if paused > STILL_SECONDS:
            self._epoch += paused
        launched = {one.name: one for one in router.membership.launched.processes(now)}
        samples = router.load.samples
        # the shares that the verdict rests on, so that the page says one thing
        busy = {one.name: one.busy for one in samples[-1].instances} if samples else {}
        joined = {one: _joined(one, busy.get(one.name), launched.get(one.name)) for one in router.membership}
        service, control = self._service(), self._among.control or router.control
        found = verdict(samples, control)
        if not service.ready and not found.stage:
            found = Verdict(UNREADY, f"Not ready: {service.why_not}.", f"triptych status --control {control} says why.")
        return Pipeline(
            time=round(self._epoch + now, 3),
            service=service,
            frontend=self._frontend(now),
            stages=[self._stage(stage, joined, now) for stage in Stage],
            instances=[
                *joined.values(),
                *map(_expected, router.membership.expected(now)),
                *map(_server, router.servers or ()),
            ],
            requests=request_marks(router.membership, router.lifecycle, self._epoch),
            events=list(router.events),
            verdict=found,
        )

    def current(self, request: str) -> list[Interval]:
        """Return what is done now for an HTTP request, as intervals that end now: one for each of its choices."""
        now = self._router.clock.now()
        return [
            Interval(
                _STAGES[state.phase],
                state.stream.record.now() - (now - state.entered),
                state.stream.record.now(),
                instance=(*instances_of(self._lifecycle, state), "")[0],
            )
            for state in self._lifecycle.requests
            if state.http_id == request
        ]

    def _service(self) -> ServiceView:
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
            kills=self._kills,
        )

    def _frontend(self, now: float) -> StageView:
        router = self._router
        preparing, samples = router.lifecycle.admission.in_preparation(now), router.load.samples
        busy = samples[-1].frontend.busy if samples else 0.0
        return StageView(
            name=FRONTEND,
            queued=preparing.length,
            oldest_wait=round(preparing.wait, 3),
            saturation=router.lifecycle.admission.share_in_flight,
            busy=round(busy, 2) if busy >= IDLE else 0.0,
        )

    def _stage(self, stage: Stage, joined: Mapping[Instance, InstanceView], now: float) -> StageView:
        shares = [view.busy for instance, view in joined.items() if stage in instance.role.stages]
        queue = stage_queue(self._router.membership, self._lifecycle, stage, now)
        return StageView(
            name=STAGE_NAMES[stage],
            queued=queue.length,
            oldest_wait=round(queue.wait, 3),
            saturation=saturation(self._router.membership, stage),
            busy=sum(shares) / len(shares) if shares else 0.0,
        )


def _joined(instance: Instance, busy: float | None, process: LaunchedInstance | None) -> InstanceView:
    history, load = instance.history, instance.stats.load
    hits = (_prefix_hits, _prefix_queries) if instance.role.has_decoder else (_item_hits, _item_queries)
    return InstanceView(
        name=instance.name,
        role=instance.role,
        state=instance.state,
        busy=busy_share(instance) if busy is None else busy,
        running=load.running,
        waiting=load.waiting,
        step_seconds=step_seconds(instance),
        pools=[PoolView(pool.name, pool.size, pool.used, pool.cached) for pool in load.pools],
        received_rate=history.rate(_received),
        sent_rate=history.rate(_sent),
        cache_hit_rate=history.ratio(*hits, MEMORY),
        restarts=process.restarts if process else 0,
        node=process.node if process else "",
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


def _server(one: Server) -> InstanceView:
    return InstanceView(
        name=one.name,
        role=Role.PD,
        state=one.state,
        busy=0.0,
        running=one.running,
        waiting=0,
        step_seconds=0.0,
        pools=[],
        received_rate=0.0,
        sent_rate=0.0,
        cache_hit_rate=None,
        restarts=one.losses,
        node=one.url,
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
