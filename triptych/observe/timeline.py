"""Where a request's time went, stage by stage."""

from collections.abc import Iterable
from typing import Any

import msgspec


class Interval(msgspec.Struct, frozen=True):
    """When a stage worked on a request: fetch, plan, queue (waiting, wherever that is), preprocess, encode, transfer,
    prefill or decode. ``start`` and ``end`` in seconds since the epoch;
    ``item`` is the item's place in the request, or None when the stage works on all of it; ``engine`` the name of the
    instance that did it, empty for the frontend."""

    stage: str
    start: float
    end: float
    item: int | None = None
    engine: str = ""


def as_json(intervals: Iterable[Interval], origin: float | None = None) -> list[dict[str, Any]]:
    """The intervals in order of their start, in milliseconds from ``origin``, or from the first."""
    ordered = sorted(intervals, key=lambda interval: (interval.start, interval.end))
    if origin is None:
        origin = ordered[0].start if ordered else 0.0
    return [
        {
            "stage": interval.stage,
            "start_ms": round((interval.start - origin) * 1000, 3),
            "end_ms": round((interval.end - origin) * 1000, 3),
            **({} if interval.item is None else {"item": interval.item}),
            **({"engine": interval.engine} if interval.engine else {}),
        }
        for interval in ordered
    ]
