"""Settings of logs and traces."""

from dataclasses import dataclass

from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class ObserveConfig(Settings):
    """Logs and traces."""

    log_level: str = setting(
        "info",
        "least severe messages that are logged: debug (with each state of each transfer), info, warning or error",
        choices=LOG_LEVELS,
    )
    log_format: str = setting("text", "how it is logged: text, or json, one object a line", choices=LOG_FORMATS)
    enable_log_requests: bool = setting(
        False, "write a line of JSON for each request: how it ended and where its time went, no prompts and no answers"
    )
    request_log_file: str = setting(
        "", "file that these lines are appended to; standard output unless given", path=True
    )
    otlp_traces_endpoint: str = setting(
        "", "URL of an OpenTelemetry collector that the trace of each request is sent to (http://host:4318/v1/traces)"
    )

    def check_together(self) -> None:
        if self.request_log_file and not self.enable_log_requests:
            raise ConfigError(f"--request-log-file {self.request_log_file} needs --enable-log-requests")
        endpoint = self.otlp_traces_endpoint
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint {endpoint} is not a URL that begins with http:// or https://")
