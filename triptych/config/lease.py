"""Settings of how instances stay registered, start and end."""

import math
from dataclasses import dataclass

from triptych.config.http import MAX_PORT
from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

MAX_RESTARTS = 10**6
HEARTBEAT = 0.5
"""Seconds between two heartbeats, unless leases are short. Figures of instances are as old as this."""


def _restart(text: str) -> str:
    if text in ("always", "never") or (text.isascii() and text.isdecimal() and int(text) <= MAX_RESTARTS):
        return text
    raise ConfigError(f"{text!r} is neither always, never nor a number of restarts")


@dataclass(frozen=True)
class LeaseConfig(Settings):
    """Registration, start and end of instances."""

    heartbeat: float = setting(
        0.0,
        "seconds between two heartbeats of an instance; 0 for half a second, or a quarter of a shorter expiry",
        ge=0,
        internal=True,
    )
    lease_expiry: float = setting(2.0, "seconds without a heartbeat after which an instance counts as gone", gt=0)
    start_timeout: float = setting(
        600.0, "seconds that loading a model may take, and that an instance without a frontend waits for one", ge=0
    )
    drain_timeout: float = setting(
        30.0, "seconds that running requests may take to finish after SIGTERM", ge=0, also=("shutdown_timeout",)
    )
    restart: str = setting(
        "always",
        "what serve does when one of its processes ends after the service was ready: start it again always, never (the "
        "service ends) or at most this often before it has been ready for a minute",
        parse=_restart,
    )
    leave_instances: bool = setting(
        False,
        "for --role frontend: on SIGTERM, leave the instances to the frontend that is started in its place, and answer "
        "what still comes while it drains; for a service manager that replaces frontends one by one",
    )
    health_port: int = setting(
        0,
        "port on --cluster-host at which an instance of --role answers /health, /ready and /metrics; 0 for none",
        ge=0,
        le=MAX_PORT,
    )

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats: a loop that is late by a few isn't taken for a dead process."""
        return self.heartbeat or min(HEARTBEAT, self.lease_expiry / 4)

    @property
    def max_restarts(self) -> float:
        """How often a process is started again before it has recovered."""
        return {"always": math.inf, "never": 0.0}[self.restart] if self.restart.isalpha() else float(self.restart)

    def check_together(self) -> None:
        _restart(self.restart)
        if self.heartbeat >= self.lease_expiry:
            raise ConfigError(f"heartbeats {self.heartbeat} s apart are too few for --lease-expiry {self.lease_expiry}")
