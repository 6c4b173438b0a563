"""Whatever happens to a router, nothing waits afterwards that policy and room would let go, and accounts are true."""

import contextlib
import logging
import random
from collections.abc import Iterable
from typing import TypeVar

import pytest

from tests.support.router_harness import D0, E0, E1, EPD0, P0, P1, PD0, PD1, RouterHarness
from tests.support.router_oracle import false_accounts, waits_in_vain
from triptych.errors import ErrorKind, ServiceError
from triptych.job_faults import Culprit
from triptych.messages.work import (
    Credit,
    Deregister,
    Draining,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    HandBack,
    Heartbeat,
    MissingItem,
    PrefillNeeded,
    Tokens,
)
from triptych.router.request_state import RequestState
from triptych.types import Address, TransferId

T = TypeVar("T")
SERVICES = [[E0, PD0, PD1], [E0, E1, P0, P1, D0], [P0, D0, PD0], [E0, EPD0, PD0], [EPD0]]


class History:
    """Requests whose instances are lost again and again, until some are on trial and others wait for that."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.addresses = rng.choice(SERVICES)
        self.harness = RouterHarness(
            *self.addresses,
            max_num_seqs=rng.choice([1, 2, 32]),
            encode_batch_patches=rng.choice([1, 1024]),
            restart_hold=60.0,
        )
        self.router = self.harness.router
        self.number = 1

    def step(self) -> None:
        steps = {
            self.submit: 20,
            self.ask: 30,
            self.restart_a_holder: 12,
            self.answer: 10,
            self.encoded: 5,
            self.lose: 3,
            self.join: 3,
            self.drain: 3,
            self.cancel: 6,
            self.fail: 2,
            self.credit: 2,
            self.wait: 2,
        }
        (step,) = self.rng.choices(list(steps), list(steps.values()))
        step()
        assert list(waits_in_vain(self.router)) == [], step
        assert list(false_accounts(self.router)) == [], step

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self) -> None:
        costs, client, priority = [1.0] * self.rng.randint(0, 2), self.rng.choice("ab"), self.rng.choice([-1, 0])
        with contextlib.suppress(ServiceError):  # the service is full, or no instance is there
            self.harness.submit(*costs, client=client, priority=priority)

    def cancel(self) -> None:
        for state in self.some(self.requests):
            self.router.lifecycle.cancel(state.id)

    # ── instances at work ────────────────────────────────────────────────────────────────────────────────────

    def ask(self) -> None:
        """A language instance asks for a prompt's KV, or for its items."""
        for state in self.some(self.dispatched):
            assert state.decode is not None
            self.number += 1
            request, at = state.generate.request, state.decode.instance
            if at.role.takes_kv and (state.prefill is None or not state.prompt.items):
                transfer = TransferId(f"kv {self.number}")
                self.router.handle(PrefillNeeded(request, at.address, transfer, 0, [], self.number))
            elif state.prompt.items:
                where, transfer = at.address, TransferId("")
                if state.prefill is not None:
                    where, transfer = state.prefill.instance.address, state.prefill.transfer
                names = [TransferId(f"{state.id}/{item}") for item in range(len(state.prompt.items))]
                items = [MissingItem(item, name, attempt=self.number) for item, name in enumerate(names)]
                self.router.handle(EncodeNeeded(request, where, items, transfer, self.number))

    def encoded(self) -> None:
        for task in self.some(one.task for one in self.router.debug_state().encode.in_flight.values()):
            if self.rng.random() < 0.2:
                error, culprit = ErrorKind.INTERNAL_ERROR, Culprit.HELPER
                self.router.handle(EncodeFailed(task.transfer, error, "no", attempt=task.attempt, culprit=culprit))
            else:
                cached = self.rng.random() < 0.3
                self.router.handle(Encoded(task.transfer, cached, [], attempt=task.attempt))

    def answer(self) -> None:
        for state in self.some(self.dispatched):
            first = len(state.generated) + self.rng.choice([0, 0, 0, 0, 1])
            reason = self.rng.choice([None, None, "stop"])
            self.router.handle(Tokens(state.generate.request, [7], first, finish_reason=reason))

    def fail(self) -> None:
        for state in self.some(self.dispatched):
            assert state.decode is not None
            at, error = state.decode.instance.address, ErrorKind.INTERNAL_ERROR
            culprit = self.rng.choice([Culprit.REQUEST, Culprit.UNCLEAR])
            self.router.handle(Failed(state.generate.request, at, error, "no", culprit=culprit))

    # ── instances that come and go ───────────────────────────────────────────────────────────────────────────

    def restart_a_holder(self) -> None:
        """An instance that has work is lost: by that requests get on trial."""
        for address in self.some(one.address for one in self.router.membership if one.outstanding):
            self.router.handle(Deregister(address))
            self.register(address)

    def lose(self) -> None:
        self.router.handle(Deregister(self.rng.choice(self.addresses), self.rng.random() < 0.7))

    def join(self) -> None:
        self.register(self.rng.choice(self.addresses))

    def register(self, address: Address) -> None:
        self.number += 1
        self.harness.register(address, pid=self.number)

    def drain(self) -> None:
        """An instance drains, and gives back some of what it has."""
        for instance in self.some(self.router.membership):
            self.router.handle(Draining(instance.address))
            requests = [one.generate.request for one in self.requests if one.works_on(instance)]
            in_flight = self.router.debug_state().encode.in_flight.values()
            transfers = [one.task.transfer for one in in_flight if one.instance is instance]
            self.router.handle(HandBack(instance.address, requests[self.rng.randint(0, 1) :], transfers))

    def credit(self) -> None:
        rng = self.rng
        credit = Credit(rng.randint(0, 3), rng.randint(0, 4), rng.randint(0, 3))
        self.router.handle(Heartbeat(rng.choice(self.addresses), self.harness.stats, credit))

    def wait(self) -> None:
        self.harness.wait(self.rng.choice([0.25, 2.5]), *self.addresses)

    def end(self) -> None:
        for state in self.requests:
            self.router.lifecycle.cancel(state.id)
        assert [one.name for one in self.router.membership if one.outstanding] == []
        assert self.router.debug_state().encode.requests == frozenset()

    @property
    def requests(self) -> list[RequestState]:
        return list(self.router.debug_state().requests.values())

    @property
    def dispatched(self) -> list[RequestState]:
        return [one for one in self.requests if one.decode is not None]

    def some(self, among: Iterable[T]) -> list[T]:
        """Return one of them, if there is one."""
        found = list(among)
        return [self.rng.choice(found)] if found else []


def play(seeds: range) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for seed in seeds:
            history = History(random.Random(seed))
            for _ in range(60):
                history.step()
            history.end()
    finally:
        logging.disable(logging.NOTSET)


def test_nothing_waits_that_policy_and_room_would_let_go() -> None:
    play(range(60))


@pytest.mark.slow
def test_nothing_waits_in_many_histories() -> None:
    play(range(1000, 3000))
