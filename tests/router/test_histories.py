"""Random histories of a router: whatever instances, clients, operators and the network do, its books are empty, to the
last token, once every request has ended."""

import logging
import math
import random
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from tests.support.plans import plan_of
from tests.support.router_harness import (
    D0,
    E0,
    E1,
    EP0,
    EPD0,
    P0,
    P1,
    PD0,
    PD1,
    RouterHarness,
    prompt,
    request_of,
)
from tests.support.router_oracle import false_accounts, waits_in_vain
from triptych.errors import ErrorKind, TriptychError, Unavailable
from triptych.messages.codec import Message
from triptych.messages.operations import SetRole
from triptych.messages.work import (
    Credit,
    Deregister,
    Draining,
    Encode,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    Generate,
    HandBack,
    Heartbeat,
    MissingItem,
    Prefill,
    PrefillNeeded,
    Register,
    RoleKept,
    SamplingParams,
    Tokens,
)
from triptych.prompt.prompt import PlannedItem
from triptych.router.pipeline_view import PipelineView
from triptych.router.placement import POLICIES
from triptych.router.stream import TokenStream
from triptych.topology import Role
from triptych.types import Address, Placement, RequestId, Span, TransferId

SERVICES = [
    [E0, PD0],
    [E0, E1, PD0, PD1],
    [E0, P0, D0],
    [E0, E1, P0, P1, D0],
    [E0, P0, PD0, D0],
    [EPD0, PD0],
    [E0, EPD0],
    [EP0, D0],
]
LOOK_EVERY = 4
"""Steps between two snapshots of the router."""
COSTS = [1.0, 0.1, 1e15 / 3, 100.7]


@dataclass
class History:
    """A router, and what has happened to it."""

    rng: random.Random
    addresses: list[Address] = field(default_factory=list)
    streams: list[TokenStream] = field(default_factory=list)
    number: int = 0
    steps: int = 0
    lost: float = 0.0
    """The share of messages that can't be sent."""

    def __post_init__(self) -> None:
        rng = self.rng
        self.addresses = rng.choice(SERVICES)
        self.harness = RouterHarness(
            *self.addresses,
            max_queue=40,
            max_num_seqs=rng.choice([1, 2, 4]),
            encode_batch_patches=rng.choice([1, 4, 1024]),
            encode_cache_bytes=rng.choice([0, 100, 2**20]),
            placement=rng.choice(sorted(POLICIES)),
            restart_hold=rng.choice([0.0, 30.0]),
        )
        self.router, send = self.harness.router, self.harness.send
        self.view = PipelineView(self.router, "model")

        def sometimes(to: Address, message: Message) -> None:
            if rng.random() < self.lost:
                raise Unavailable("a peer has stopped reading its messages")
            send(to, message)

        self.harness.send = sometimes

    def step(self) -> None:
        steps = {
            self.submit: 25,
            self.cancel: 10,
            self.complete: 4,
            self.need: 15,
            self.encoded: 14,
            self.tokens: 14,
            self.failed: 4,
            self.membership: 10,
            self.time: 5,
            self.operator: 4,
            self.network: 2,
            self.drain: 6,
            self.credit: 5,
            self.need_again: 6,
        }
        (step,) = self.rng.choices(list(steps), list(steps.values()))
        try:
            step()
        except TriptychError:
            return
        finally:
            self.check_books()
            self.check_progress()
            self.steps += 1
            if self.steps % LOOK_EVERY == 0:
                assert len(self.view.snapshot().instances) >= len(list(self.router.membership))

    def submit(self) -> None:
        rng = self.rng
        made = prompt(*(rng.choice(COSTS) for _ in range(rng.choice([0, 0, 1, 2, 3]))))
        made.tokens.extend([rng.choice([1, 2])] * rng.choice([0, 0, 20, 70]))
        items, start = list[PlannedItem](), len(made.tokens)
        for item in made.items:
            plan = plan_of(*[1] * 10, cost=item.plan.cost) if rng.random() < 0.4 else item.plan
            placement = Placement((Span(start, plan.rows),))
            items.append(replace(item, key=rng.choice("xyz"), plan=plan, placement=placement))
            start += plan.rows
        made = type(made)(made.tokens + [0] * (start - len(made.tokens)), made.positions, tuple(items))
        sampling, timeout = SamplingParams(max_tokens=rng.choice([1, 4, 1000])), rng.choice([math.inf, 1.0, 5.0])
        record = request_of(rng.choice("abc"))
        priority, read = rng.choice([0, 0, 1]), rng.choice([None, self.read])
        stream = self.router.lifecycle.submit(record, made, sampling, [], timeout=timeout, priority=priority, read=read)
        self.streams.append(stream)

    def read(self, report: Tokens) -> Tokens:
        """An answer may end before its tokens do."""
        if self.rng.random() < 0.3:
            return msgspec.structs.replace(report, tokens=report.tokens[:1], finish_reason="stop")
        return report

    def complete(self) -> None:
        """An answer has all that it needs; a queued one hasn't begun."""
        if begun := [one for one in self.streams if one.record.first_token]:
            self.router.lifecycle.complete(self.rng.choice(begun).request)

    def cancel(self) -> None:
        if self.streams:
            self.router.lifecycle.cancel(self.rng.choice(self.streams).request)

    def given(self) -> tuple[Address, Generate | Prefill] | None:
        """What a language instance was given at any time; it may be about it, or late."""
        sent = [(to, message) for to, message in self.harness.sent if isinstance(message, Generate | Prefill)]
        return self.rng.choice(sent) if sent else None

    def need(self) -> None:
        if (given := self.given()) is None:
            return
        to, message = given
        generate = message if isinstance(message, Generate) else message.generate
        self.number += 1
        if isinstance(message, Generate) and to == D0:
            kv = TransferId(f"kv{self.number}")
            self.router.handle(PrefillNeeded(generate.request, to, kv, 0, [], self.asked()))
        elif generate.items:
            missing = [
                MissingItem(index, TransferId(f"t{self.number}/{index}/{section}"), section=section)
                for index, item in enumerate(generate.items)
                for section in range(len(item.sections))
            ]
            prefill = message.transfer if isinstance(message, Prefill) else TransferId("")
            self.router.handle(EncodeNeeded(generate.request, to, missing, prefill, self.asked()))

    def need_again(self) -> None:
        """An instance has lost the encode instance of a transfer, which goes on under its name."""
        books = self.router.debug_state()
        if books.encode.in_flight:
            task = self.rng.choice(list(books.encode.in_flight.values())).task
            state = books.requests[task.request]
            missing = MissingItem(task.index, task.transfer, 0, task.attempt + 1, task.section)
            prefill = state.prefill.transfer if state.prefill else TransferId("")
            self.number += 1
            self.router.handle(EncodeNeeded(state.generate.request, task.consumer, [missing], prefill, task.asked + 1))

    def drain(self) -> None:
        """An instance returns some of what it has ever been given; perhaps it drains."""
        address = self.rng.choice(self.addresses)
        if self.rng.random() < 0.5:
            self.router.handle(Draining(address))
        given = [message for to, message in self.harness.sent if to == address]
        requests = [one.request for one in given if isinstance(one, Generate)]
        requests += [one.generate.request for one in given if isinstance(one, Prefill)]
        transfers = [one.transfer for one in given if isinstance(one, Encode)]
        some = self.rng.randint(0, 4)
        returned = requests and self.rng.choices(requests, k=some), transfers and self.rng.choices(transfers, k=some)
        self.router.handle(HandBack(address, *returned))

    def credit(self) -> None:
        """Another frontend has more of an instance, or less."""
        rng = self.rng
        credit = Credit(rng.randint(1, 5), rng.choice([1, 10, 2000]), rng.randint(1, 4))
        self.router.handle(Heartbeat(rng.choice(self.addresses), self.harness.stats, credit))

    def asked(self) -> int:
        """Mostly the next number; at times that of a message that has arrived before, or overtakes others."""
        return max(0, self.number + self.rng.choice([0, 0, 0, -3, 3]))

    def encoded(self) -> None:
        if encodes := [message for _, message in self.harness.of(Encode) if isinstance(message, Encode)]:
            transfer = self.rng.choice(encodes).transfer
            if self.rng.random() < 0.2:
                self.router.handle(EncodeFailed(transfer, ErrorKind.DECODE_FAILED, "x"))
            else:
                self.router.handle(Encoded(transfer, self.rng.random() < 0.3, []))

    def tokens(self) -> None:
        if generates := [message for _, message in self.harness.of(Generate) if isinstance(message, Generate)]:
            request = self.rng.choice(generates).request
            tokens = [1] * self.rng.choice([1, 1, 3])
            state = self.router.debug_state().requests.get(RequestId(request.partition(".")[0]))
            first = len(state.generated) if state else 0
            first = max(0, first + self.rng.choice([0, 0, 0, 0, -1, 1]))
            self.router.handle(Tokens(request, tokens, first, [], self.rng.choice([None, None, "stop"])))

    def failed(self) -> None:
        if given := self.given():
            to, message = given
            request = message.request if isinstance(message, Generate) else message.generate.request
            self.router.handle(Failed(request, to, ErrorKind.INTERNAL_ERROR, "x"))

    def membership(self) -> None:
        address = self.rng.choice(self.addresses)
        if self.rng.random() < 0.4:
            self.router.handle(Deregister(address))
        else:
            self.harness.register(address, pid=self.rng.choice([1, 1, 2]))

    def time(self) -> None:
        alive = [address for address in self.addresses if self.rng.random() < 0.9]
        self.harness.wait(self.rng.choice([0.25, 1, 3, 11]), *alive)

    def operator(self) -> None:
        address = self.rng.choice(self.addresses)
        lease = self.router.membership.get(address)
        if self.rng.random() < 0.5:
            role = self.rng.choice(list(Role))
            self.router.handle(SetRole(Address("op"), str(address), role, 5.0, self.rng.random() < 0.7))
        elif lease is not None and lease.next_role is not None and self.rng.random() < 0.5:
            layouts = lease.layouts
            process = lease.pid, lease.incarnation, lease.capacity
            self.router.handle(Register(lease.name, lease.next_role, address, layouts, *process, context_length=100))
        else:
            self.router.handle(RoleKept(address, "no"))

    def network(self) -> None:
        self.lost = self.rng.choice([0.0, 0.0, 0.3])

    def check_books(self) -> None:
        """Each instance's account is that of the requests and items dispatched to it, and queues hold what waits."""
        state = self.router.debug_state()
        assert list(false_accounts(self.router)) == []
        waiting = {one.id for one in state.requests.values() if one.waits_for_prefill}
        assert {one.id for one in self.router.lifecycle.requests.waiting_for_prefill} == waiting
        requests = set(state.dispatched)
        computing = requests - state.encode.pending
        assert state.computing == computing
        assert state.forecast.rate.busy == bool(computing)
        assert state.forecast.encode_rate.busy == bool(state.encode.unfinished)
        assert state.encode.requests <= requests
        assert len(state.queued) == len(state.admission.queue) == state.admission.num_tickets
        for queue in (state.admission.queue, state.encode.queue):
            assert min(queue.counters.values(), default=0.0) >= 0, "no client has credit"
            assert all(total == pytest.approx(sum(costs)) for total, costs in queue.flows.values())

    def check_progress(self) -> None:
        """No request, prompt or item waits that policy and room would let go."""
        assert list(waits_in_vain(self.router)) == []

    def end(self) -> None:
        for stream in self.streams:
            self.router.lifecycle.cancel(stream.request)
        self.check_books()
        router, state = self.router, self.router.debug_state()
        assert [lease.outstanding for lease in router.membership if lease.outstanding] == []
        assert (router.num_requests, state.dispatched, state.queued) == (0, {}, frozenset())
        assert (state.encode.requests, state.encode.in_flight, state.encode.queue.flows) == (frozenset(), {}, {})
        assert state.admission.queue.flows == {}
        assert all(stream.record.finish_reason for stream in self.streams)
        self.lost = 0.0
        for address in self.addresses:
            router.handle(Deregister(address))
            self.harness.register(address, pid=3)
        self.router.lifecycle.cancel(self.harness.submit(timeout=0.01).request)


def play(seeds: range) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for seed in seeds:
            history = History(random.Random(seed))
            for _ in range(history.rng.randint(5, 120)):
                history.step()
            history.end()
    finally:
        logging.disable(logging.NOTSET)


def test_books_balance_after_every_event_and_are_empty_at_the_end() -> None:
    play(range(100))


@pytest.mark.slow
def test_books_balance_in_many_histories() -> None:
    play(range(1000, 6000))
