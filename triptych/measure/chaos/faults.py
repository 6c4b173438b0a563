"""The faults: what each does to a service, with which load, and what must hold."""

import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.measure.chaos.acts import NOTHING, STOPPED_SECONDS, Act, in_a_row, rolls_out, signals, stands_still
from triptych.measure.chaos.load import End, Outcome
from triptych.measure.chaos.questions import Kind, Question

PER_LOSS = 3.0
"""Seconds that the loss of an instance may add to the 99th percentile."""
PER_DRAIN = 1.0
"""Seconds that a drain may add to the 99th percentile."""
PER_RESTART = 30.0
"""Seconds that the restart of a stage's only instance may add to the requests that need it."""
NUM_REQUESTS = 64
"""Requests at once."""
ROUNDS = 2
"""Questions that each client asks, one after the other: the second ones arrive during or after the fault."""


@dataclass(frozen=True)
class Workload:
    """What is asked during a fault."""

    pictures: int = ROUNDS * NUM_REQUESTS
    """Questions about a picture, each another one."""
    texts: int = 0
    leaving: int = 0
    """Further questions about pictures whose clients disconnect after a random time."""
    concurrency: int = NUM_REQUESTS
    """Requests at once; each further one is sent when an earlier one ends."""

    def scaled(self, factor: float) -> "Workload":
        """Return a load with that many times the requests, at least one of each kind that it has."""
        counts = (self.pictures, self.texts, self.leaving, self.concurrency)
        return Workload(*(max(1, round(count * factor)) if count else 0 for count in counts))

    def questions(self, seconds: float) -> list[Question]:
        """Return the questions, in the order in which they are sent. Clients that disconnect do so within
        ``seconds``."""
        rng = random.Random(self.leaving)
        kinds = [Kind.PICTURE] * self.pictures + [Kind.TEXT] * self.texts
        rng.shuffle(kinds)
        waiting = [Question(number, kind) for number, kind in enumerate(kinds)]
        leaving = [
            Question(len(kinds) + number, Kind.PICTURE, rng.uniform(0.001, max(0.01, seconds)))
            for number in range(self.leaving)
        ]
        # those that wait for their answers are among the others, from the first on
        every = 1 + len(leaving) // max(1, len(waiting))
        mixed: list[Question] = []
        for index, question in enumerate(waiting):
            mixed += [question, *leaving[index * every : (index + 1) * every]]
        return mixed


def must_answer(_: Outcome) -> bool:
    """Every request must be answered."""
    return False


def may_lack_encoder(outcome: Outcome) -> bool:
    """A question about a picture may end with an error of status 503, since no other instance can encode."""
    is_error = outcome.end is End.ERROR and outcome.error in ("unavailable", "instance_lost")
    return is_error and outcome.question.kind is Kind.PICTURE


@dataclass(frozen=True)
class Fault:
    """Something that happens to a service under load."""

    name: str
    title: str
    """For the report's table."""
    topology: str
    act: Act
    """Is done while requests are under way."""
    limits: Mapping[Kind, float]
    """Seconds that may be added to the 99th percentile, by kind of question. A kind without a limit isn't compared."""
    load: Workload = field(default_factory=Workload)
    at: float = 0.3
    """When it happens, as a share of the time that the same questions took without it."""
    may_fail: Callable[[Outcome], bool] = must_answer
    """Whether an outcome that isn't a whole answer is allowed."""
    retries: bool = False
    """Whether clients whose connection ends ask again, and count as answered by what they get then."""
    lasts: bool = False
    """Whether it outlasts the questions, which are then asked again until it is over."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the service that differ for this fault, by their names."""

    def repeated(self, times: int) -> list["Fault"]:
        """Return this fault that many times. It happens at its own moment once, and else earlier and later."""
        if times == 1:
            return [self]
        moments = [self.at, *(index / times for index in range(1, times))]
        return [replace(self, name=f"{self.name}-{index + 1}", at=at) for index, at in enumerate(moments)]


def _limit(seconds: float) -> Mapping[Kind, float]:
    return {Kind.PICTURE: seconds}


ONE_OF_TWO = {"E": "2E1PD", "P": "1E2P1D", "D": "1E1P2D", "PD": "1E2PD", "EPD": "2EPD"}
"""A topology with two instances of each role."""


def _of_each_role() -> list[Fault]:
    faults = []
    for role, topology in ONE_OF_TWO.items():
        low, name = role.lower(), f"{role.lower()}0"
        of = f"one of two {role}"
        kill, drain, stop = signals(signal.SIGKILL, name), signals(signal.SIGTERM, name), stands_still(name)
        faults += [
            Fault(f"kill-{low}", f"kill -9 of {of}", topology, kill, _limit(PER_LOSS)),
            Fault(f"drain-{low}", f"SIGTERM (drain) of {of}", topology, drain, _limit(PER_DRAIN)),
            Fault(f"stop-{low}", f"SIGSTOP of {of} for {STOPPED_SECONDS:g} s", topology, stop, _limit(PER_LOSS)),
        ]
    return faults


def _several() -> list[Fault]:
    kill = signal.SIGKILL
    return [
        Fault("kill-e-e", "kill -9 of two of three E in a row", "3E1PD", in_a_row(kill, "e0", "e1"),
              _limit(2 * PER_LOSS)),
        Fault("kill-pd-pd", "kill -9 of two of three PD in a row", "1E3PD", in_a_row(kill, "pd0", "pd1"),
              _limit(2 * PER_LOSS)),
        Fault("kill-e-and-p", "kill -9 of one of two E and of one of two P at the same moment", "2E2P1D",
              signals(kill, "e0", "p0"), _limit(2 * PER_LOSS)),
    ]  # fmt: skip


TWO_FRONTENDS = {"frontends": 2}


def _of_two_frontends() -> list[Fault]:
    """Half of the connections are those of the other frontend, which doesn't notice."""
    name = "frontend0"
    return [
        Fault("kill-one-frontend", "kill -9 of one of two frontends: its connections end, and their clients ask again",
              "1E1PD", signals(signal.SIGKILL, name), _limit(PER_LOSS), retries=True, settings=TWO_FRONTENDS),
        Fault("drain-one-frontend", "SIGTERM (drain) of one of two frontends", "1E1PD", signals(signal.SIGTERM, name),
              _limit(PER_LOSS), settings=TWO_FRONTENDS),
        Fault("stop-one-frontend", f"SIGSTOP of one of two frontends for {STOPPED_SECONDS:g} s", "1E1PD",
              stands_still(name), _limit(STOPPED_SECONDS + PER_LOSS), settings=TWO_FRONTENDS),
        Fault("rollout-frontends", "rolling restart of all processes, two frontends among them", "1E1PD", rolls_out(),
              _limit(PER_DRAIN), lasts=True, settings=TWO_FRONTENDS),
    ]  # fmt: skip


FAULTS: Sequence[Fault] = (
    *_of_each_role(),
    *_several(),
    *_of_two_frontends(),
    Fault("rollout", "rolling restart of all processes", "2E1P1D", rolls_out(), _limit(PER_DRAIN), lasts=True),
    Fault(
        "kill-frontend", "kill -9 of the frontend: its connections end, and their clients ask again", "1E1PD",
        signals(signal.SIGKILL, "frontend"), _limit(PER_LOSS), retries=True,
    ),
    Fault(
        "drain-frontend", "SIGTERM (drain) of the frontend: it answers, and the next one takes over", "1E1PD",
        signals(signal.SIGTERM, "frontend"), _limit(PER_LOSS),
    ),
    Fault(
        "stop-frontend", f"SIGSTOP of the frontend for {STOPPED_SECONDS:g} s", "1E1PD", stands_still("frontend"),
        _limit(STOPPED_SECONDS + PER_LOSS),
    ),
    Fault(
        "kill-only-e", "kill -9 of the only E: texts go on, pictures wait for its restart", "1E1PD",
        signals(signal.SIGKILL, "e0"), {Kind.TEXT: PER_DRAIN, Kind.PICTURE: PER_RESTART},
        Workload(pictures=NUM_REQUESTS, texts=NUM_REQUESTS), may_fail=may_lack_encoder,
    ),
    Fault("burst", "200 pictures at once on one E", "1E1PD", NOTHING, {}, Workload(pictures=200, concurrency=200)),
    Fault(
        "disconnects", "1,000 clients disconnect at random phases", "1E1PD", NOTHING, {},
        Workload(NUM_REQUESTS, leaving=1000),
    ),
)  # fmt: skip
"""All faults, by topology, so that faults of the same one can share a service."""
