"""Settings of how instances stay registered, start and end."""

from dataclasses import dataclass

from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError


@dataclass(frozen=True)
class LeaseConfig(Settings):
    """Registration, start and end of instances."""

    # the expiry is four heartbeats, so that a loop that is late isn't taken for a dead process
    heartbeat: float = setting(0.5, "seconds between two heartbeats of an instance", gt=0)
    lease_expiry: float = setting(2.0, "seconds without a heartbeat after which an instance counts as gone", gt=0)
    start_timeout: float = setting(600.0, "seconds that loading a model may take", ge=0)
    drain_timeout: float = setting(
        30.0, "seconds that running requests may take to finish after SIGTERM", ge=0, also=("shutdown_timeout",)
    )

    def check_together(self) -> None:
        if self.heartbeat >= self.lease_expiry:
            raise ConfigError(f"--heartbeat {self.heartbeat} must be shorter than --lease-expiry {self.lease_expiry}")
