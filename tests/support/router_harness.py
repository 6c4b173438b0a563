"""A router with a clock of its own, whose messages are collected."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from triptych.config import AdmissionConfig, EncodeConfig, EngineConfig, LeaseConfig
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout
from triptych.messages.work import EncodeNeeded, Heartbeat, MissingItem, Register, SamplingParams
from triptych.models.base import Positions
from triptych.observe.requests import CURRENT, RequestRecord
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.registry import InstanceLease
from triptych.router.router import Router
from triptych.router.stream import TokenStream
from triptych.topology import Role
from triptych.types import Address, ImageHeader, ItemPlan, Placement, Span, TransferId

Kind = TypeVar("Kind")

E0, E1, PD0, PD1, P0, P1, D0, D1, D2 = (
    Address(name) for name in ("e0", "e1", "pd0", "pd1", "p0", "p1", "d0", "d1", "d2")
)

ROLES = {E0: Role.E, E1: Role.E, PD0: Role.PD, PD1: Role.PD, P0: Role.P, P1: Role.P, D0: Role.D, D1: Role.D, D2: Role.D}


def prompt(*costs: float) -> PlannedPrompt:
    """A prompt with an item of each cost."""
    header = ImageHeader("png", 1, 1)
    items = tuple(
        PlannedItem(
            "k",
            b"png",
            ItemPlan("image", header, 1, 1, (1, 1, 1), 2, 2, cost),
            Placement((Span(2 * n, 2),)),
            f"messages[{n}]",
        )
        for n, cost in enumerate(costs)
    )
    tokens = [0] * (2 * len(items)) + [1]
    return PlannedPrompt(tokens, Positions(np.zeros((3, len(tokens)), dtype=np.int64), len(tokens)), items)


class RouterHarness:
    """A router, the clock on its wall, and what it has sent."""

    def __init__(self, *addresses: Address, max_queue: int = 8, **settings: Any) -> None:
        """``settings`` of admission, of the engine and of encoding, by their names."""
        engine = {name: settings.pop(name) for name in list(settings) if name in EngineConfig.__dataclass_fields__}
        encode = {name: settings.pop(name) for name in list(settings) if name in EncodeConfig.__dataclass_fields__}
        self.now = 100.0
        self.sent: list[tuple[Address, Message]] = []
        self.disconnected: list[tuple[Address, int]] = []
        self.send: Callable[[Address, Message], None] = lambda to, message: self.sent.append((to, message))
        """Tests replace this to make sending fail."""
        self.router = Router(
            address=Address("frontend"),
            send=lambda to, message: self.send(to, message),  # noqa: PLW0108 - tests replace it
            disconnect=lambda address: self.disconnected.append((address, len(self.sent))),
            identity=ModelIdentity(),
            admission=AdmissionConfig(max_queue=max_queue, **{"request_timeout": 60.0} | settings),
            engine=EngineConfig(**engine),
            encode=EncodeConfig(**encode),
            lease=LeaseConfig(heartbeat=1.0, lease_expiry=10.0),
            clock=lambda: self.now,
        )
        for address in addresses:
            self.register(address)

    def register(
        self, address: Address, pid: int = 1, model: str = ModelIdentity().digest, dtype: str = "float32"
    ) -> None:
        layout = RowLayout(model, dtype, 4, 16)
        self.router.handle(Register(str(address), ROLES[address], address, [layout], pid, context_length=100))

    def wait(self, seconds: float, *alive: Address) -> None:
        """Time passes, with heartbeats of those that are alive; the router looks four times a second."""
        for _ in range(round(4 * seconds)):
            self.now += 0.25
            for address in alive:
                self.router.handle(Heartbeat(address))
            self.router.tick()

    def submit(self, *costs: float, client: str = "", **how: Any) -> TokenStream:
        """A request of ``client``, with an item of each cost."""
        context = CURRENT.set(RequestRecord("id", "POST", client=client))
        try:
            return self.router.submit(prompt(*costs), SamplingParams(max_tokens=4), [], **how)
        finally:
            CURRENT.reset(context)

    def need(self, stream: TokenStream, *items: int) -> list[TransferId]:
        needed = [MissingItem(item, TransferId(f"{stream.request}/{item}")) for item in items]
        self.router.handle(EncodeNeeded(stream.request, PD0, needed))
        return [one.transfer for one in needed]

    def of(self, kind: type[Kind]) -> list[tuple[Address, Kind]]:
        """The messages of a type that were sent, with their receivers."""
        return [(to, message) for to, message in self.sent if isinstance(message, kind)]

    def lease(self, address: Address) -> InstanceLease:
        lease = self.router.registry.get(address)
        assert lease is not None
        return lease

    def outstanding(self) -> float:
        return sum(lease.outstanding for lease in self.router.registry)


def tokens_of(stream: TokenStream) -> list[int]:
    async def read() -> list[int]:
        async with asyncio.timeout(5):
            return [token async for report in stream for token in report.tokens]

    return asyncio.run(read())
