"""Exports timelines of requests for Perfetto (ui.perfetto.dev) and chrome://tracing: each instance is a process, each
request a row in it."""

from collections.abc import Iterable
from typing import Any

from triptych.observe.timeline import Interval

FRONTEND = "frontend"


def trace_events(requests: Iterable[tuple[str, list[Interval]]]) -> dict[str, Any]:
    """Return a trace of requests, each an id and its intervals, in the Trace Event Format's JSON Object Format. It has
    complete events with times in microseconds, and names of processes and threads."""
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {}
    rows: dict[tuple[int, str], int] = {}
    for request, intervals in requests:
        for interval in intervals:
            instance = interval.instance or FRONTEND
            process = processes.setdefault(instance, len(processes) + 1)
            item = "" if interval.item is None else f" item {interval.item + 1}"
            row = rows.setdefault((process, request + item), len(rows) + 1)
            events.append(
                {
                    "name": interval.stage,
                    "cat": "request",
                    "ph": "X",
                    "ts": round(interval.start * 1e6),
                    "dur": max(0, round((interval.end - interval.start) * 1e6)),
                    "pid": process,
                    "tid": row,
                    "args": {"request_id": request},
                }
            )
    events += [_name("process_name", process, 0, instance) for instance, process in processes.items()]
    events += [_name("thread_name", process, row, name) for (process, name), row in rows.items()]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
