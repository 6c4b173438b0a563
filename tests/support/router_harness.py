"""A router in virtual time, whose messages are collected."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from tests.support.plans import plan_of
from triptych.clock import Clock
from triptych.config import AdmissionConfig, LeaseConfig
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout
from triptych.messages.stats import EncodeStats, InstanceStats
from triptych.messages.work import Capacity, EncodeNeeded, Heartbeat, MissingItem, Register, SamplingParams
from triptych.models.base import Positions
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.instance import Assignment, Instance, WorkKind
from triptych.router.router import Router
from triptych.router.stream import TokenStream
from triptych.topology import Role
from triptych.types import Address, Placement, RequestId, Span, TransferId
from triptych.virtual_time import VirtualClock

Kind = TypeVar("Kind")

EXPIRY = 10.0
"""Seconds without a heartbeat after which a lease ends."""
FRONTEND = Address("frontend")
"""The router\'s own address."""

E0, E1, PD0, PD1, P0, P1, D0, D1, D2, EP0, EPD0 = (
    Address(name) for name in ("e0", "e1", "pd0", "pd1", "p0", "p1", "d0", "d1", "d2", "ep0", "epd0")
)
ENCODERS = [E0, E1, Address("e2"), Address("e3")]

ROLES = {E0: Role.E, E1: Role.E, PD0: Role.PD, PD1: Role.PD, P0: Role.P, P1: Role.P, D0: Role.D, D1: Role.D, D2: Role.D}
ROLES |= {EP0: Role.EP, EPD0: Role.EPD} | dict.fromkeys(ENCODERS, Role.E)
DEFAULTS: dict[str, Any] = {"request_timeout": 60.0, "restart_hold": 0.0, "placement": "least-loaded"}


def prompt(*costs: float, first: int = 0) -> PlannedPrompt:
    """A prompt with an item of each cost, whose keys are numbered from ``first`` on."""
    items = tuple(
        PlannedItem(
            f"k{first + n}",
            b"png",
            plan_of(2, cost=cost),
            Placement((Span(2 * n, 2),)),
            f"messages[{n}]",
            n,
        )
        for n, cost in enumerate(costs)
    )
    tokens = [0] * (2 * len(items)) + [1]
    return PlannedPrompt(tokens, Positions(np.zeros((3, len(tokens)), dtype=np.int64), len(tokens)), items)


def request_of(client: str = "", clock: Clock | None = None) -> RequestRecord:
    """The record of a request that has just arrived."""
    return RequestRecord("id", "POST", clock or VirtualClock(), client=client)


class RouterHarness:
    """A router, its clock, and what it has sent."""

    def __init__(self, *addresses: Address, max_queue: int = 8, **settings: Any) -> None:
        """``settings`` of admission, and ``max_num_seqs``, ``encode_batch_patches`` and ``encode_cache_bytes`` of all
        instances. Places work where the load is least, unless another ``placement`` is given."""
        self.stats = InstanceStats(EncodeStats(0, 0, 0, 0, 0, 0, settings.pop("encode_cache_bytes", 0)))
        self.capacity = Capacity(settings.pop("max_num_seqs", 32), settings.pop("encode_batch_patches", 1024))
        self.clock = VirtualClock()
        self.sent: list[tuple[Address, Message]] = []
        self.num_items = 0
        self.disconnected: list[tuple[Address, int]] = []
        self.send: Callable[[Address, Message], None] = lambda to, message: self.sent.append((to, message))
        """Tests replace this to make sending fail."""
        self.router = Router(
            address=FRONTEND,
            send=lambda to, message: self.send(to, message),  # noqa: PLW0108 - tests replace it
            disconnect=lambda address: self.disconnected.append((address, len(self.sent))),
            identity=ModelIdentity(),
            admission=AdmissionConfig(max_queue=max_queue, **DEFAULTS | settings),
            lease=LeaseConfig(heartbeat=1.0, lease_expiry=EXPIRY),
            clock=self.clock,
        )
        for address in addresses:
            self.register(address)

    def register(
        self,
        address: Address,
        pid: int = 1,
        model: str = ModelIdentity().digest,
        dtype: str = "float32",
        incarnation: int = 0,
        **more: Any,
    ) -> None:
        layout = RowLayout(model, dtype, 4, 16)
        role, incarnation = ROLES[address], incarnation or pid
        process = pid, incarnation, self.capacity
        self.router.handle(Register(str(address), role, address, [layout], *process, 100, self.stats, **more))

    def wait(self, seconds: float, *alive: Address) -> None:
        """Time passes, with heartbeats of those that are alive; the router looks four times a second."""
        for _ in range(round(4 * seconds)):
            self.clock.advance(0.25)
            for address in alive:
                self.router.handle(Heartbeat(address, self.stats))
            self.router.tick()

    def submit(self, *costs: float, client: str = "", **how: Any) -> TokenStream:
        """A request of ``client``, with an item of each cost."""
        record, made = request_of(client, self.clock), self.prompt(*costs)
        return self.router.lifecycle.submit(record, made, SamplingParams(max_tokens=4), [], **how)

    def prompt(self, *costs: float) -> PlannedPrompt:
        """A prompt with an item of each cost, which no other prompt has."""
        self.num_items += len(costs)
        return prompt(*costs, first=self.num_items - len(costs))

    def preparing(self, *, has_media: bool, **how: Any) -> AbstractContextManager[None]:
        """A request whose prompt is being prepared."""
        return self.router.lifecycle.preparing(request_of(clock=self.clock), has_media=has_media, **how)

    def holding_slot(self) -> AbstractContextManager[None]:
        """A request that needs no instance."""
        return self.router.lifecycle.holding_slot(request_of(clock=self.clock))

    def need(self, stream: TokenStream, *items: int) -> list[TransferId]:
        needed = [MissingItem(item, TransferId(f"{stream.request}/{item}")) for item in items]
        self.router.handle(EncodeNeeded(stream.request, PD0, needed))
        return [one.transfer for one in needed]

    def of(self, kind: type[Kind]) -> list[tuple[Address, Kind]]:
        """The messages of a type that were sent, with their receivers."""
        return [(to, message) for to, message in self.sent if isinstance(message, kind)]

    def occupy(self, address: Address, kind: WorkKind = WorkKind.PROMPT, cost: int = 0, patches: int = 0) -> None:
        """Give an instance work that never ends."""
        instance, request = self.lease(address), RequestId("other")
        work = Assignment(instance=instance, request=request, client="", kind=kind, cost=cost, patches=patches)
        instance.account.charge(work)

    def lease(self, address: Address) -> Instance:
        lease = self.router.membership.get(address)
        assert lease is not None
        return lease

    def outstanding(self) -> float:
        return sum(lease.outstanding for lease in self.router.membership)


def tokens_of(stream: TokenStream) -> list[int]:
    async def read() -> list[int]:
        async with asyncio.timeout(5):
            return [token async for report in stream for token in report.tokens]

    return asyncio.run(read())
