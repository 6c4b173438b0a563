"""Timelines: the intervals in which stages worked on a request."""

from collections.abc import Iterable
from typing import Any

import msgspec

TIMELINE_HEADER = "x-triptych-timeline"
"""A request with this header set to ``true`` gets the field ``timeline`` in its answer or last chunk."""


class Interval(msgspec.Struct, frozen=True):
    """A span of time in which a stage worked on a request."""

    stage: str
    """fetch, plan, queue (waiting anywhere), preprocess, encode, transfer, prefill or decode."""
    start: float
    """In seconds, like ``end``: since the epoch, but in messages from when they are sent, so negative. Clocks of two
    processes may differ, and be set."""
    end: float
    item: int | None = None
    """Index of the item in the request; None if the stage worked on the whole request."""
    instance: str = ""
    """Name of the instance; empty for the frontend."""


def shifted(intervals: Iterable[Interval], seconds: float) -> list[Interval]:
    """Return intervals that are that much later."""
    return [msgspec.structs.replace(one, start=one.start + seconds, end=one.end + seconds) for one in intervals]


def as_json(intervals: Iterable[Interval], origin: float | None = None) -> list[dict[str, Any]]:
    """Return the intervals in order of their start, in milliseconds from ``origin``, or from the first."""
    ordered = sorted(intervals, key=lambda interval: (interval.start, interval.end))
    if origin is None:
        origin = ordered[0].start if ordered else 0.0
    return [
        {
            "stage": interval.stage,
            "start_ms": round((interval.start - origin) * 1000, 3),
            "end_ms": round((interval.end - origin) * 1000, 3),
            **({} if interval.item is None else {"item": interval.item}),
            **({"instance": interval.instance} if interval.instance else {}),
        }
        for interval in ordered
    ]
