"""Requests of clients in virtual time, and what became of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from blake3 import blake3

from triptych.errors import TriptychError
from triptych.messages.work import SamplingParams, Tokens
from triptych.models.base import Positions
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.stream import TokenStream
from triptych.simulate.service import SimulatedService
from triptych.types import ItemPlan, Placement, Span


@dataclass(frozen=True)
class ItemAsked:
    """A media item of a request."""

    name: str
    """Equal for equal files."""
    plan: ItemPlan
    num_bytes: int = 0
    """Its file's size."""


@dataclass(frozen=True)
class Asked:
    """A request: its items come one after the other."""

    at: float
    """Seconds after the load begins."""
    text: list[int]
    """Tokens."""
    answer: int
    """Tokens that are generated."""
    items: tuple[ItemAsked, ...] = ()
    client: str = ""
    lead: int = 0
    """Tokens of the text before the items."""

    @property
    def num_prompt(self) -> int:
        return len(self.text) + sum(item.plan.rows for item in self.items)


@dataclass
class Answered:
    """What became of a request. Times are in seconds after the load begins."""

    arrived: float
    first_token: float = 0.0
    last_token: float = 0.0
    tokens: int = 0
    num_items: int = 0
    error: str = ""
    """Name of the error; empty if it was answered."""
    ended: bool = False

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.first_token - self.arrived

    @property
    def took(self) -> float:
        """Seconds until the last token."""
        return self.last_token - self.arrived

    @property
    def tpot(self) -> float:
        """Mean seconds between two tokens; 0 with one alone."""
        return (self.last_token - self.first_token) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass
class SimulatedLoad:
    """Clients of a simulated service. Each request arrives at its time, whatever became of earlier ones."""

    service: SimulatedService
    requests: Iterable[Asked]
    """In order of arrival; read one by one."""
    outcomes: list[Answered] = field(default_factory=list)
    warm_up: float = 1.0
    """Seconds before the first request, in which instances register."""

    def __post_init__(self) -> None:
        self._began = self.service.clock.monotonic() + self.warm_up
        self._coming: Iterator[Asked] = iter(self.requests)
        self._open: dict[int, TokenStream | None] = {}
        self._all_came = False
        self.service.on_tick.append(self._look)
        self._next()

    @property
    def over(self) -> bool:
        """Whether all requests have come and ended."""
        return self._all_came and not self._open

    @property
    def now(self) -> float:
        return self.service.clock.monotonic() - self._began

    def run(self, seconds: float) -> bool:
        """Let time pass until all have ended, for ``seconds`` at most. Returns whether they have."""
        return self.service.until(lambda: self.over, seconds)

    def _next(self) -> None:
        asked = next(self._coming, None)
        if asked is None:
            self._all_came = True
        else:
            self.service.clock.call_at(self._began + asked.at, partial(self._arrive, asked))

    def _arrive(self, asked: Asked) -> None:
        number = len(self.outcomes)
        outcome = Answered(self.now, num_items=len(asked.items))
        self.outcomes.append(outcome)
        record = RequestRecord(f"{number}", "POST", self.service.clock, client=asked.client)
        self._open[number] = None  # until it is queued
        media = sum(item.num_bytes for item in asked.items)
        prepared = self.service.costs.submit(asked.num_prompt, len(asked.items), media)
        # it holds a slot while its prompt is prepared, as in the API
        preparing = self.service.router.lifecycle.preparing(record, has_media=bool(asked.items))
        try:
            preparing.__enter__()
        except TriptychError as error:
            self._end(number, type(error).__name__)
        else:

            def submit() -> None:
                preparing.__exit__(None, None, None)
                self._submit(number, record, asked)

            self.service.frontend.do(prepared, submit)
        self._next()

    def _submit(self, number: int, record: RequestRecord, asked: Asked) -> None:
        sampling = SamplingParams(max_tokens=asked.answer, ignore_eos=True)
        prompt = planned(asked)
        try:
            stream = self.service.router.lifecycle.submit(
                record, prompt, sampling, [], read=partial(self._read, number)
            )
        except TriptychError as error:
            self._end(number, type(error).__name__)
        else:
            self.service.note("admitted", number, len(prompt.tokens), len(prompt.items))
            if number in self._open:
                self._open[number] = stream

    def _read(self, number: int, report: Tokens) -> Tokens:
        outcome = self.outcomes[number]
        outcome.first_token = outcome.first_token or self.now
        outcome.last_token = self.now
        outcome.tokens += len(report.tokens)
        self.service.note("tokens", number, report.first, len(report.tokens))
        if report.finish_reason is not None:
            self._end(number, "")
        return report

    def _look(self) -> None:
        """End the requests that have failed."""
        for number, stream in list(self._open.items()):
            if stream is not None and stream.record.error:
                self._end(number, stream.record.error)

    def _end(self, number: int, error: str) -> None:
        del self._open[number]
        self.outcomes[number].ended, self.outcomes[number].error = True, error
        if error:
            self.service.note("failed", number, error)


def planned(asked: Asked) -> PlannedPrompt:
    """Return the prompt of a request."""
    tokens, items = asked.text[: asked.lead], list[PlannedItem]()
    for place, one in enumerate(asked.items):
        spans = Placement((Span(len(tokens), one.plan.rows),))
        key = blake3(one.name.encode()).hexdigest()
        items.append(PlannedItem(key, one.name.encode(), one.plan, spans, f"messages[{place}]", place))
        tokens += [0] * one.plan.rows
    tokens += asked.text[asked.lead :]
    places = np.broadcast_to(np.arange(len(tokens), dtype=np.float64), (3, len(tokens)))
    return PlannedPrompt(tokens, Positions(places, len(tokens)), tuple(items))
