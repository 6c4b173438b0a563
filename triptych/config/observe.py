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
        "log level: debug (includes each state of each transfer), info, warning or error",
        choices=LOG_LEVELS,
    )
    log_format: str = setting("text", "log format: text, or json with one object per line", choices=LOG_FORMATS)
    enable_log_requests: bool = setting(
        False, "write a line of JSON per request: outcome and timeline, without prompts and answers"
    )
    request_log_file: str = setting("", "file that the request log is appended to; default: standard output", path=True)
    otlp_traces_endpoint: str = setting(
        "", "URL of the OpenTelemetry collector for request traces (http://host:4318/v1/traces)"
    )

    def check_together(self) -> None:
        if self.request_log_file and not self.enable_log_requests:
            raise ConfigError(f"--request-log-file {self.request_log_file} needs --enable-log-requests")
        endpoint = self.otlp_traces_endpoint
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint {endpoint} is not a URL that begins with http:// or https://")
