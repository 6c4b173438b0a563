"""The requests in flight and the last that ended, as the page at ``/ui`` shows them: without content."""

import secrets
from collections import deque
from collections.abc import Iterator

from blake3 import blake3

from triptych.observe.figures import FigureLog
from triptych.observe.pipeline import FAILED, OK, RUNNING, RequestView
from triptych.observe.requests import RequestRecord
from triptych.observe.timeline import Interval

MAX_ENDED = 500
MAX_INTERVALS = 256
"""Intervals of a request that are kept, the longest ones."""
MANY_REQUESTS = 429
"""HTTP status of a request that the service rejects because of its client's load."""

_SALT = secrets.token_bytes(32)


class RequestHistory:
    """Requests that generate. An observer of their records; ``begin`` takes them while they are in flight."""

    def __init__(self) -> None:
        self._in_flight: dict[RequestRecord, None] = {}
        self._ended: deque[RequestView] = deque(maxlen=MAX_ENDED)
        self.figures = FigureLog()

    def begin(self, record: RequestRecord) -> None:
        """Note that a request is in flight; its record must know its handler."""
        if record.generates:
            self._in_flight[record] = None

    def __call__(self, record: RequestRecord) -> None:
        """Note that a request has ended."""
        self._in_flight.pop(record, None)
        if record.generates:
            view = view_of(record, record.ended)
            self._ended.append(view)
            self.figures.add(view, record.ended)

    def __iter__(self) -> Iterator[RequestView]:
        """Yield the requests in flight and those that ended, the latest first."""
        yield from (view_of(record, record.now()) for record in reversed(self._in_flight))
        yield from reversed(self._ended)

    def find(self, id: str) -> RequestView | None:
        """Return the latest request of that id; None if there is none."""
        for record in reversed(self._in_flight):
            if record.id == id:
                return view_of(record, record.now())
        return next((view for view in reversed(self._ended) if view.id == id), None)


def view_of(record: RequestRecord, now: float) -> RequestView:
    """Return what is shown of a request: all that is known so far."""
    generations = record.generations
    firsts = [one.first_token for one in generations if one.first_token]
    further = [one for one in generations if one.num_tokens > 1]
    num_further = sum(one.num_tokens - 1 for one in further)
    timeline = _longest(record.timeline())
    reasons = dict.fromkeys(one.finish_reason for one in generations if one.finish_reason)
    finish_reason = "error" if "error" in reasons else ", ".join(reasons)
    return RequestView(
        id=record.id,
        client=client_name(record.client),
        endpoint=record.handler,
        began=record.began,
        seconds=now - record.began,
        ended=bool(record.ended),
        state=_state(record, finish_reason),
        status=record.status,
        error=record.error or next((one.error for one in generations if one.error), ""),
        finish_reason=finish_reason,
        num_prompt=max((one.num_prompt for one in generations), default=0),
        num_items=max((one.num_items for one in generations), default=0),
        num_tokens=sum(one.num_tokens for one in generations),
        num_reused=max((one.num_reused for one in generations), default=0),
        time_to_first_token=min(firsts) - record.began if firsts else None,
        time_per_token=sum(one.last_token - one.first_token for one in further) / num_further if further else None,
        slowest=max(timeline, key=_length).stage if timeline else "",
        trace_id=record.trace_id or "",
        timeline=sorted(timeline, key=lambda one: (one.start, one.end)),
    )


def matches(view: RequestView, status: str) -> bool:
    """Return whether a request has that status: ``RUNNING``, ``OK``, ``FAILED``, or the number of an HTTP status."""
    return status in (view.state or None, str(view.status))


def client_name(client: str) -> str:
    """Return a name for a client that means nothing outside this process: other clients may see it."""
    kind, _, _ = client.partition(" ")
    return f"{kind} {blake3(client.encode(), key=_SALT).hexdigest(4)}"


def _state(record: RequestRecord, finish_reason: str) -> str:
    if not record.ended:
        return RUNNING
    if record.status >= 500 or record.status == MANY_REQUESTS or finish_reason == "error":
        return FAILED
    return OK if record.status == 200 else ""


def _longest(intervals: list[Interval]) -> list[Interval]:
    return intervals if len(intervals) <= MAX_INTERVALS else sorted(intervals, key=_length)[-MAX_INTERVALS:]


def _length(interval: Interval) -> float:
    return interval.end - interval.start
