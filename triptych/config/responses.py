"""Settings of stored responses."""

from dataclasses import dataclass

from triptych.config.settings import Settings, setting


@dataclass(frozen=True)
class ResponsesConfig(Settings):
    """Stored responses."""

    response_store: str = setting(
        "",
        "file that keeps responses of /v1/responses, so that later requests can refer to them; frontends of one "
        "machine may share it; none are kept unless given",
        path=True,
    )
    response_store_mb: int = setting(
        1024, "stored responses with their requests, in MiB; the oldest of the API key with most bytes goes first", ge=1
    )
    response_store_rows: int = setting(100_000, "stored responses, each in rows of its own", ge=1, internal=True)
    response_store_days: float = setting(30.0, "days after which a stored response is deleted", gt=0)
