"""Records of HTTP requests, made while they are answered: the only source of metrics, log lines and traces."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from triptych.clock import Clock
from triptych.observe.timeline import Interval, shifted

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths of the endpoints that generate."""


@dataclass(eq=False)
class ChoiceRecord:
    """Record of one choice of a request, from admission to its end. Times are by its request's ``now``, 0 for not
    yet."""

    num_prompt: int
    """Prompt tokens."""
    numbers: Sequence[int]
    """The place in the request of each of the prompt's items, in the prompt's order."""
    arrived: float
    """When the HTTP request arrived."""
    counted: bool
    """Whether it counts in the metrics, as its request says."""
    submitted: float
    now: Callable[[], float]
    """The request's clock."""
    first_token: float = 0.0
    last_token: float = 0.0
    num_tokens: int = 0
    """Tokens generated."""
    num_reused: int = 0
    """Prompt tokens found in a prefix cache."""
    finish_reason: str | None = None
    """None until it ends, "abort" if the client was gone, "error" if it failed."""
    error: str | None = None
    """Name of the error, if it failed."""
    intervals: list[Interval] = field(default_factory=list)

    @property
    def num_items(self) -> int:
        return len(self.numbers)

    def add(self, intervals: Iterable[Interval], instance: str, item: int | None = None) -> None:
        """Add the intervals of an instance's message, for one item or for the whole request. An interval may name
        another instance. Items are given by their places in the prompt."""
        for one in shifted(intervals, self.now()):
            index = one.item if item is None else item
            number = None if index is None else self.numbers[index]
            self.intervals.append(msgspec.structs.replace(one, instance=one.instance or instance, item=number))


@dataclass(eq=False)
class RequestRecord:
    """Record of one HTTP request."""

    id: str
    method: str
    clock: Clock
    correlation: str = ""
    """The client's own id for the work that the request is part of; empty if none."""
    client: str = ""
    """The unit of fairness: a digest of the API key, or the address."""
    traceparent: str = ""
    """The client's header of that name; empty if none."""
    counted: bool = True
    """Whether its choices count in the metrics: it is a client's request, not a probe."""
    began: float = field(init=False)
    _ticks: float = field(init=False)
    """When it began, by the monotonic clock."""
    ended: float = 0.0
    handler: str = "unknown"
    """The route's path template, so that there are few values."""
    status: int = 0
    """0 if the client was gone before there was one."""
    trace_id: str | None = None
    """The trace that it was exported as."""
    error: str | None = None
    """Name of the error that it was answered with."""
    generations: list[ChoiceRecord] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    ending: ExitStack = field(default_factory=ExitStack)
    """Callbacks for when the request is over and its answer sent."""

    def __post_init__(self) -> None:
        self.began, self._ticks = self.clock.wall(), self.clock.monotonic()

    def timeline(self) -> list[Interval]:
        """Return the intervals of the frontend, and of the instances for all choices."""
        return [*self.intervals, *(interval for generation in self.generations for interval in generation.intervals)]

    @property
    def generates(self) -> bool:
        """Whether it is a generation request, admitted or not."""
        return self.method == "POST" and self.handler in GENERATING

    @property
    def seconds_spent(self) -> float:
        """Seconds since the request arrived."""
        return self.clock.monotonic() - self._ticks

    def now(self) -> float:
        """Return the time in seconds since the epoch. A step of the wall clock during a request doesn't change it, so
        that durations are right."""
        return self.began + self.seconds_spent

    def note(self, *intervals: Interval) -> None:
        """Add the frontend's intervals to the request's timeline."""
        self.intervals += intervals

    def at_end(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the request ends."""
        self.ending.callback(release)

    def begin_choice(self, num_prompt: int, numbers: Sequence[int]) -> ChoiceRecord:
        """Create the record of a new choice."""
        choice = ChoiceRecord(num_prompt, numbers, self.began, self.counted, self.now(), self.now)
        self.generations.append(choice)
        return choice
