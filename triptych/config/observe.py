"""Settings of logs and traces."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from triptych.config.settings import Settings, setting
from triptych.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
TRACE_ID = "{trace_id}"
"""What stands for a trace's id in ``ui_trace_url``."""


@dataclass(frozen=True)
class ObserveConfig(Settings):
    """Logs and traces."""

    log_level: str = setting(
        "info",
        "log level: debug (includes each state of each transfer), info, warning or error",
        choices=LOG_LEVELS,
        common=True,
    )
    log_format: str = setting("text", "log format: text, or json with one object per line", choices=LOG_FORMATS)
    enable_log_requests: bool = setting(
        False, "write a line of JSON per request: outcome and timeline, without prompts and answers"
    )
    request_log_file: str = setting("", "file that the request log is appended to; default: standard output", path=True)
    record: str = setting(
        "",
        "file that a trace of what is asked is appended to, for triptych plan: times, numbers of tokens, sizes of "
        "media and equal beginnings, without content; default: none",
        path=True,
    )
    otlp_traces_endpoint: str = setting(
        "", "URL of the OpenTelemetry collector for request traces (http://host:4318/v1/traces)"
    )
    ui_trace_url: str = setting(
        "",
        f"where the page at /ui links to a request's trace: a URL with {TRACE_ID} in it "
        f"(http://host:16686/trace/{TRACE_ID}); default: it shows the id alone",
    )

    def check_together(self) -> None:
        if self.request_log_file and not self.enable_log_requests:
            raise ConfigError(f"--request-log-file {self.request_log_file} needs --enable-log-requests")
        endpoint = self.otlp_traces_endpoint
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint {endpoint} is not a URL that begins with http:// or https://")
        if url := self.ui_trace_url:
            if not endpoint:
                raise ConfigError(f"--ui-trace-url {url} needs --otlp-traces-endpoint: without it, there are no traces")
            if wrong := _why_no_link(url):
                raise ConfigError(f"--ui-trace-url {url!r} {wrong}")


def _why_no_link(url: str) -> str:
    """Return why the page can't link to a trace by that URL; empty if it can. Every viewer sees the link."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        return "is not a URL that begins with http:// or https:// and a host"
    if any(letter.isspace() or not letter.isprintable() for letter in url):
        return "has spaces or control characters"
    if "@" in parts.netloc:
        return "has a user or a password, which every viewer of the page would see"
    if TRACE_ID in parts.netloc or TRACE_ID not in url:
        return f"has no {TRACE_ID} after its host"
    return ""
