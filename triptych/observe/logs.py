"""Logging of all processes: lines with a timestamp, as text or JSON, on standard error.

Each process calls ``set_up`` once at its start, and passes ``for_child`` to its child processes. ``serve`` relays the
output of the instances that it starts with ``relayed``.
"""

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import msgspec

_TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", re.ASCII)


class LogSettings(msgspec.Struct, frozen=True):
    """How a process logs."""

    format: str = "text"
    """``text`` or ``json``."""
    level: int = logging.INFO
    """A level of Python's ``logging``."""
    process: str = "triptych"
    """Its name in JSON."""
    label: str = ""
    """Prefix of its messages in text, for a process that shares the output of another."""


_current = LogSettings()


def set_up(settings: LogSettings) -> None:
    """Configure logging for this process, including uncaught exceptions and Python's warnings. If the root logger
    already has handlers of an embedding program, these stay the only ones."""
    global _current  # noqa: PLW0603 - as logging itself, one per process
    _current = settings
    logging.getLogger("triptych").setLevel(settings.level)
    root = logging.getLogger()
    if any(not isinstance(handler, _Handler) for handler in root.handlers):
        return
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.addHandler(_Handler(settings))
    root.setLevel(max(settings.level, logging.WARNING))  # libraries
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _ended_thread


@contextmanager
def quiet(level: int, unless: bool) -> Iterator[None]:
    """Log from ``level`` on in the block, as do child processes that it starts; change nothing ``unless`` is true."""
    logger = logging.getLogger("triptych")
    before = logger.level
    logger.setLevel(before if unless else level)
    try:
        yield
    finally:
        logger.setLevel(before)


def rename(process: str) -> None:
    """Change the name that this process logs by."""
    set_up(msgspec.structs.replace(_current, process=process))


def for_child(name: str, label: str) -> LogSettings:
    """Return the settings for a child process with the same output. ``name`` is appended to this process's."""
    level = logging.getLogger("triptych").getEffectiveLevel()
    return LogSettings(_current.format, level, f"{_current.process}/{name}", label)


def relayed(line: str, name: str) -> tuple[str, str]:
    """Return a line written by the instance ``name``, as this process relays it, and the message in it. Lines without
    a timestamp, such as libraries' direct output, get the current time."""
    if _current.format == "text":
        message = _TIME.sub("", line, 1)
        stamped = line if len(message) < len(line) else f"{_moment(time.time())} {line}"
        return f"[{name}] {stamped}", message
    if (fields := _fields(line)) is not None:
        return line, fields["message"]
    return _object(time.time(), level="info", logger="output", process=name, message=line), line


def announcement(text: str) -> str:
    """Return a line for standard output: the text itself or, in JSON, an object as in the log."""
    if _current.format == "text":
        return text
    return _own("info", text)


def fatal(text: str) -> None:
    """Log why this process exits."""
    if _current.format == "text":
        _write(f"triptych: {_current.label}{text}")
    else:
        _write(_own("critical", text))


class _Handler(logging.Handler):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self.setFormatter(_Json(settings) if settings.format == "json" else _Text(settings))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write(self.format(record))
        except Exception:  # noqa: BLE001 - a log must not end what logs
            self.handleError(record)


class _Text(logging.Formatter):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._label = settings.label

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return f"{_moment(record.created)} {record.levelname} {self._label}{record.message}"


class _Json(logging.Formatter):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._process = settings.process

    def format(self, record: logging.LogRecord) -> str:
        exception = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        return _object(
            record.created,
            level=record.levelname.lower(),
            logger=record.name,
            process=self._process,
            pid=record.process,
            message=record.getMessage(),
            exception=exception,
        )


def _object(moment: float, **fields: str | int | None) -> str:
    """Return a JSON object of the fields that are not None."""
    present = {name: value for name, value in fields.items() if value is not None}
    return json.dumps({"time": _moment(moment)} | present)  # in ASCII, which can also encode a lone surrogate


def _own(level: str, message: str) -> str:
    """Return a JSON object for a message of this process that has no logger."""
    process, pid = _current.process, os.getpid()
    return _object(time.time(), level=level, logger="triptych", process=process, pid=pid, message=message)


def _moment(seconds: float) -> str:
    """Format a time as in RFC 3339, in UTC, with milliseconds."""
    milliseconds = int(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def _write(line: str) -> None:
    """Write a line in one call, since other processes write to the same pipe."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _fields(line: str) -> dict[str, Any] | None:
    """Return the fields of a JSON log line of a Triptych process; None for other lines."""
    try:
        match json.loads(line):
            case {"time": str(), "level": str(), "message": str()} as fields:
                return dict(fields)
    except (ValueError, RecursionError):
        pass
    return None


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("triptych").critical("ended by an error", exc_info=(kind, error, trace))


def _ended_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
        name = arguments.thread.name if arguments.thread else "unknown"
        error = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        logging.getLogger("triptych").error("thread %s ended by an error", name, exc_info=error)
