"""``triptych trace``: requests of a log as a file for Perfetto."""

import argparse
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Console

from triptych.errors import ConfigError
from triptych.observe.perfetto import trace_events
from triptych.observe.request_log import read_line
from triptych.observe.timeline import Interval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", nargs="?", metavar="REQUEST", help="id of a request (default: all requests)")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", required=True, help="the file that serve wrote with --request-log-file"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="leave out requests from before this time, such as 2026-01-31T12:00:00 (default: none)",
    )
    parser.add_argument("--until", metavar="TIME", help="leave out requests from after this time (default: none)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("trace.json"), help="the file to write (default: trace.json)"
    )


def run(arguments: argparse.Namespace) -> int:
    since, until = (_moment(name, getattr(arguments, name)) for name in ("since", "until"))
    try:
        requests = [
            found
            for line in arguments.log.read_text().splitlines()
            for found in _wanted(line, arguments.request, since, until)
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--log {arguments.log}: {getattr(error, 'strerror', 'it is not text')}") from None
    if not requests:
        what = f"no request {arguments.request!r}" if arguments.request else "no requests"
        when = " of that time" if since or until else ""
        raise ConfigError(f"--log {arguments.log} has {what}{when}")
    try:
        arguments.out.write_text(json.dumps(trace_events(requests)) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {arguments.out}: {error.strerror}") from None
    Console().print(f"wrote {len(requests)} requests to {arguments.out}: open it at https://ui.perfetto.dev")
    return 0


def _wanted(
    line: str, request: str | None, since: datetime | None, until: datetime | None
) -> Iterator[tuple[str, list[Interval]]]:
    """Yield a line's timeline if it is wanted; nothing for a line of another program, which may write there too."""
    if (found := read_line(line)) is None:
        return
    name, moment, timeline = found
    if request in (None, name) and (since is None or since <= moment) and (until is None or moment <= until):
        yield name, timeline


def _moment(name: str, text: str | None) -> datetime | None:
    """Return the time that ``text`` gives, by default in this machine's time zone."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ConfigError(f"--{name} {text!r} is not a time such as 2026-01-31T12:00:00") from None
