"""The life of an instance, as a state machine. Holds no device and no socket, and knows no time."""

import enum
import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


class LifeState(enum.StrEnum):
    """Where an instance is in its life. A frontend that lists it as draining includes CHANGING."""

    STARTING = "starting"
    """It loads the model."""
    REGISTERING = "registering"
    """No frontend has given it a lease, or all have lost it."""
    SERVING = "serving"
    """It gets work."""
    CHANGING = "changing role"
    """It gets nothing new, and takes another role once it has finished."""
    DRAINING = "draining"
    """It gets nothing new, has handed back what hadn't begun, and finishes the rest."""
    LEAVING = "leaving"
    """It tells all frontends, which give what it still had to others, and ends."""
    ENDED = "ended"


_LEAVES = {LifeState.LEAVING: "stopped, broken or refused"}

TRANSITIONS: Mapping[LifeState, Mapping[LifeState, str]] = {
    LifeState.STARTING: {LifeState.REGISTERING: "loaded", LifeState.ENDED: "can't start"},
    LifeState.REGISTERING: {LifeState.SERVING: "a lease", LifeState.DRAINING: "SIGTERM"} | _LEAVES,
    LifeState.SERVING: {
        LifeState.REGISTERING: "no lease left",
        LifeState.CHANGING: "asked for another role",
        LifeState.DRAINING: "SIGTERM",
    }
    | _LEAVES,
    LifeState.CHANGING: {
        LifeState.REGISTERING: "role taken, or work lost",
        LifeState.SERVING: "role kept",
        LifeState.DRAINING: "SIGTERM",
    }
    | _LEAVES,
    LifeState.DRAINING: {LifeState.LEAVING: "done, late, or no lease left"},
    LifeState.LEAVING: {LifeState.ENDED: "closed"},
    LifeState.ENDED: {},
}
"""From each state, those that may follow, and why they do."""


class Life:
    """The state of one instance's life."""

    def __init__(self) -> None:
        self.state = LifeState.STARTING

    @property
    def is_ending(self) -> bool:
        """Whether it gets nothing new any more, in any role."""
        return self.state in (LifeState.DRAINING, LifeState.LEAVING, LifeState.ENDED)

    def enter(self, state: LifeState) -> None:
        """Enter a state; that in which it is already changes nothing. Raises RuntimeError for one that can't follow."""
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"an instance that is {self.state} can't be {state} next")
        log.debug("%s, after %s: %s", state, self.state, TRANSITIONS[self.state][state])
        self.state = state

    def has_lease(self, *, held: bool) -> None:
        """Note whether any frontend holds a lease."""
        if held and self.state is LifeState.REGISTERING:
            self.enter(LifeState.SERVING)
        elif not held and self.state is LifeState.SERVING:
            self.enter(LifeState.REGISTERING)
