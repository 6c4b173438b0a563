"""What a service does at one time, as numbers that a verdict is made of. Holds no device and no socket."""

from dataclasses import dataclass, field

from triptych.router.request_state import RequestPhase
from triptych.topology import Role, Stage

PREEMPTION_SECONDS = 10.0
"""Seconds in which preemptions are counted."""


@dataclass(frozen=True)
class StageQueue:
    """What waits at the frontend for an instance of a stage: items for encode, requests for the others."""

    length: int = 0
    wait: float = 0.0
    """Seconds that the first of them has waited."""


@dataclass(frozen=True)
class InstanceSample:
    """One instance that takes work. Rates are means of the last seconds."""

    name: str
    role: Role
    busy: float
    """Share of the time in which it computed, 0 to 1."""
    encode_waiting: int = 0
    """Items that wait there."""
    waiting: int = 0
    """Requests that wait there for a slot, pages, media or KV."""
    running: int = 0
    """Requests that it prefills or decodes."""
    max_running: int = 0
    kv_fill: float = 0.0
    """Share of its KV pages that requests hold, of the layers that have the fewest left."""
    preemptions: int = 0
    """In the last ``PREEMPTION_SECONDS``."""
    step_seconds: float = 0.0
    """Mean time of a step or an item; 0 without one."""


@dataclass(frozen=True)
class FrontendSample:
    """The frontend itself, which receives, fetches and plans requests, and streams their answers."""

    busy: float = 0.0
    """Processor time of its process ÷ time, over the last seconds, at most 1: it has one event loop."""
    preparing: StageQueue = StageQueue()
    """Requests whose media are being fetched, or whose prompts are being planned."""


@dataclass(frozen=True)
class LoadSample:
    """A service at one time."""

    instances: tuple[InstanceSample, ...] = ()
    queues: dict[Stage, StageQueue] = field(default_factory=dict)
    num_in: dict[RequestPhase, int] = field(default_factory=dict)
    """Requests by phase; phases without any may be missing."""
    num_clients: int = 0
    """Clients with requests in flight."""
    largest_client: str = ""
    """A name for the one with most of them, without its key or address."""
    largest_share: float = 0.0
    """Its share of the requests in flight."""
    frontend: FrontendSample = FrontendSample()
