"""What processes log: lines with a time, as text or as one JSON object each, on standard error.

Each process sets this up once, at its start, and hands its children what ``for_child`` makes. ``serve`` passes on the
output of the instances that it starts, by way of ``relayed``.
"""

import json
import logging
import os
import re
import sys
import threading
import time
from types import TracebackType
from typing import Any

import msgspec

_TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", re.ASCII)


class LogSettings(msgspec.Struct, frozen=True):
    """How a process logs. ``level`` as Python's logging has it. ``process`` names it in JSON; ``label`` stands before
    its messages in text, for a process that shares the output of another."""

    format: str = "text"
    level: int = logging.INFO
    process: str = "triptych"
    label: str = ""


_current = LogSettings()


def set_up(settings: LogSettings) -> None:
    """From here on this process logs so, also what ends a thread or the process, and what Python warns of. Where a
    program has given the root logger handlers of its own, they stay the only ones."""
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


def rename(process: str) -> None:
    """From here on this process logs by that name."""
    set_up(msgspec.structs.replace(_current, process=process))


def for_child(name: str, label: str) -> LogSettings:
    """How a child process of this one logs that writes to the same output: ``name`` is its own within this one's."""
    level = logging.getLogger("triptych").getEffectiveLevel()
    return LogSettings(_current.format, level, f"{_current.process}/{name}", label)


def relayed(line: str, name: str) -> tuple[str, str]:
    """A line that the instance ``name`` wrote, as this process writes it, and the message in it. What libraries write
    past the log gets the time at which it came."""
    if _current.format == "text":
        message = _TIME.sub("", line, 1)
        stamped = line if len(message) < len(line) else f"{_moment(time.time())} {line}"
        return f"[{name}] {stamped}", message
    if (fields := _fields(line)) is not None:
        return line, fields["message"]
    return _object(time.time(), level="info", logger="output", process=name, message=line), line


def announcement(text: str) -> str:
    """A line for standard output: the text itself or, in JSON, an object like those of the log."""
    if _current.format == "text":
        return text
    return _own("info", text)


def fatal(text: str) -> None:
    """Writes why this process ends."""
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
    """Of the fields, those that are there."""
    said = {name: value for name, value in fields.items() if value is not None}
    return json.dumps({"time": _moment(moment)} | said)  # in ASCII: a lone surrogate can be said, too


def _own(level: str, message: str) -> str:
    """An object for what this process says beside its loggers."""
    process, pid = _current.process, os.getpid()
    return _object(time.time(), level=level, logger="triptych", process=process, pid=pid, message=message)


def _moment(seconds: float) -> str:
    """RFC 3339, in UTC, with milliseconds."""
    milliseconds = int(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def _write(line: str) -> None:
    """In one piece, since other processes write to the same pipe."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _fields(line: str) -> dict[str, Any] | None:
    """Of a line that a process of ours wrote in JSON."""
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
