"""Questions that are asked all the time while something fails, judged as ``triptych chaos`` judges them."""

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.namespaces import Host
from triptych.measure.chaos.acts import NOTHING
from triptych.measure.chaos.faults import Fault
from triptych.measure.chaos.load import Client, End, Outcome, send
from triptych.measure.chaos.measure import FaultResult, compare
from triptych.measure.chaos.questions import Kind, Question

CLIENTS = {Kind.PICTURE: 3, Kind.TEXT: 2}
"""Each asks its questions one after the other, again and again."""
QUESTIONS = 3
"""Questions of each client."""
PAUSE = 0.2
"""Seconds between two questions of a client: what starts meanwhile needs the cores, too."""
NONE_IS_LOST = Fault("ray", "on Ray", "", NOTHING, {})


@dataclass
class FaultLoad:
    """What clients on one host get. Times are seconds since the load began."""

    url: str
    host: Host
    calm: list[Outcome] = field(default_factory=list)
    """The same questions, without a fault."""
    outcomes: list[Outcome] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _ending: threading.Event = field(default_factory=threading.Event)

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        """Ask until the end. The calling thread stays on the host."""
        self.host.enter()
        asyncio.run(self._ask_all())

    async def _ask_all(self) -> None:
        every = [question for mine in _questions() for question in mine]
        # twice: the first answers come late, while instances connect to each other
        for _ in range(2):
            self.calm = await send(Client(self.url, "demo", len(every)), every, secrets.token_hex(8))
        self.began = time.monotonic()
        await asyncio.gather(*map(self._ask, _questions()))

    async def _ask(self, questions: Sequence[Question]) -> None:
        asked = 0
        while not self._ending.is_set():
            one = questions[asked % len(questions)]
            self.outcomes += await send(Client(self.url, "demo", 1), [one], secrets.token_hex(8), self.began)
            asked += 1
            await asyncio.sleep(PAUSE)

    def end(self) -> FaultResult:
        """End the load once every request has, and judge it."""
        self._ending.set()
        self.thread.join(150)
        assert not self.thread.is_alive(), "a request hangs"
        lost = [one for one in self.calm if one.end is not End.WHOLE]
        assert not lost, f"lost without a fault: {lost}"
        return compare(NONE_IS_LOST, self.calm, self.outcomes, [])

    thread: threading.Thread = field(init=False)

    def served_after(self, moment: float, kind: Kind) -> float:
        """Seconds from that moment to the first token of a question that was asked later; infinite without any."""
        times = [
            one.first_token - moment
            for one in list(self.outcomes)
            if one.question.kind is kind and one.sent > moment and one.end is End.WHOLE and one.first_token is not None
        ]
        return min(times, default=float("inf"))


def _questions() -> Iterator[list[Question]]:
    number = 0
    for kind, clients in CLIENTS.items():
        for _ in range(clients):
            yield [Question(number + index, kind) for index in range(QUESTIONS)]
            number += QUESTIONS


@contextmanager
def asking(url: str, host: Host) -> Iterator[FaultLoad]:
    """Ask from a host, once every question was answered without a fault."""
    load = FaultLoad(url, host)
    load.thread = threading.Thread(target=load.run, daemon=True)
    load.thread.start()
    deadline = time.monotonic() + 120
    while len({one.question.number for one in list(load.outcomes)}) < sum(CLIENTS.values()):
        assert time.monotonic() < deadline, "no answers"
        assert load.thread.is_alive()
        time.sleep(0.05)
    try:
        yield load
    finally:
        load._ending.set()
