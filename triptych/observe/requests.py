"""What is noted of each HTTP request while it is answered: the one source of metrics, log lines and traces.

The request being answered is found by a context variable, so that who has something to note needn't be handed it."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from triptych.observe.timeline import Interval


@dataclass(eq=False)
class GenerationRecord:
    """One choice of a request, from its admission to its end. Times in seconds since the epoch, 0 for not yet;
    ``arrived`` is when its HTTP request came. ``finish_reason`` is None until it ends, "abort" when nobody waited for
    it any more, and "error" when it failed, with the error's name in ``error``. ``counted``: it belongs to a client's
    request, not to a probe."""

    num_prompt: int
    num_items: int
    arrived: float
    counted: bool
    submitted: float
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0
    num_reused: int = 0
    finish_reason: str | None = None
    error: str | None = None
    intervals: list[Interval] = field(default_factory=list)

    def add(self, intervals: Iterable[Interval], engine: str, item: int | None = None) -> None:
        """What an instance did, for one item or for the whole sequence. An interval may name another instance."""
        for one in intervals:
            of = one.item if item is None else item
            self.intervals.append(msgspec.structs.replace(one, engine=one.engine or engine, item=of))


@dataclass(eq=False)
class RequestRecord:
    """One HTTP request. ``correlation`` is what its client calls the work that it is part of, empty for none;
    ``client`` is who shares what there is with the others: a digest of the key that came with the request, or its
    address. ``traceparent`` is the client's header of that name, empty for none; ``handler`` the path's template in the
    routing table, so that there are few; ``error`` the name of the error that it was answered with; ``status`` 0 when
    the client was gone before there was one; ``trace_id`` the trace that it was sent as."""

    id: str
    method: str
    correlation: str = ""
    client: str = ""
    traceparent: str = ""
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    handler: str = "unknown"
    status: int = 0
    trace_id: str | None = None
    error: str | None = None
    sequences: list[GenerationRecord] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    ending: ExitStack = field(default_factory=ExitStack)
    """What is called once the request is over, its answer sent."""

    def timeline(self) -> list[Interval]:
        """What the frontend did for the request, and what instances did for all of its choices."""
        return [*self.intervals, *(interval for sequence in self.sequences for interval in sequence.intervals)]

    @property
    def generates(self) -> bool:
        """Whether the model was asked, or would have been if the request had been admitted."""
        return self.method == "POST" and self.handler.startswith("/v1/")


CURRENT: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)


def note(*intervals: Interval) -> None:
    """Adds what the frontend did to the timeline of the request being answered, if there is one."""
    if (record := CURRENT.get()) is not None:
        record.intervals += intervals


def at_end(release: Callable[[], object]) -> None:
    """Has something called when the request being answered is over; at once if there is none."""
    if (record := CURRENT.get()) is not None:
        record.ending.callback(release)
    else:
        release()


def current_client() -> str:
    """Whose request is being answered; empty for nobody's."""
    record = CURRENT.get()
    return record.client if record else ""


def seconds_spent() -> float:
    """How long ago the request being answered came: on its body, its media and its plan; 0 for nobody's."""
    record = CURRENT.get()
    return time.time() - record.began if record else 0.0


def begin_generation(num_prompt: int, num_items: int) -> GenerationRecord:
    """A new choice of the request being answered, or of none."""
    now, record = time.time(), CURRENT.get()
    sequence = GenerationRecord(num_prompt, num_items, record.began if record else now, record is not None, now)
    if record is not None:
        record.sequences.append(sequence)
    return sequence
