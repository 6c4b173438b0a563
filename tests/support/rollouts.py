"""A simulated service for the policies of rollouts: every start and drain may take any time, and processes may end."""

from dataclasses import dataclass

from hypothesis import strategies as st

from triptych.cluster.rollout import Replacing
from triptych.messages.operations import LaunchState

TIMEOUT = 30.0
STAGES = {
    "E": frozenset({"encode"}),
    "P": frozenset({"prefill"}),
    "D": frozenset({"decode"}),
    "PD": frozenset({"prefill", "decode"}),
    "EPD": frozenset({"encode", "prefill", "decode"}),
}
ROLES = st.lists(st.sampled_from(sorted(STAGES)), min_size=1, max_size=6)
TIMES = st.integers(0, 5)


@dataclass
class Simulated:
    """A process and its replacement. ``starts_in`` and ``drains_in`` count looks, None for a start that fails."""

    starts_in: int | None = 0
    drains_in: int = 0
    old_runs: bool = True
    retired: bool = False
    new: LaunchState | None = None
    is_down_for: int = 0

    @property
    def seen(self) -> Replacing:
        current_is_ready = self.new is LaunchState.READY if self.retired else self.is_down_for == 0
        return Replacing(self.old_runs, current_is_ready, self.new)

    def turn(self) -> None:
        self.is_down_for = max(0, self.is_down_for - 1)
        if self.new is LaunchState.STARTING:
            if self.starts_in is None:
                self.new = LaunchState.FAILED
            elif self.starts_in == 0:
                self.new = LaunchState.READY
            else:
                self.starts_in -= 1
        if self.retired and self.old_runs:
            self.old_runs = self.drains_in > 0
            self.drains_in -= 1
