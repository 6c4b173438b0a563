"""The request log: one line of JSON for each generation request, with its outcome and timeline.

It never contains content: no prompt, no answer, no URL, and no headers except those with ids. ``triptych trace`` reads
these lines.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from triptych.observe.line_file import LineFile
from triptych.observe.requests import ChoiceRecord, RequestRecord
from triptych.observe.timeline import Interval, as_json


class RequestLog:
    """Appends a line for each request to a file, or writes it to standard output."""

    def __init__(self, path: str = "") -> None:
        """Raises StartError for a file that can't be written."""
        self._file = LineFile(path, "--request-log-file")
        self._encoder = msgspec.json.Encoder()

    def __call__(self, record: RequestRecord) -> None:
        if record.generates:
            self._file.write(self._encoder.encode(line_of(record)) + b"\n")

    def close(self) -> None:
        self._file.close()


def line_of(record: RequestRecord) -> dict[str, Any]:
    """Return the line's fields. Times are in milliseconds from the request's arrival, which is ``time``."""
    generations = record.generations
    return {
        "time": datetime.fromtimestamp(record.began, UTC).isoformat(timespec="microseconds"),
        "request_id": record.id,
        "correlation_id": record.correlation or None,
        "trace_id": record.trace_id,
        "path": record.handler,
        "status": record.status,
        "error": record.error or next((one.error for one in generations if one.error), None),
        "finish_reasons": [one.finish_reason for one in generations],
        "prompt_tokens": max((one.num_prompt for one in generations), default=0),
        "cached_tokens": max((one.num_reused for one in generations), default=0),
        "generation_tokens": sum(one.num_tokens for one in generations),
        "mm_items": max((one.num_items for one in generations), default=0),
        "ttft_ms": _first_token_ms(record.began, generations),
        "e2e_ms": round((record.ended - record.began) * 1000, 3),
        "timeline": as_json(record.timeline(), record.began),
    }


class _Row(msgspec.Struct):
    stage: str
    start_ms: float
    end_ms: float
    item: int | None = None
    instance: str = ""


class _Line(msgspec.Struct):
    request_id: str
    time: Annotated[datetime, msgspec.Meta(tz=True)]
    timeline: list[_Row]


_LINES = msgspec.json.Decoder(_Line)


def read_line(text: str) -> tuple[str, datetime, list[Interval]] | None:
    """Parse a line: return the request's id, arrival and intervals; None for a line of another kind."""
    try:
        line = _LINES.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    began = line.time.timestamp()
    return (
        line.request_id,
        line.time,
        [
            Interval(row.stage, began + row.start_ms / 1000, began + row.end_ms / 1000, row.item, row.instance)
            for row in line.timeline
        ],
    )


def _first_token_ms(began: float, generations: Iterable[ChoiceRecord]) -> float | None:
    first = min((one.first_token for one in generations if one.first_token), default=None)
    return None if first is None else round((first - began) * 1000, 3)
