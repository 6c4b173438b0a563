"""Requests of clients in virtual time: arrivals, prompts and items come from a seed."""

import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tests.support.plans import plan_of
from tests.support.simulation import VOCABULARY, Simulation
from triptych.errors import TriptychError
from triptych.messages.work import SamplingParams, Tokens
from triptych.models.base import Positions
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.stream import TokenStream
from triptych.types import ItemPlan, Placement, Span

NUM_ITEMS = 12
"""Distinct items: some are asked about again and again."""


@dataclass
class SimulatedLoad:
    """Clients of a simulated service, with what became of their requests."""

    world: Simulation
    seed: int
    num_requests: int
    rate: float
    """Requests per second."""
    streams: dict[int, TokenStream] = field(default_factory=dict)
    """Those that were admitted, by the request's number."""
    rejected: dict[int, str] = field(default_factory=dict)
    """Names of the errors of the others."""

    def __post_init__(self) -> None:
        self._rng = random.Random(f"load {self.seed}")
        plans = random.Random(f"items {self.seed}")
        self._plans = [_plan(plans) for _ in range(NUM_ITEMS)]
        self._prefix = [plans.randrange(1, VOCABULARY) for _ in range(48)]
        when = self.world.clock.monotonic() + 1.0
        for number in range(self.num_requests):
            when += self._rng.expovariate(self.rate)
            self.world.clock.call_at(when, lambda number=number: self._submit(number))  # type: ignore[misc]

    def _submit(self, number: int) -> None:
        rng, clock = self._rng, self.world.clock
        record = RequestRecord(f"{number}", "POST", clock, client=f"client {rng.randrange(3)}")
        sampling = SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True)
        prompt = self._prompt(rng)
        try:
            stream = self.world.router.lifecycle.submit(record, prompt, sampling, [], read=partial(self._read, number))
        except TriptychError as error:
            self.rejected[number] = type(error).__name__
            self.world.note("rejected", number, self.rejected[number])
        else:
            self.streams[number] = stream
            self.world.note("admitted", number, len(prompt.tokens), len(prompt.items))

    def _read(self, number: int, report: Tokens) -> Tokens:
        self.world.note("tokens", number, report.first, len(report.tokens))
        return report

    def _prompt(self, rng: random.Random) -> PlannedPrompt:
        """Items, then text; some texts begin as others do."""
        chosen = rng.sample(range(NUM_ITEMS), rng.choice([0, 0, 1, 1, 2, 3]))
        tokens, items = list[int](), list[PlannedItem]()
        for place, one in enumerate(chosen):
            plan = self._plans[one]
            spans = Placement((Span(len(tokens), plan.rows),))
            items.append(PlannedItem(f"{one:064x}", str(one).encode(), plan, spans, f"messages[{place}]", place))
            tokens += [0] * plan.rows
        tokens += self._prefix if rng.random() < 0.5 else []
        tokens += [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(4, 80))]
        places = np.broadcast_to(np.arange(len(tokens), dtype=np.float64), (3, len(tokens)))
        return PlannedPrompt(tokens, Positions(places, len(tokens)), tuple(items))

    @property
    def over(self) -> bool:
        """Whether every request has ended."""
        ended = [one.record.finish_reason is not None for one in self.streams.values()]
        return len(ended) + len(self.rejected) == self.num_requests and all(ended)


def _plan(rng: random.Random) -> ItemPlan:
    """A picture's, of one part, or a long video's, of several."""
    rows = [rng.randint(2, 30) for _ in range(rng.choice([1, 1, 1, 6]))]
    return plan_of(*rows, patches=[4 * one for one in rows], cost=float(4 * sum(rows)))
