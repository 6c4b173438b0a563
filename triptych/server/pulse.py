"""What an instance's own HTTP port tells of it."""

from dataclasses import dataclass, field

from triptych.clock import Clock
from triptych.messages.stats import InstanceStats
from triptych.topology import Role

LOADING = "loading the model"
NO_LEASE = "no lease from a frontend"
DRAINING = "draining"
MAX_SILENCE = 5.0
"""Seconds without a turn of the instance's loop after which it counts as stuck."""


@dataclass
class Pulse:
    """Signs of life of an instance. Its loop writes them, and another thread reads them; each is replaced whole."""

    name: str
    role: Role
    clock: Clock
    ticked: float | None = None
    """When the loop last turned, by the clock's ``now``; None while the model is loaded, before there is a loop."""
    not_ready: str = LOADING
    """Why the instance isn't ready; empty if it is."""
    stats: InstanceStats = field(default_factory=InstanceStats)
    """Those of the last heartbeat."""
    max_silence: float = MAX_SILENCE

    def why_unhealthy(self) -> str:
        """Return why the process should be started again; empty if it shouldn't."""
        silent = 0.0 if self.ticked is None else self.clock.now() - self.ticked
        return f"no turn of the loop for {silent:.1f} s" if silent > self.max_silence else ""

    def why_not_ready(self) -> str:
        """Return why the instance can't be given work; empty if it can."""
        return self.why_unhealthy() or self.not_ready
