"""Settings of the frontend's HTTP server."""

from dataclasses import dataclass

from triptych.config.settings import Settings, flag, setting
from triptych.errors import ConfigError

MAX_PORT = 65535


@dataclass(frozen=True)
class HttpConfig(Settings):
    """HTTP server."""

    host: str = setting("127.0.0.1", "address that the HTTP server listens on", common=True)
    port: int = setting(
        8000, "port that the HTTP server listens on; 0 takes any free one", ge=0, le=MAX_PORT, common=True
    )
    control_port: int = setting(0, "port at which instances join the frontend; 0 takes any free one", ge=0, le=MAX_PORT)
    frontends: int = setting(
        1,
        "frontend processes that share --port, for more requests than one handles; each alone answers at one of "
        "the next ports, for its /metrics and /ready, and they have consecutive control ports from --control-port on",
        ge=1,
        le=64,
        also=("api_server_count", "asc"),
    )
    served_model_name: str = setting(
        "",
        "name of the model in the API; default: the folder's name",
        also=("alias", "a"),
        common=True,
    )
    reasoning_parser: str = setting(
        "", "vLLM's name for the form of the model's reasoning, such as qwen3; default: found from its template"
    )
    tool_call_parser: str = setting(
        "", "vLLM's name for the form of the model's tool calls, such as hermes; default: found from its template"
    )
    max_body_mb: int = setting(64, "largest request body, in MiB", ge=1)
    ui: bool = setting(
        True,
        "serve the page at /ui, which shows the service at work: to holders of an API key or, without keys, to this "
        "machine",
    )
    ui_kills: bool = setting(False, "let that page kill instances, for a demonstration", internal=True)
    client_header: str = setting(
        "",
        "header by which a trusted proxy names a request's client, for limits per client of a service without keys; "
        "default: the client is its address",
    )
    client_timeout: float = setting(
        60.0, "seconds after which a stream is closed if its client reads nothing", gt=0, internal=True
    )

    def check_together(self) -> None:
        own = self.own_ports
        for name, last in (
            ("port", own[-1] if own else self.port),
            ("control_port", self.control_port + self.frontends - 1),
        ):
            if last > MAX_PORT:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} leaves no room for the next ports, up to {last}")

    @property
    def own_ports(self) -> list[int]:
        """Where each of several frontends answers alone; 0 is any free port, and a single one has none."""
        if self.frontends == 1:
            return []
        return [self.port and self.port + number for number in range(1, self.frontends + 1)]
