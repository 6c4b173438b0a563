"""An instance: one process, one channel, one compute thread, and the hosts that its role asks for.

The loop is the whole of it: receive → let each host advance → heartbeat. Everything slow happens on the compute thread
or in workers, which wake the loop when they are done.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from triptych.compute_thread import ComputeThread
from triptych.config import LeaseConfig
from triptych.errors import BlockError, StartError, TriptychError
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.rows import Abort, Done, RowLayout, TransferSide
from triptych.messages.stats import InstanceStats
from triptych.messages.work import (
    ChangeRole,
    Deregister,
    Heartbeat,
    PeerLost,
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
    RoleKept,
    Stop,
)
from triptych.observe.machine import resident_bytes
from triptych.stage_loop import StageLoop
from triptych.topology import Role
from triptych.types import Address

log = logging.getLogger(__name__)

REGISTER_AGAIN = 4
"""Heartbeats after which a registration that hasn't been answered, though the frontend answers otherwise, is lost."""
REMIND_EVERY = 10.0
"""Seconds between log lines about a frontend that doesn't answer."""
MAX_FAILURES = 5
FAILURE_WINDOW = 60.0
"""An instance starts over after a bug, but not ``MAX_FAILURES`` times within this many seconds: then the bug isn't one
request's, and an instance that is idle because it fails at everything would be given every new request."""


class RoleLoops(NamedTuple):
    """The hosts of a role, each with who it talks to in transfers, as ``Instance.add`` takes them; and how rows look
    that they make or take."""

    hosts: list[tuple[StageLoop, TransferSide | None]]
    layouts: list[RowLayout]


class LoopBuilder(Protocol):
    """Makes hosts for a role of what is loaded."""

    def check(self, role: Role) -> None:
        """Raises StartError, saying why, for a role that can't be had."""

    def compose(self, role: Role) -> RoleLoops:
        """The role's hosts. Raises as ``check`` does, OSError, MemoryError, and any TriptychError; then nothing has
        changed."""


@dataclass(frozen=True)
class _Change:
    """Another role, once all is done in the present one. Times are those of ``time.monotonic``."""

    role: Role
    began: float
    deadline: float


class Instance:
    """Runs a role's hosts until it is told to stop, or, with a ``composer``, to go on in another role."""

    composer: LoopBuilder | None = None

    def __init__(
        self,
        *,
        name: str,
        role: Role,
        layouts: list[RowLayout],
        channel: Channel,
        frontend: Address,
        lease: LeaseConfig,
    ) -> None:
        self.name = name
        self.role = role
        self.compute = ComputeThread(channel.wake)
        self._layouts = layouts
        self.channel = channel
        self.frontend = frontend
        self._lease = lease
        self.hosts: list[StageLoop] = []
        self._at_end: list[Callable[[], object]] = []
        self._handlers: dict[tuple[type[Any], TransferSide | None], Callable[[Any], object]] = {
            (Registered, None): self._on_welcome,
            (RegistrationRefused, None): self._on_rejected,
            (RegisterAgain, None): lambda _: self._on_forgotten(),
            (PeerLost, None): self._on_peer_lost,
            (Stop, None): lambda _: self.stop(),
            (ChangeRole, None): self._on_change_role,
        }
        self._host_handlers: dict[tuple[type[Any], TransferSide | None], Callable[[Any], object]] = {}
        self._change: _Change | None = None
        self._registered = False
        self._stopping = False
        self._failure: StartError | None = None
        self._last_heartbeat = time.monotonic()
        self._expiry = lease.lease_expiry
        self._register_deadline = self._remind_at = 0.0
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)

    def add(self, host: StageLoop, far_end: TransferSide | None = None) -> None:
        """Takes in a host. ``far_end`` is who it talks to in transfers, if it does: of two hosts in one instance, one
        is the producer and one the consumer, and what either end says goes to the other."""
        self.hosts.append(host)
        for kind, handler in host.handlers.items():
            self._host_handlers[kind, far_end if kind in (Done, Abort) else None] = handler

    def become(self, role: Role) -> None:
        """Exchanges the hosts for those of that role. Raises what the composer raises; then all is as it was."""
        assert self.composer is not None
        composition = self.composer.compose(role)
        for host in self.hosts:
            host.close()
        self.hosts.clear()
        self._host_handlers.clear()
        self.role, self._layouts = role, composition.layouts
        for host, far_end in composition.hosts:
            self.add(host, far_end)

    def at_end(self, close: Callable[[], object]) -> None:
        """What to call when ``run`` ends, after the hosts are closed; the last one first."""
        self._at_end.append(close)

    def send(self, to: Address, message: Message) -> None:
        """For the hosts. A peer that can't be reached is the registry's business: its lease runs out."""
        try:
            self.channel.send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)

    def stop(self) -> None:
        """Ends ``run`` soon. May be called from any thread, and from a signal handler."""
        self._stopping = True
        self.channel.wake()

    def fail(self, failure: StartError) -> None:
        """Makes ``run`` raise the failure soon, before a host acts on anything else. May be called from any thread."""
        self._failure = failure
        self.channel.wake()

    def run(self) -> None:
        """Registers and serves until ``stop``. Raises StartError when the frontend doesn't take the instance, what
        ``fail`` was given, and what a host raised when starting over hasn't helped."""
        self._register()
        try:
            while not self._stopping:
                self._turn()
                if not self._registered:
                    self._expect_answer()
        finally:
            # however it ends: nobody should wait for the lease to run out
            self.send(self.frontend, Deregister(self.channel.address))
            self.compute.close()
            for host in self.hosts:
                host.close()
            for close in reversed(self._at_end):
                close()

    def _turn(self) -> None:
        until_heartbeat = max(0.0, self._last_heartbeat + self._lease.heartbeat - time.monotonic())
        messages = self.channel.receive(min(until_heartbeat, *(host.next_advance for host in self.hosts)))
        if self._failure is not None:
            raise self._failure
        self._notice_lapse()
        for message in messages:
            self._handle(message)
        self._advance()
        self._change_role()
        if time.monotonic() >= self._last_heartbeat + self._lease.heartbeat:
            self._notice_lapse()
            self._last_heartbeat = time.monotonic()
            self.send(self.frontend, Heartbeat(self.channel.address, self._stats()))
            self._check_idle()

    def _stats(self) -> InstanceStats:
        stats = InstanceStats(busy_seconds=self.compute.busy_seconds, resident_bytes=resident_bytes())
        for host in self.hosts:
            host.add_stats(stats)
        return stats

    def _advance(self) -> None:
        """A bug costs what is under way here, since nobody knows what it left half done, but neither the model that is
        loaded nor the other processes, which the supervisor would end with this one."""
        try:
            for host in self.hosts:
                host.advance()
        except Exception:
            log.exception("this instance failed; giving up what was under way")
            self._failures.append(time.monotonic())
            if len(self._failures) == MAX_FAILURES and self._failures[-1] - self._failures[0] < FAILURE_WINDOW:
                log.error("it failed %d times within %g s; ending", MAX_FAILURES, FAILURE_WINDOW)
                raise
            self._start_over()

    def _notice_lapse(self) -> None:
        """A loop that stood still (SIGSTOP, a suspended machine) for longer than the lease works for nobody now."""
        still = time.monotonic() - self._last_heartbeat
        if self._registered and still > self._expiry - self._lease.heartbeat:
            log.warning("stood still for %.1f s, as long as the lease; giving up what was under way", still)
            self._start_over()

    def _start_over(self) -> None:
        """Gives up everything, in this order: nothing may be written any more once the frontend tells the others that
        what this instance held is free. It fails the requests, if it hasn't already, before it takes the instance on
        again."""
        for host in self.hosts:
            host.on_lease_lost()
        self._registered = False
        self._change = None  # whoever asked for it is told that this instance has left
        self.send(self.frontend, Deregister(self.channel.address))
        self._register()

    def _change_role(self) -> None:
        """Takes on the role that it was told to, as soon as nothing is under way. It registers anew, and the frontend
        tells the others to let go of what they shared with it, as of any that comes back."""
        if (change := self._change) is None:
            return
        if self.channel.pending or not all(host.idle for host in self.hosts):
            if time.monotonic() > change.deadline:
                self._keep_role(f"it was not done with its work within {change.deadline - change.began:g} s")
            return
        before, began = self.role, time.monotonic()
        try:
            self.become(change.role)
        except (TriptychError, OSError, MemoryError) as error:
            self._keep_role(str(error))
            return
        now = time.monotonic()
        log.info(
            "%s now, was %s; drained in %.3f s, changed in %.3f s", self.role, before, began - change.began, now - began
        )
        self._change = None
        self._registered = False
        self._register()

    def _keep_role(self, reason: str) -> None:
        log.warning("it remains %s: %s", self.role, reason)
        self._change = None
        self.send(self.frontend, RoleKept(self.channel.address, reason))

    def _check_idle(self) -> None:
        try:
            for host in self.hosts:
                host.check_idle()
        except BlockError as error:
            log.error("while idle: %s", error)  # a bug, and worth knowing, but no reason to stop serving

    def _handle(self, message: Message) -> None:
        """One message. One that can't be served must not harm the others: messages come from outside."""
        end = message.by if isinstance(message, Done | Abort) else None
        key = (type(message), end)
        handler = self._handlers.get(key) or self._host_handlers.get(key)
        if handler is None:
            log.warning("%s is not for a %s instance", type(message).__name__, self.role)
            return
        try:
            handler(message)
        except StartError:
            raise
        except TriptychError as error:
            log.error("%s: %s", type(message).__name__, error)
        except Exception:  # whatever a peer sent, the others' requests go on
            log.exception("couldn't handle %s", type(message).__name__)

    def _register(self) -> None:
        self._asked = time.monotonic()
        self._register_deadline = self._asked + self._lease.start_timeout
        self._remind_at = self._asked + REMIND_EVERY
        log.info("joining the frontend at %s", self.frontend.removeprefix("tcp://"))
        context_length = max((host.context_length for host in self.hosts), default=0)
        register = Register(
            name=self.name,
            role=self.role,
            address=self.channel.address,
            layouts=self._layouts,
            pid=os.getpid(),
            context_length=context_length,
            stats=self._stats(),
        )
        self.send(self.frontend, register)

    def _expect_answer(self) -> None:
        """A frontend may be started later. But one that was given another secret never answers, and can't say why."""
        if (now := time.monotonic()) < min(self._register_deadline, self._remind_at):
            return
        self._remind_at = now + REMIND_EVERY
        silence = (
            f"no answer from the frontend at {self.frontend}: is it there, and has it the same --cluster-secret-file?"
        )
        if now >= self._register_deadline:
            raise StartError(silence)
        log.warning("%s", silence)

    def _on_forgotten(self) -> None:
        """The frontend doesn't know this instance (any more): what was under way has no owner. A heartbeat or two may
        be answered so before the new registration is; if it goes on, that one was lost with a frontend that died."""
        if self._registered:
            self._start_over()
        elif time.monotonic() - self._asked > REGISTER_AGAIN * self._lease.heartbeat:
            self._register()

    def _on_welcome(self, message: Registered) -> None:
        self._registered = True
        self._expiry = message.expiry
        log.info("ready")

    def _on_rejected(self, message: RegistrationRefused) -> None:
        if (message.name, message.pid) == (self.name, os.getpid()):  # somebody else may have claimed its address
            raise StartError(f"the frontend refuses this instance: {message.reason}")

    def _on_change_role(self, message: ChangeRole) -> None:
        try:
            if self.composer is None:
                raise StartError("it can't change its role")
            self.composer.check(message.role)
        except StartError as error:
            self._keep_role(str(error))
            return
        now = time.monotonic()
        self._change = _Change(message.role, now, now + message.timeout)
        log.info("to become %s once it is done with its work", message.role)

    def _on_peer_lost(self, message: PeerLost) -> None:
        for host in self.hosts:
            host.peer_lost(message)
        self.channel.disconnect(message.address)
