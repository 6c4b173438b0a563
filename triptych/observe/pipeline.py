"""Snapshots of a service at work, as the page at ``/ui`` and ``triptych top`` show them. They hold no content of
requests.

Times are in seconds since the epoch, durations in seconds, shares from 0 to 1. Those that a snapshot has many of are
left to reference counting (``gc=False``): none is part of a cycle, and ten snapshots a second are made. They
have points in time instead of durations that grow, so that a snapshot without news is equal to the one before.
"""

from msgspec import Struct

from triptych.observe.timeline import Interval

RUNNING, OK, FAILED = "running", "ok", "failed"
"""States of a request: in flight, answered, and failed or rejected by the service. A request that is refused for what
it asks, or whose client is gone before there is a status, has none of them."""


class FrontendNames(Struct, frozen=True):
    """The frontends that one supervisor has started."""

    own: str = ""
    """This one's; empty without a supervisor."""
    control: str = ""
    """The control address of this one that operators know; it stays the same when another process takes over. Empty
    without a supervisor."""
    ports: dict[str, int] = {}
    """Where each of several answers HTTP alone, by their names."""


ALONE = FrontendNames()


class ServiceView(Struct, frozen=True):
    """What is served, and whether it can be."""

    model: str
    version: str
    topology: str
    """Topology of the instances that have joined, like ``1E1PD``; empty without any."""
    ready: bool
    why_not: str
    """Why it isn't ready; empty if it is."""
    began: float
    """When the frontend started."""
    num_requests: int
    """Requests in flight: queued or dispatched."""
    num_frontends: int = 1
    """Frontends of the service, as far as this one knows."""
    frontend: str = ""
    """Which of several frontends this is: its name at its supervisor, or the control address at which instances join
    it. Empty if it is the only one."""
    frontend_ports: dict[str, int] = {}
    """Ports at which each of several frontends answers HTTP alone, by their names. Empty if no one supervisor has
    started them."""
    kills: bool = False
    """Whether the page may kill instances: a demonstration's, on this machine."""


class StageView(Struct, frozen=True, gc=False):
    """The frontend, or one stage: encode, prefill or decode."""

    name: str
    queued: int
    """Items (encode) or requests that wait for an instance of the stage; requests that the frontend prepares."""
    oldest_wait: float
    """Seconds that the first of them has waited."""
    saturation: float
    """The metric ``triptych:stage_saturation``; of the frontend, requests in flight ÷ ``--max-queue``."""
    busy: float
    """Mean busy share of the instances that have the stage, or that of the frontend's process,
    in which less than a tenth is 0."""


class PoolView(Struct, frozen=True, gc=False):
    """Use of one of an instance's pools."""

    name: str
    size: int
    used: int
    cached: int


class InstanceView(Struct, frozen=True, gc=False):
    """One instance, or a process that the supervisor starts, restarts or has given up."""

    name: str
    role: str
    state: str
    """``serving``, ``draining``, or a ``LaunchState``."""
    busy: float
    """Share of the last seconds in which its compute thread worked."""
    running: int
    waiting: int
    step_seconds: float
    """Mean time of a step or of an item in the last seconds; 0 without one."""
    pools: list[PoolView]
    received_rate: float
    """Bytes per second, like ``sent_rate``, as a mean of the last seconds."""
    sent_rate: float
    cache_hit_rate: float | None
    """Hits ÷ queries of the encoder cache or the prefix cache in the last minute; None without a query."""
    restarts: int = 0
    node: str = ""
    """The machine it runs on; empty for the supervisor's."""
    pending: str = ""
    """Why it has no place yet."""
    next_role: str = ""


class RequestMark(Struct, frozen=True, gc=False):
    """A request in flight."""

    key: str
    """Its own, because choices of one HTTP request have the same id, and clients may give the same to several."""
    id: str
    """Id of its HTTP request."""
    phase: str
    """A ``RequestPhase``."""
    instances: list[str]
    """Names of those that work on it now."""
    entered: float
    """When this phase began."""
    num_items: int
    num_tokens: int
    """Tokens that it has generated."""
    queue: str
    """The stage for which it, or all its items that are left, wait at the frontend; empty if an instance has it."""


class EventView(Struct, frozen=True):
    """Something that happened to an instance or a request: a loss, a restart, a recovery, a change."""

    number: int
    """Grows by one with each event of this frontend."""
    time: float
    kind: str
    """``joined``, ``lost``, ``left``, ``recovered``, ``failed``, ``restarting`` or ``changed``."""
    text: str


class Verdict(Struct, frozen=True):
    """Which stage binds now and why."""

    stage: str
    """``frontend``, ``encode``, ``prefill`` or ``decode``; ``client`` if one client's load binds;
    ``service`` if it isn't ready; empty if nothing binds."""
    sentence: str
    """With the figures that it rests on."""
    advice: str
    """What would help; empty if nothing binds."""


class Pipeline(Struct, frozen=True):
    """A service at one time."""

    time: float
    service: ServiceView
    frontend: StageView
    stages: list[StageView]
    instances: list[InstanceView]
    requests: list[RequestMark]
    """At most 200, the oldest first."""
    events: list[EventView]
    """The last 50."""
    verdict: Verdict


class RequestView(Struct, frozen=True):
    """An HTTP request that generates, in flight or among the last that ended."""

    id: str
    client: str
    """A digest, as in ``key 1a2b3c4d`` or ``address 5e6f7a8b``."""
    endpoint: str
    began: float
    seconds: float
    """So far, or in all."""
    ended: bool
    state: str
    """``RUNNING``, ``OK``, ``FAILED`` or, for none of them, empty."""
    status: int
    """HTTP status; 0 without one."""
    error: str
    """Name of the error; empty if none."""
    finish_reason: str
    num_prompt: int
    num_items: int
    num_tokens: int
    num_reused: int
    """Prompt tokens found in a prefix cache."""
    time_to_first_token: float | None
    time_per_token: float | None
    """Mean after the first."""
    slowest: str
    """The stage of the timeline that took longest."""
    trace_id: str
    """Empty without traces."""
    trace_url: str = ""
    """Where the trace is shown; empty in lists, and if the operator hasn't said where."""
    timeline: list[Interval] = []
    """Empty in lists. What is still being done has an end of 0."""


class FiguresBucket(Struct, frozen=True):
    """What was measured in one span of ``Figures.step`` seconds."""

    time: float
    """When it began."""
    num_ended: int
    num_failed: int
    num_good: int
    """Those that ended within the objective."""
    num_tokens: int
    time_to_first_token: list[float]
    """Median and 90th percentile; empty without requests, as is ``time_per_token``."""
    time_per_token: list[float]
    prefix_hit_rate: float | None
    encode_hit_rate: float | None


class Figures(Struct, frozen=True):
    """The last minutes, hour or day."""

    step: float
    buckets: list[FiguresBucket]
    """The oldest first; spans without any request are left out."""
