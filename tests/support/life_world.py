"""A small service in virtual time: real instances and routers, a network that delays and loses, and a supervisor that
starts again what has ended. Instances compute nothing."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.router_harness import prompt, request_of
from triptych.config import AdmissionConfig, LeaseConfig
from triptych.errors import ServiceError, StartError
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import LaunchedInstance, LauncherReport, LaunchState, SetRole
from triptych.messages.rows import RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import (
    Cancel,
    Capacity,
    FrontendEnding,
    Generate,
    HandBack,
    HandingOver,
    MessagesLost,
    PeerLost,
    SamplingParams,
    Tokens,
)
from triptych.router.quarantine import MAX_LOSSES
from triptych.router.request_state import RequestState
from triptych.router.router import Router
from triptych.server.instance import InstanceProcess, RoleLoops
from triptych.server.life import LifeState
from triptych.stage_loop import Handlers
from triptych.topology import Role
from triptych.types import NO_OWNER, Address, RequestId
from triptych.virtual_time import VirtualClock

IDENTITY = ModelIdentity()
LAYOUT = RowLayout(IDENTITY.digest, "float32", 4, 16)
LEASE = LeaseConfig(heartbeat=0.5, lease_expiry=3.0, start_timeout=60.0, drain_timeout=4.0)
STEP, TICK = 0.05, 0.25
"""Seconds of one step of time, and between two looks of the routers and the supervisor."""
SETTLED = 12.0
"""Seconds without a fault after which all agree: a lease and a drain, and some messages."""
CONTROL = Address("tcp://127.0.0.1:1")


@dataclass
class Work:
    """A stage loop whose requests take some time each."""

    world: "World"
    address: Address
    send: Callable[[Address, Message], None]
    requests: dict[RequestId, tuple[Generate, float]] = field(default_factory=dict)
    """With the time at which they are done."""
    fails: bool = False
    """Whether it raises something unforeseen next."""
    context_length: int = 100

    @property
    def handlers(self) -> Handlers:
        return {Generate: self._on_generate, Cancel: lambda message: self.requests.pop(message.request, None)}

    def _on_generate(self, message: Generate) -> None:
        self.requests[message.request] = message, self.world.now + self.world.rng.uniform(0.1, 6.0)

    def advance(self) -> None:
        if self.fails:
            self.fails = False
            raise ValueError("something unforeseen")
        for request, (message, at) in list(self.requests.items()):
            if self.world.now >= at:
                del self.requests[request]
                self.send(message.reply_to, Tokens(request, [7], len(message.generated), finish_reason="length"))

    @property
    def next_advance(self) -> float:
        return min((at - self.world.now for _, at in self.requests.values()), default=float("inf"))

    def hand_back(self) -> dict[Address, HandBack]:
        """Half of the requests haven't begun."""
        back: defaultdict[Address, list[RequestId]] = defaultdict(list)
        for request in list(self.requests)[::2]:
            back[self.requests.pop(request)[0].reply_to].append(request)
        return {frontend: HandBack(self.address, requests, []) for frontend, requests in back.items()}

    def peer_lost(self, lost: PeerLost) -> None: ...

    def frontend_lost(self, frontend: Address) -> None:
        self.requests = {one: kept for one, kept in self.requests.items() if kept[0].reply_to != frontend}

    def on_lease_lost(self) -> None:
        self.requests.clear()

    def check_idle(self) -> None: ...

    def add_stats(self, stats: InstanceStats) -> None: ...

    @property
    def idle(self) -> bool:
        return not self.requests

    def close(self) -> None: ...


class Process:
    """An instance that takes a turn when it is told to. It is its own channel and loop builder."""

    def __init__(self, world: "World", name: str, incarnation: int) -> None:
        self.world, self.name, self.incarnation = world, name, incarnation
        world.num_processes += 1
        self.address = Address(f"tcp://127.0.0.1:{1000 + world.num_processes}")
        self.inbox: list[Message] = []
        self.resume_at = world.now
        self.stopped_until = 0.0
        self.killed = False
        self._accepted_by = NO_OWNER
        self.instance = InstanceProcess(
            name=name,
            role=Role.PD,
            model=IDENTITY,
            layouts=[LAYOUT],
            capacity=Capacity(4),
            channel=self,
            join=[CONTROL.removeprefix("tcp://")],
            lease=LEASE,
            clock=world.clock,
            start_executor=world.clock.start_executor,
            incarnation=incarnation,
        )
        self.instance.loop_builder = self
        self.work = Work(world, self.address, self.send)
        self.instance.add_loop(self.work)
        self.instance.begin()

    @property
    def ended(self) -> bool:
        return self.instance.life.state is LifeState.ENDED

    def turn(self) -> None:
        """Let it go on until it receives, or ends by what may end it."""
        messages, self.inbox = self.inbox, []
        self.resume_at = float("inf")
        try:
            self.instance.turn(messages)
        except StartError:
            self.instance.end()
        else:
            if self.instance.life.state is LifeState.LEAVING:
                self.instance.end()
            else:
                self.resume_at = min(self.resume_at, self.world.now + self.instance.next_turn)

    def kill(self) -> None:
        """End it without a word."""
        self.killed = True
        self.instance.end()

    # ── as a channel ─────────────────────────────────────────────────────────────────────────────────────────

    pending = False

    def receive(self, timeout: float | None) -> list[Message]:
        raise AssertionError("it takes turns")

    def send(self, to: Address, message: Message) -> None:
        if self.killed:
            return
        if to == CONTROL:  # a connection stays with the frontend that has accepted it
            if self._accepted_by not in self.world.routers:
                self._accepted_by = Address(f"tcp://{self.world.frontend.control}")
            to = self._accepted_by
        self.world.send(self.address, to, message)

    def disconnect(self, peer: Address) -> None:
        if peer == CONTROL:
            self._accepted_by = NO_OWNER

    def ping(self) -> None: ...

    def close(self) -> None: ...

    def wake(self) -> None:
        self.resume_at = self.world.now

    # ── as a loop builder ────────────────────────────────────────────────────────────────────────────────────

    def check_role(self, role: Role) -> None:
        if role.takes_kv:
            raise StartError("it can't decode alone")

    def build_loops(self, role: Role) -> RoleLoops:
        self.check_role(role)
        self.work = Work(self.world, self.address, self.send)
        return RoleLoops([(self.work, None)], [LAYOUT])


class World:
    """The service, and what an operator, its clients and accidents do to it."""

    def __init__(self, seed: int, names: Sequence[str]) -> None:
        self.rng, self.clock = random.Random(seed), VirtualClock()
        self.num_processes = 0
        self.links: defaultdict[tuple[Address, Address], deque[Message]] = defaultdict(deque)
        self.processes: dict[Address, Process] = {}
        self.down: dict[str, float] = {}
        """Names of instances that have ended, and when they are started again."""
        self.last: dict[str, Process] = {}
        self.states: list[RequestState] = []
        self.finishing: Router | None = None
        self.finishing_until = 0.0
        self._num_frontends = 0
        self._looked = 0.0
        self.frontend = self._new_frontend()
        for name in names:
            self._start(name)

    @property
    def now(self) -> float:
        return self.clock.now()

    # ── frontends ────────────────────────────────────────────────────────────────────────────────────────────

    def _new_frontend(self) -> Router:
        self._num_frontends += 1
        address = Address(f"tcp://127.0.0.1:{10 + self._num_frontends}")
        return Router(
            address=address,
            send=lambda to, message: self.send(address, to, message),
            disconnect=lambda _: None,
            identity=IDENTITY,
            admission=AdmissionConfig(request_timeout=10_000.0, restart_hold=10_000.0, placement="least-loaded"),
            lease=LEASE,
            expects_encoders=False,
            clock=self.clock,
        )

    @property
    def routers(self) -> dict[Address, Router]:
        found = [one for one in (self.frontend, self.finishing) if one is not None]
        return {Address(f"tcp://{one.control}"): one for one in found}

    def hand_over(self) -> None:
        """Another frontend takes over, and this one finishes its requests."""
        if self.finishing is None:
            before = self.finishing = self.frontend
            self.frontend, self.finishing_until = self._new_frontend(), self.now + 20.0
            self._tell(before, HandingOver(Address(f"tcp://{before.control}")))

    def _end_finishing(self) -> None:
        before = self.finishing
        if before is not None and not before.num_requests:
            self._tell(before, FrontendEnding(Address(f"tcp://{before.control}")))
            self.finishing = None

    def _tell(self, router: Router, message: Message) -> None:
        for lease in router.membership:
            self.send(Address(f"tcp://{router.control}"), lease.address, message)

    def kill_frontend(self) -> None:
        """Another one is started at its addresses; its requests broke off."""
        self.states = [one for one in self.states if self.frontend.lifecycle.requests.get(one.id) is None]
        self._num_frontends -= 1
        self.frontend = self._new_frontend()

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, name: str) -> None:
        incarnation = int(self.now * 1000)
        process = self.last[name] = Process(self, name, incarnation)
        self.processes[process.address] = process

    def alive(self, *states: LifeState) -> list[Process]:
        """Those that run, or that are in one of these states."""
        running = [one for one in self.processes.values() if not one.ended]
        return [one for one in running if not states or one.instance.life.state in states]

    def _supervise(self) -> None:
        for process in [one for one in self.processes.values() if one.ended]:
            del self.processes[process.address]
            self.down[process.name] = self.now + self.rng.uniform(0.5, 3.0)
        for name, at in list(self.down.items()):
            if self.now >= at:
                del self.down[name]
                self._start(name)
        joined = {lease.address for lease in self.frontend.membership}
        launched = []
        for name, process in self.last.items():
            up = LaunchState.READY if process.address in joined else LaunchState.STARTING
            state = LaunchState.RESTARTING if name in self.down else up
            launched.append(LaunchedInstance(name, Role.PD, state, 1, incarnation=process.incarnation))
        named = [Address(f"tcp://{self.finishing.control}")] if self.finishing is not None else []
        for router in self.routers.values():
            router.handle(LauncherReport(Address("supervisor"), launched, finishing=named))

    # ── the network ──────────────────────────────────────────────────────────────────────────────────────────

    def send(self, sender: Address, to: Address, message: Message) -> None:
        self.links[sender, to].append(message)

    def _deliver(self, share: float) -> None:
        for (sender, to), waiting in list(self.links.items()):
            while waiting and self.rng.random() < share:
                self._receive(to, waiting.popleft())
            if not waiting:
                del self.links[sender, to]

    def _receive(self, to: Address, message: Message) -> None:
        if router := self.routers.get(to):
            router.handle(message)
        elif to in self.processes:
            self.processes[to].inbox.append(message)

    def lose_messages(self) -> None:
        """Of what is under way on one connection. The receiver notices."""
        if links := [one for one, waiting in self.links.items() if waiting]:
            sender, to = self.rng.choice(links)
            self.links[sender, to].clear()
            self._receive(to, MessagesLost(sender))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, seconds: float, share: float = 1.0) -> None:
        """Time passes. ``share`` is how probably a message arrives within a step."""
        until = self.now + seconds
        while self.now < until:
            self.clock.advance(STEP)
            self._deliver(share)
            for process in self.alive():
                due = process.inbox or self.now >= process.resume_at
                if due and self.now >= process.stopped_until:
                    process.turn()
            if self.now >= self._looked + TICK:
                self._looked = self.now
                for router in self.routers.values():
                    router.tick()
                self._supervise()
                if self.finishing is not None and self.now < self.finishing_until:
                    continue
                self._end_finishing()

    # ── requests and operators ───────────────────────────────────────────────────────────────────────────────

    def submit(self) -> None:
        lifecycle = self.frontend.lifecycle
        before = {state.id for state in lifecycle.requests}
        try:
            lifecycle.submit(request_of(), prompt(), SamplingParams(max_tokens=4), [])
        except ServiceError:  # it has no instance yet
            return
        self.states += [state for state in lifecycle.requests if state.id not in before]

    def change_role(self, process: Process) -> None:
        role = self.rng.choice([Role.PD, Role.EPD, Role.EPD, Role.D])
        self.frontend.handle(SetRole(Address("operator"), process.name, role, 2.0, force=True))

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """At any moment: who serves has a lease, and no request was lost."""
        for process in self.alive(LifeState.SERVING, LifeState.CHANGING):
            assert process.instance.frontends.registered or self.now < process.stopped_until + LEASE.heartbeat
        for state in self.states:
            error = state.stream.record.error
            assert not error or state.losses >= MAX_LOSSES, f"{state.id} is lost: {error}"

    def check_agreement(self) -> None:
        """Once nothing is under way: instances and frontends think the same of each other."""
        self.wait(SETTLED)
        for process in self.alive():
            instance, life = process.instance, process.instance.life
            assert life.state in (LifeState.SERVING, LifeState.CHANGING, LifeState.DRAINING), f"it is {life.state}"
            for address, router in self.routers.items():
                lease = router.membership.get(process.address)
                if life.state is LifeState.DRAINING:
                    assert lease is None or lease.draining
                    continue
                assert lease is not None, f"{process.name} is {life.state}, and {address} doesn't have it"
                assert instance.frontends.holds(address)
                assert (lease.role, lease.draining) == (instance.role, False)
                assert (lease.next_role is not None) is (life.state is LifeState.CHANGING)
        for router in self.routers.values():
            for lease in router.membership:
                assert lease.address in self.processes, f"{lease.name} has ended"
                for state in router.lifecycle.requests.at(lease):
                    assert state.generate.request in self.processes[lease.address].work.requests, "it is forgotten"
        dispatched = {state.generate.request for router in self.routers.values() for state in router.lifecycle.requests}
        for process in self.alive():
            assert dispatched.issuperset(process.work.requests), "no frontend waits for it"
