"""Which actors of a service have an instance, wait for the next one, or are kept free. No Ray, no socket."""

import logging
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from triptych.clock import Clock
from triptych.cluster.on_ray.messages import (
    Checking,
    FromSupervisor,
    Gone,
    Host,
    News,
    Release,
    Reserve,
    Reserved,
    Unfit,
    Waiting,
    shown,
)
from triptych.cluster.supervision import JITTER, MAX_DELAY
from triptych.messages.operations import SparePlace

log = logging.getLogger(__name__)

KEPT_SECONDS = MAX_DELAY * (1 + JITTER) + 5.0
"""Seconds for which an actor whose instance has ended by itself is kept for the next one of that name: more than the
longest delay before a restart."""
RETRY_SECONDS = 10.0
"""Seconds after the loss of an actor without an instance in which none is asked for, and after the end of an instance
whose place isn't kept in which its node is avoided: the node may be lost, or not be able to run one."""
UNFIT_SECONDS = 60.0
"""Seconds after a node was found where no instance can run in which no spare is asked for: Ray may choose it again."""
MAX_SPARE_PLACES = 100
"""Spare places that are shown: reports of them are sent twice a second."""


class Hosted(Protocol):
    """An instance that an actor has."""

    name: str
    node: str
    """Address of its node; empty while it waits for a place."""
    pending: str
    """What it waits for; empty while it waits for nothing, or not for long."""

    def ask_again(self) -> None:
        """Ask another process that is connected to Ray for it."""


@dataclass(eq=False)
class RayHost:
    """An actor with a place for an instance, or that waits for one."""

    host: Host
    model: str = ""
    """Folder of the model that its example has."""
    process: Hosted | None = None
    """The instance that it has."""
    node: str = ""
    """Address of its node, if it has no instance."""
    former: str = ""
    """Name of the instance that it had last."""
    kept_until: float = 0.0
    """Until when it is kept for the next instance of that name."""
    is_current: bool = True
    """Whether it has the code that new instances must have."""
    pending: str = ""
    """What it waits for, if it has no instance; empty while it waits for nothing, or not for long."""


class RayHosts:
    """The actors of one service."""

    def __init__(self, spares: int, send: Callable[[FromSupervisor], None], clock: Clock) -> None:
        """``spares`` are to be free for each set of resources that instances ask for. ``send`` reaches Ray."""
        self.spares = spares
        """May be changed."""
        self._send = send
        self._clock = clock
        self._hosts: dict[str, RayHost] = {}
        """By the actor's name."""
        self._needed: dict[frozenset[tuple[str, float]], float] = {}
        """Until when spares are kept, by their resources: also while their only instance is started again."""
        self._next_spare = 0.0
        """When one may be asked for."""
        self._doubted: dict[str, float] = {}
        """Until when a node is the last to be chosen: it may be lost. By its address."""

    def __iter__(self) -> Iterator[RayHost]:
        return iter(self._hosts.values())

    def choose(self, name: str, new: RayHost) -> RayHost:
        """Return the actor for an instance: the one where it was, or else a free one with the resources of ``new``,
        best with a place, or else ``new``. One that is kept for another instance, or on a node that may be lost, is
        only taken for want of a better one."""
        now = self._clock.monotonic()

        def rank(one: RayHost) -> tuple[bool, ...]:
            is_doubted = self._doubted.get(one.node, 0.0) > now
            return (
                one.former == name,
                one.kept_until <= now,
                not is_doubted,
                bool(one.node),
            )

        chosen = max((one for one in self._idle(new.host) if one.is_current), key=rank, default=new)
        # it imports what this one needs, and so do spares that are like it
        chosen.model = new.model
        chosen.host = msgspec.structs.replace(chosen.host, example=new.host.example)
        return chosen

    def begin(self, host: RayHost, process: Hosted) -> None:
        """Record that an actor, which may be new, has an instance."""
        self._hosts[host.host.name] = host
        host.process = process

    def end(self, name: str, *, keep: bool) -> None:
        """An actor's instance has ended. Keep the actor for the next one, or end it, so that its resources are free."""
        host = self._hosts[name]
        process, host.process = host.process, None
        if process is not None and keep and host.is_current:
            host.node, host.former, host.kept_until = process.node, process.name, self._clock.monotonic() + KEPT_SECONDS
            self._send(Reserve(host.host, host.node))
        else:
            if process is not None and process.node:
                self._doubted[process.node] = self._clock.monotonic() + RETRY_SECONDS
            self._release(host)

    def renew(self) -> None:
        """Let the actors that exist have no further instance: they have imported former code."""
        for host in self:
            host.is_current, host.kept_until = False, 0.0
        self.balance()

    def ask_again(self, existing: Collection[str]) -> None:
        """Ask another process that is connected to Ray for all actors and instances. End the others of the actors that
        exist, given by name: no process may have been connected when they were released."""
        for name in set(existing) - set(self._hosts):
            self._send(Release(name))
        for host in self:
            if host.process is None:
                host.pending = ""  # what it waits for is said again
                self._send(Reserve(host.host, host.node))
            else:
                host.process.ask_again()

    def balance(self) -> None:
        """Ask for actors that wait for instances, and end those that are too many, or have former code. Called whenever
        anything may have changed."""
        now, running = self._clock.monotonic(), [one for one in self if one.process is not None]
        placeless = [one.process for one in running if one.process and not one.process.node]
        pending = next((one.name for one in placeless if one.pending), "")
        # a rollout that is given up leaves instances of former code
        examples = sorted(running, key=lambda one: one.is_current, reverse=True)
        self._needed |= {_key_of(one.host): now + KEPT_SECONDS for one in examples}
        models = {one.model for one in running}  # two during a rollout, and none while the only instance comes back
        for host in [one for one in self if one.process is None and one.kept_until <= now]:
            is_like_one = host.is_current and (host.model in models or not models)
            is_needed = is_like_one and self._needed.get(_key_of(host.host), 0.0) > now
            if pending and is_needed:
                log.warning("a spare place is given up: instance %s has no place", pending)
            if pending or not is_needed or self._free(host.host) > self.spares:
                self._release(host)
        if now >= self._next_spare and not placeless:  # or it would take a place that an instance needs
            for example in examples:
                while self._free(example.host) < self.spares:
                    spare = msgspec.structs.replace(example.host, name=f"spare-{secrets.token_hex(4)}")
                    self._hosts[spare.name] = RayHost(spare, example.model)
                    self._send(Reserve(spare))

    def take(self, message: Waiting | Checking | Reserved | Unfit | Gone | News) -> None:
        """Take what is said of an actor, or of an instance that has ended."""
        host = self._hosts.get(message.key)
        if host is None or host.process is not None:  # it was released, or has got an instance
            return
        match message:
            case Waiting(why=why):
                if not host.pending:
                    log.warning("a spare place isn't free yet: %s", why)
                host.pending = why
            case Checking(node=node):
                host.pending = f"{node} is checked for the version and the model"
            case Reserved(node=node):
                if not host.node:
                    log.info("a spare place waits on %s", node)
                host.node, host.pending = node, ""
            case Unfit(node=node, why=why):
                log.warning("a spare place on %s is not kept: %s", node, why)
                self._release(host)
                self._next_spare = self._clock.monotonic() + UNFIT_SECONDS
            case Gone(why=why):
                log.warning("a spare place is lost: %s", why)
                del self._hosts[message.key]
                self._next_spare = self._clock.monotonic() + RETRY_SECONDS

    def spare_places(self) -> list[SparePlace]:
        """Return the actors that wait for any instance, at most ``MAX_SPARE_PLACES``."""
        now = self._clock.monotonic()
        idle = [one for one in self if one.process is None and one.is_current and one.kept_until <= now]
        return [SparePlace(shown(one.host.resources), one.node, one.pending) for one in idle[:MAX_SPARE_PLACES]]

    def _idle(self, like: Host) -> list[RayHost]:
        return [one for one in self if one.process is None and one.host.resources == like.resources]

    def _free(self, like: Host) -> int:
        """Return the number of actors that wait for any instance."""
        return sum(one.kept_until <= self._clock.monotonic() for one in self._idle(like))

    def _release(self, host: RayHost) -> None:
        del self._hosts[host.host.name]
        self._send(Release(host.host.name))


def _key_of(host: Host) -> frozenset[tuple[str, float]]:
    return frozenset(host.resources.items())
