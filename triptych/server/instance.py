"""An instance: one process, one channel, one compute thread, and the stage loops of its role.

``run`` repeats: receive → ``turn``, which advances each stage loop and sends heartbeats. Everything slow happens on the
compute thread or in workers, which wake the loop when they are done.
"""

import enum
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from triptych.clock import Clock
from triptych.compute_thread import ANSWER_TIMEOUT, ComputeThread
from triptych.config import LeaseConfig
from triptych.errors import BlockError, InstanceBroken, StartError, TriptychError
from triptych.executor import StartExecutor
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import Abort, Done, RowLayout, TransferSide
from triptych.messages.stats import InstanceStats
from triptych.messages.work import (
    Capacity,
    ChangeRole,
    ChangingRole,
    Draining,
    Encode,
    Generate,
    MessagesLost,
    PeerLost,
    Prefill,
    Register,
    RoleKept,
    Stop,
)
from triptych.observe.machine import resident_bytes
from triptych.server.drain import QUIET_SECONDS, Drain
from triptych.server.frontends import Connection, Frontends
from triptych.server.life import Life, LifeState
from triptych.server.pulse import DRAINING, MAX_SILENCE, NO_LEASE, Pulse
from triptych.stage_loop import HandsBack, StageLoop
from triptych.topology import Role
from triptych.types import Address

log = logging.getLogger(__name__)

MAX_FAILURES = 5
FAILURE_WINDOW = 60.0
"""Window in seconds in which failures are counted. An instance resets itself after an internal error, and exits at the
``MAX_FAILURES``-th within the window. An instance that fails every request looks idle and would attract all new
ones."""


class MessageChannel(Connection, Protocol):
    """What an instance's messages come and go by: a ``Channel``, or what stands for one in virtual time."""

    @property
    def pending(self) -> bool: ...

    def receive(self, timeout: float | None) -> list[Message]: ...

    def wake(self) -> None: ...

    def ping(self) -> None: ...

    def close(self) -> None: ...


class RoleLoops(NamedTuple):
    """The stage loops of a role."""

    loops: list[tuple[StageLoop, TransferSide | None]]
    """Each loop with its peer in transfers, as ``InstanceProcess.add_loop`` takes them."""
    layouts: list[RowLayout]
    """Layouts of the rows that the instance produces or consumes."""


class LoopBuilder(Protocol):
    """Builds the stage loops of a role from what is loaded."""

    def check_role(self, role: Role) -> None:
        """Raise StartError, with the reason, for a role that can't be taken."""

    def build_loops(self, role: Role) -> RoleLoops:
        """Return the role's loops. Raises what ``check_role`` does, OSError, MemoryError, and any TriptychError; then
        nothing has changed."""


class _Order(enum.IntEnum):
    """What the instance has been told, perhaps by another thread or a signal."""

    NONE = 0
    DRAIN = 1
    STOP = 2


@dataclass(frozen=True)
class _PendingRole:
    """A role to take once the instance is idle. Times are those of the clock's ``now``."""

    role: Role
    frontend: Address
    """The frontend that asked for it."""
    began: float
    deadline: float


class InstanceProcess:
    """Runs a role's stage loops until it is stopped. With a ``loop_builder`` it can change its role."""

    loop_builder: LoopBuilder | None = None

    def __init__(
        self,
        *,
        name: str,
        role: Role,
        model: ModelIdentity,
        layouts: list[RowLayout],
        capacity: Capacity,
        channel: MessageChannel,
        join: Sequence[str],
        lease: LeaseConfig,
        clock: Clock,
        start_executor: StartExecutor,
        incarnation: int = 0,
    ) -> None:
        """``join`` are the control addresses of its frontends (HOST:PORT), and ``incarnation`` as in
        ``InstanceSpec``."""
        self.name = name
        self.clock, self.start_executor = clock, start_executor
        self._incarnation = incarnation or int(clock.wall() * 1000)
        self.role = role
        self.compute = ComputeThread(start_executor(1, "compute"), clock, channel.wake, self.fail)
        self.on_broken: Callable[[InstanceBroken], object] = lambda _: None
        """Called once the instance has left because it is broken, before anything is closed: that may never return."""
        self.layouts = layouts
        self.channel = channel
        self._lease = lease
        self._model = model
        self._capacity = capacity
        self.frontends = Frontends(
            join, channel, lease, capacity, registration=self._registration, give_up=self._give_up, clock=clock
        )
        self.loops: list[StageLoop] = []
        self._at_end: list[Callable[[], object]] = []
        self.handlers: dict[tuple[type[Any], TransferSide | None], Callable[[Any], object]] = {
            **{(kind, None): handler for kind, handler in self.frontends.handlers.items()},
            (PeerLost, None): self._on_peer_lost,
            (MessagesLost, None): self._on_messages_lost,
            (Stop, None): lambda _: self.stop(),
            (ChangeRole, None): self._on_change_role,
        }
        self._loop_handlers: dict[tuple[type[Any], TransferSide | None], Callable[[Any], object]] = {}
        self._pending_role: _PendingRole | None = None
        self.pulse = Pulse(name, role, clock, max_silence=max(MAX_SILENCE, 4 * lease.heartbeat_interval))
        """Signs of life, for the instance's own HTTP port."""
        self.life = Life()
        self._order = _Order.NONE
        self._drain: Drain | None = None
        self._failure: StartError | None = None
        self._last_heartbeat = self.clock.monotonic()
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)

    def add_loop(self, loop: StageLoop, peer: TransferSide | None = None) -> None:
        """Add a stage loop. ``peer`` is the side of transfers that it exchanges messages with, if any. An instance may
        have a producer and a consumer: ``Done`` and ``Abort`` go to the loop whose peer sent them."""
        self.loops.append(loop)
        for kind, handler in loop.handlers.items():
            self._loop_handlers[kind, peer if kind in (Done, Abort) else None] = handler

    def take_role(self, role: Role) -> None:
        """Replace the stage loops by those of that role. Raises what the loop builder raises; then nothing has
        changed."""
        assert self.loop_builder is not None
        built = self.loop_builder.build_loops(role)
        for loop in self.loops:
            loop.close()
        self.loops.clear()
        self._loop_handlers.clear()
        self.role, self.layouts = role, built.layouts
        for loop, peer in built.loops:
            self.add_loop(loop, peer)

    def at_end(self, close: Callable[[], object]) -> None:
        """Register a function to call when ``run`` ends, after the loops are closed; the last one is called first."""
        self._at_end.append(close)

    def close_parts(self) -> None:
        """Call the functions given to ``at_end``, for an instance that never runs, too."""
        while self._at_end:
            self._at_end.pop()()
        self.life.enter(LifeState.ENDED)

    def send(self, to: Address, message: Message) -> None:
        """Send a stage loop's message. A failure is only logged: the lease of an unreachable peer expires."""
        try:
            self.channel.send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)

    def stop(self) -> None:
        """Make ``run`` return soon. May be called from any thread, and from a signal handler."""
        self._order = _Order.STOP
        self.channel.wake()

    def drain(self) -> None:
        """Make ``run`` return once the work in flight is done, or after the drain timeout; at once when called again.
        May be called from any thread, and from a signal handler."""
        self._order = _Order.STOP if self._order else _Order.DRAIN
        self.channel.wake()

    def fail(self, failure: StartError) -> None:
        """Make ``run`` raise the failure soon, before a stage loop acts on anything else. May be called from any
        thread."""
        self._failure = failure
        self.channel.wake()

    def run(self) -> None:
        """Register, and serve until ``stop`` or the end of a drain. Raises what ``turn`` does."""
        self.begin()
        try:
            while self.life.state is not LifeState.LEAVING:
                self.turn(self.channel.receive(self.next_turn))
        finally:
            self.end()

    def begin(self) -> None:
        """Register. Until its ``life`` says that it leaves, there must be a ``turn`` whenever messages come or the
        channel is woken, and otherwise after ``next_turn``; and ``end`` however that ends."""
        self._last_heartbeat = self.clock.monotonic()  # loading may have taken longer than a lease lasts
        self.life.enter(LifeState.REGISTERING)
        self.frontends.register()
        self._beat()

    @property
    def next_turn(self) -> float:
        """Most seconds until the next turn."""
        until_heartbeat = max(0.0, self._last_heartbeat + self._lease.heartbeat_interval - self.clock.monotonic())
        until_look = QUIET_SECONDS / 3 if self._drain else self.frontends.next_step
        return min(until_heartbeat, until_look, *(loop.next_advance for loop in self.loops))

    def turn(self, messages: Sequence[Message]) -> None:
        """Handle messages, advance the stage loops, and keep the leases. Raises StartError when no frontend takes the
        instance, InstanceBroken when its device doesn't answer or its work keeps failing, and what was given to
        ``fail``."""
        self._beat()
        try:
            self._work_on(messages)
            self.frontends.step()
        except StartError as error:
            self._failure = error  # first: what follows may fail by the same device
            self._hand_back()
            raise
        self.life.has_lease(held=self.frontends.registered)
        if self._order is _Order.STOP or self.frontends.ended:
            self.life.enter(LifeState.LEAVING)
        self._beat()

    def end(self) -> None:
        """Leave, and close everything."""
        # however it ends: frontends needn't wait for the lease to expire. Work that is left when it is told to stop,
        # or when its drain takes too long, isn't the cause
        suspect = self._failure.suspect if isinstance(self._failure, InstanceBroken) else True
        self.frontends.leave(suspect=suspect and self.life.state is not LifeState.LEAVING)
        self.life.enter(LifeState.LEAVING)
        self.pulse.not_ready = DRAINING
        if isinstance(self._failure, InstanceBroken):
            log.error("this instance is broken; exiting")
            self.on_broken(self._failure)
        self.compute.close()
        for loop in self.loops:
            loop.close()
        self.close_parts()

    def _work_on(self, messages: Sequence[Message]) -> None:
        if self._failure is not None:
            raise self._failure
        if self.compute.is_stuck:
            raise InstanceBroken(f"the device didn't answer within {ANSWER_TIMEOUT:g} s after a failed job")
        self._check_lease()
        for message in messages:
            self._handle(message)
        self._advance()
        self._take_pending_role()
        if self._order is _Order.DRAIN:
            self._continue_drain()
        if self.clock.monotonic() >= self._last_heartbeat + self._lease.heartbeat_interval:
            self._check_lease()
            self._last_heartbeat = self.clock.monotonic()
            self.pulse.stats = self._stats()
            self.frontends.beat(self.pulse.stats)
            self.channel.ping()  # other instances get no heartbeats
            self._check_idle()

    def _beat(self) -> None:
        self.pulse.ticked, self.pulse.role = self.clock.now(), self.role
        self.pulse.not_ready = DRAINING if self.life.is_ending else "" if self.frontends.registered else NO_LEASE

    def _continue_drain(self) -> None:
        """Begin the drain, or end the instance once it is over."""
        now = self.clock.now()
        if self._drain is None:
            log.info("draining: finishing the work in flight, for at most %g s", self._lease.drain_timeout)
            self._drain = Drain(now, self._lease.drain_timeout)
            if self._pending_role is not None:
                self._keep_role("it is draining")
            self.life.enter(LifeState.DRAINING)
            self._hand_back()
        idle = not self.channel.pending and all(loop.idle for loop in self.loops)
        if self._drain.is_over(now, idle=idle) or not self.frontends.registered:  # no lease: nothing left to finish
            log.info("drained in %.2f s%s", now - self._drain.began, "" if idle else ", with work left")
            self.life.enter(LifeState.LEAVING)

    def _hand_back(self) -> None:
        """Get nothing new from now on, and give what hasn't begun back to the frontends that own it."""
        self.frontends.send(Draining(self.channel.address))
        self.frontends.leaving = True
        for loop in self.loops:
            if isinstance(loop, HandsBack):
                for frontend, message in loop.hand_back().items():
                    self.send(frontend, message)

    def _stats(self) -> InstanceStats:
        stats = InstanceStats(busy_seconds=self.compute.busy_seconds, resident_bytes=resident_bytes())
        for loop in self.loops:
            loop.add_stats(stats)
        return stats

    def _advance(self) -> None:
        """Advance all stage loops. After an internal error, the work in flight is aborted, because its state is
        unknown. The process and the loaded model stay: if it exited, the supervisor would stop the whole service."""
        try:
            for loop in self.loops:
                loop.advance()
        except MemoryError:
            log.error("this instance has no memory left; exiting")
            raise
        except StartError:
            raise
        except Exception as error:
            log.exception("this instance failed; aborting the work in flight")
            self.compute.ask(error)
            self._failures.append(self.clock.monotonic())
            if len(self._failures) == MAX_FAILURES and self._failures[-1] - self._failures[0] < FAILURE_WINDOW:
                often = f"it failed {MAX_FAILURES} times within {FAILURE_WINDOW:g} s"
                raise InstanceBroken(f"{often}; the last time: {error!r}") from error
            self._reset()

    def _check_lease(self) -> None:
        """Give up what this process worked on if it was stopped (SIGSTOP, a suspended machine) for longer than a lease
        lasts."""
        self.frontends.lose_after(self.clock.monotonic() - self._last_heartbeat)

    def _reset(self) -> None:
        """Abort all work, then register again. The order matters: once frontends report this instance as lost,
        consumers reuse the blocks that they granted to it. They fail the requests, if they haven't already, before they
        accept the registration."""
        for loop in self.loops:
            loop.on_lease_lost()
        self._pending_role = None  # the frontend answers the operator, because this instance has left
        if self._drain is not None:
            self.frontends.leave(suspect=True)
            self.life.enter(LifeState.LEAVING)  # there is nothing left to finish
            return
        self.life.enter(LifeState.REGISTERING)
        self.frontends.start_over()

    def _give_up(self, frontend: Address) -> None:
        """Drop the work of a frontend that is gone, or has lost this instance."""
        for loop in self.loops:
            loop.frontend_lost(frontend)
        if self._pending_role is not None and self._pending_role.frontend == frontend:
            self._keep_role("the frontend that asked for the change is lost")

    def _take_pending_role(self) -> None:
        """Take the pending role once this instance is idle, and register again. As for any repeated registration, the
        frontend makes peers drop their transfers with it."""
        if (pending := self._pending_role) is None:
            return
        if self.channel.pending or not all(loop.idle for loop in self.loops):
            if self.clock.now() > pending.deadline:
                self._keep_role(f"it was not done with its work within {pending.deadline - pending.began:g} s")
            return
        before, began = self.role, self.clock.now()
        try:
            self.take_role(pending.role)
        except (TriptychError, OSError, MemoryError) as error:
            self._keep_role(str(error))
            return
        now = self.clock.now()
        log.info(
            "role changed from %s to %s; drained in %.3f s, changed in %.3f s",
            before,
            self.role,
            began - pending.began,
            now - began,
        )
        self._pending_role = None
        self.life.enter(LifeState.REGISTERING)
        self.frontends.register()

    def _keep_role(self, reason: str) -> None:
        log.warning("the role remains %s: %s", self.role, reason)
        self._pending_role = None
        self.life.enter(LifeState.SERVING)
        self.frontends.send(RoleKept(self.channel.address, reason))

    def _check_idle(self) -> None:
        try:
            for loop in self.loops:
                loop.check_idle()
        except BlockError as error:
            log.error("while idle: %s", error)  # a bug, but no reason to stop serving

    def _handle(self, message: Message) -> None:
        """Handle a message. It comes from outside, so a bad one must not harm other requests."""
        end = message.by if isinstance(message, Done | Abort) else None
        key = (type(message), end)
        handler = self.handlers.get(key) or self._loop_handlers.get(key)
        if handler is None:
            log.warning("%s is not for a %s instance", type(message).__name__, self.role)
            return
        if (owner := _owner(message)) and not self.frontends.holds(owner):
            # sent before the lease was lost, and read after it, as by a process that was stopped: that frontend won't
            # cancel it, since it has given the request to another instance
            log.info("dropped %s: it is of a lease that was lost", type(message).__name__)
            return
        try:
            handler(message)
        except StartError:
            raise
        except TriptychError as error:
            log.error("%s: %s", type(message).__name__, error)
        except Exception:  # a bad message must not affect other requests
            log.exception("couldn't handle %s", type(message).__name__)

    def _registration(self) -> Register:
        return Register(
            name=self.name,
            role=self.role,
            address=self.channel.address,
            layouts=self.layouts,
            pid=os.getpid(),
            incarnation=self._incarnation,
            capacity=self._capacity,
            context_length=max((loop.context_length for loop in self.loops), default=0),
            stats=self._stats(),
            model=self._model,
        )

    def _on_change_role(self, message: ChangeRole) -> None:
        try:
            if self._order:
                raise StartError("it is draining")
            if self._pending_role is not None:
                raise StartError(f"it is changing to {self._pending_role.role}, as another frontend has asked")
            self.life.has_lease(held=self.frontends.registered)
            if self.life.state is not LifeState.SERVING:
                raise StartError(f"it is {self.life.state}")
            if self.loop_builder is None:
                raise StartError("it can't change its role")
            self.loop_builder.check_role(message.role)
        except StartError as error:
            log.warning("the role doesn't become %s: %s", message.role, error)
            self.send(message.frontend, RoleKept(self.channel.address, str(error)))
        else:
            now = self.clock.now()
            self.life.enter(LifeState.CHANGING)
            self._pending_role = _PendingRole(message.role, message.frontend, now, now + message.timeout)
            log.info("draining to change its role to %s", message.role)
        if self._pending_role is not None:
            self.frontends.send(ChangingRole(self.channel.address, self._pending_role.role))

    def _on_peer_lost(self, message: PeerLost) -> None:
        for loop in self.loops:
            loop.peer_lost(message)
        if self.frontends.peer_lost(message):
            self.channel.disconnect(message.address)

    def _on_messages_lost(self, message: MessagesLost) -> None:
        """Give up the work of a frontend whose messages were lost. Those of other instances are the frontends' to
        recover, because transfers have two ends, and only frontends can tell both."""
        if not self.frontends.messages_lost(message.sender):
            self.frontends.send(message)


def _owner(message: Message) -> Address | None:
    """Return the frontend whose work a message is; None for other messages."""
    match message:
        case Generate() | Encode():
            return message.reply_to
        case Prefill():
            return message.generate.reply_to
        case _:
            return None
