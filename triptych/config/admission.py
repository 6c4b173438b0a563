"""Settings of how much work the frontend takes on, and to which instances it gives it."""

from dataclasses import dataclass

from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

PLACEMENTS = ("affinity", "least-loaded", "round-robin")


@dataclass(frozen=True)
class AdmissionConfig(Settings):
    """Admission, placement and time limits of requests."""

    max_queue: int = setting(
        256,
        "maximum requests in flight: being prepared, queued or running; more are rejected with 503",
        ge=1,
        common=True,
    )
    max_queue_per_client: int = setting(
        0,
        "maximum requests in flight of one client (an API key, or an address); more are rejected with 429; 0 for no "
        "limit",
        ge=0,
    )
    max_inflight_mb: int = setting(
        2048,
        "memory for bodies and media files of all requests in flight, in MiB; more is rejected with 503. One client may"
        " use half of it; beyond that, its requests are rejected with 429",
        ge=1,
    )
    placement: str = setting(
        "affinity",
        "how instances are chosen. affinity: the one that probably has the item or the prefix cached, unless it "
        "has much more work than others; least-loaded: the one with the least work; round-robin: in turns",
        choices=PLACEMENTS,
    )
    auto_roles: bool = setting(
        False,
        "change the roles of instances as the load does: instances of an unsplit topology (such as 4EPD) encode, or "
        "prefill and decode, or do all, by what these took of the last seconds; for one frontend",
    )
    restart_hold: float = setting(
        30.0,
        "seconds that requests wait for a stage whose last instance was lost, or longer while it is being restarted; "
        "after that, they fail with 503",
        ge=0,
    )
    request_timeout: float = setting(600.0, "seconds after which a request that isn't finished fails", gt=0)

    def check_together(self) -> None:
        if self.max_queue_per_client > self.max_queue:
            raise ConfigError(
                f"--max-queue-per-client {self.max_queue_per_client} exceeds --max-queue {self.max_queue}"
            )
