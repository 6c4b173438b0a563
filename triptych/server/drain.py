"""The drain of an instance: from SIGTERM until it has nothing left to do. Callers pass the time."""

from dataclasses import dataclass

QUIET_SECONDS = 0.3
"""Seconds without work after which an instance is drained: work that a frontend sent before it heard of the drain has
come by then."""


@dataclass
class Drain:
    """An instance that gets nothing new, and finishes what it has."""

    began: float
    timeout: float
    """Seconds that it may take."""
    _idle_since: float | None = None

    def is_over(self, now: float, *, idle: bool) -> bool:
        """Return whether the instance may end. Call it every time that its loop turns."""
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        is_quiet = self._idle_since is not None and now - self._idle_since >= QUIET_SECONDS
        return is_quiet or now - self.began >= self.timeout
