"""A service in virtual time: a frontend with the product's router, instances by name, and a network.

Equal seeds give equal histories. Only names that are random by design differ.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from triptych.config import AdmissionConfig, LeaseConfig
from triptych.messages.codec import Message, decode, encode
from triptych.messages.work import Heartbeat, Register, Tokens
from triptych.router.router import Router
from triptych.server.life import LifeState
from triptych.simulate.costs import ServiceCosts
from triptych.simulate.devices import Note
from triptych.simulate.instance import IDENTITY, InstanceSettings, SimulatedInstance, SimulatedModel
from triptych.simulate.machine import SharedMachine
from triptych.topology import Role
from triptych.types import Address
from triptych.virtual_time import VirtualClock

FRONTEND = Address("tcp://127.0.0.1:1")
TICK = 0.1
"""Seconds between two looks of the frontend at leases and deadlines."""
JITTER = 1.0
"""Most time that a message takes beyond a hop, in hops."""


class FrontendLoop:
    """The event loop of a frontend: it does one thing at a time, in order of arrival."""

    def __init__(self, clock: VirtualClock, machine: SharedMachine) -> None:
        self._clock = clock
        self._machine = machine
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        self._is_busy = False
        self.busy_seconds = 0.0

    def do(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something that takes that long, once all that came before is done; its effects come at its end."""
        if self._is_busy:
            self._waiting.append((seconds, action))
        elif seconds:
            self._begin(seconds, action)
        else:
            action()

    def _begin(self, seconds: float, action: Callable[[], object]) -> None:
        self._is_busy = True
        took = self._machine.seconds("frontend", "frontend", 1, seconds, self._clock.monotonic())
        self._clock.call_at(self._clock.monotonic() + took, partial(self._end, took, action))

    def _end(self, took: float, action: Callable[[], object]) -> None:
        self._is_busy = False
        self.busy_seconds += took
        self._clock.work(took)
        action()
        while self._waiting and not self._is_busy:
            seconds, following = self._waiting.popleft()
            if seconds:
                self._begin(seconds, following)
            else:
                following()


class SimulatedService:
    """The service. ``roles`` are the instances' by name, as ``Topology.names``."""

    def __init__(
        self,
        seed: int,
        roles: Mapping[str, Role],
        costs: ServiceCosts,
        *,
        model: SimulatedModel | None = None,
        settings: InstanceSettings | Mapping[Role, InstanceSettings] | None = None,
        admission: AdmissionConfig | None = None,
        lease: LeaseConfig | None = None,
        cores: int = 0,
        taken: float = 0.0,
        note: Note = lambda *_: None,
    ) -> None:
        """``settings`` may differ by role. ``cores`` are those of the one machine that all processes run on; with 0,
        each has a machine to itself. ``taken`` are those of them that others use, on average. ``note`` is told what
        happens: placements, steps, batches and losses."""
        self.clock, self._rng = VirtualClock(), random.Random(seed)
        self.costs, self.note = costs, note
        self._model = model or SimulatedModel()
        self._settings = settings or InstanceSettings()
        self._lease = lease or LeaseConfig()
        self._machine = SharedMachine(cores, costs.slowdown, taken) if cores else None
        self._coming: dict[tuple[Address, Address], tuple[float, list[Message]]] = {}
        """The messages between two processes that come next, and when."""
        self.frontend = FrontendLoop(self.clock, self._new_machine())
        self.router = Router(
            address=FRONTEND,
            send=partial(self.send, FRONTEND),
            disconnect=lambda _: None,
            identity=IDENTITY,
            admission=admission or AdmissionConfig(),
            lease=self._lease,
            expects_encoders=any(role.encodes for role in roles.values()),
            clock=self.clock,
        )
        self.instances: dict[Address, SimulatedInstance] = {}
        self.on_tick: list[Callable[[], object]] = []
        """Called with each look of the frontend at its leases."""
        self._lost: list[SimulatedInstance] = []
        for name, role in roles.items():
            self.start(name, role)
        self._tick()

    def start(self, name: str, role: Role) -> None:
        """Start an instance, or one more."""
        made = SimulatedInstance(
            name,
            role,
            len(self.instances) + len(self._lost),
            model=self._model,
            settings=self._settings if isinstance(self._settings, InstanceSettings) else self._settings[role],
            costs=self.costs,
            machine=self._new_machine(),
            frontend=FRONTEND,
            lease=self._lease,
            send=self.send,
            clock=self.clock,
            rng=self._rng,
            note=partial(self.note, name),
        )
        self.instances[made.channel.address] = made

    def lose(self, name: str, seconds: float) -> None:
        """Kill an instance, and start another process in its place after that time."""
        one = self.named(name)
        one.channel.is_lost = True
        self._lost.append(self.instances.pop(one.channel.address))
        self.note("lost", name)
        self.clock.call_at(self.clock.monotonic() + seconds, partial(self.start, name, one.process.role))

    def slow_down(self, name: str, speed: float) -> None:
        """Make an instance a straggler, whose work takes 1 / ``speed`` times as long from now on."""
        self.named(name).pace.speed = speed

    def named(self, name: str) -> SimulatedInstance:
        """Return the instance of that name that is there now."""
        (one,) = [one for one in self.instances.values() if one.process.name == name]
        return one

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, sender: Address, to: Address, message: Message) -> None:
        """Deliver a message after a while, behind those that this one has been sent by the same sender. What changes
        afterwards at its sender is copied."""
        if isinstance(message, Heartbeat | Register):
            message = decode(encode(message))
        link = sender, to
        arrival = self.clock.monotonic() + self.costs.hop * (1.0 + JITTER * self._rng.random())
        if sender == FRONTEND and to in self.instances:
            self.note("sent", self.instances[to].process.name, message)
        coming = self._coming.get(link)
        if coming is not None and arrival <= coming[0]:
            coming[1].append(message)
        else:
            coming = self._coming[link] = arrival, [message]
            self.clock.call_at(arrival, partial(self._deliver, link, coming))

    def _deliver(self, link: tuple[Address, Address], came: tuple[float, list[Message]]) -> None:
        if self._coming.get(link) is came:
            del self._coming[link]
        _, to = link
        instance = self.instances.get(to)
        for message in came[1]:
            if to == FRONTEND:
                seconds = self.costs.report(len(message.tokens)) if isinstance(message, Tokens) else 0.0
                self.frontend.do(seconds, partial(self.router.handle, message))
            elif instance is not None:
                instance.deliver(message)

    def _new_machine(self) -> SharedMachine:
        return self._machine or SharedMachine(10**6, self.costs.slowdown)

    def _tick(self) -> None:
        self.router.tick()
        for action in self.on_tick:
            action()
        self.clock.call_at(self.clock.monotonic() + TICK, self._tick)

    def until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Let time pass until something is so, for ``seconds`` at most. Returns whether it is."""
        end = self.clock.monotonic() + seconds
        while not condition():
            if self.clock.monotonic() >= end or not self.clock.step():
                return False
        return True

    def close(self) -> None:
        """End all instances."""
        for one in (*self.instances.values(), *self._lost):
            if one.process.life.state is not LifeState.ENDED:
                one.process.end()
        self.router.close()
