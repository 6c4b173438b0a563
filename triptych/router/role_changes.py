"""Instances that change their role while they run: who may, who is about to, and who wants to know."""

import logging
from collections.abc import Callable, Iterable, Sequence

from triptych.messages.codec import Message
from triptych.messages.work import ChangeRole, Register, RoleKept, RoleRefused, RoleSet, SetRole
from triptych.router.registry import InstanceLease, Registry
from triptych.topology import Role
from triptych.types import Address

log = logging.getLogger(__name__)


def harm(others: Sequence[Role], now: Role, then: Role) -> str:
    """What a service of an instance and these others loses when the instance's role changes; empty for nothing. It has
    neither role for as long as it drains."""
    lacks = [lack for lack in _lacking(others) if lack not in _lacking([*others, now])]
    if lacks:
        return f"nobody else {' or '.join(lacks)}, so requests would be refused until it has changed"
    return next((lost for lost in _left_alone([*others, then]) if lost not in _left_alone([*others, now])), "")


def _lacking(roles: Iterable[Role]) -> list[str]:
    """What nobody does for a request from outside."""
    roles = list(roles)
    prefills = any(role.prefills and role.decodes for role in roles) or any(role.sends_kv for role in roles)
    done = {
        "encodes": any(role.encodes for role in roles),
        "prefills": prefills,
        "decodes": any(role.decodes for role in roles),
    }
    return [verb for verb, somebody in done.items() if not somebody]


def _left_alone(roles: Iterable[Role]) -> list[str]:
    """Those that would have nothing to do."""
    roles = list(roles)
    sends, takes = any(role.sends_kv for role in roles), any(role.takes_kv for role in roles)
    alone = []
    if takes and not sends:
        alone.append("afterwards nobody would prefill for instances that only decode")
    if sends and not takes:
        alone.append("afterwards instances that only prefill would have nobody to prefill for")
    return alone


class RoleChanges:
    """The changes under way, each of which an operator waits for."""

    def __init__(
        self,
        registry: Registry,
        *,
        tell: Callable[[Address, Message], None],
        answer: Callable[[Address, Message], None],
    ) -> None:
        """``tell`` is for instances, ``answer`` for operators."""
        self._registry = registry
        self._tell = tell
        self._answer = answer
        self._asked: dict[Address, SetRole] = {}

    def ask(self, message: SetRole) -> None:
        """Tells an instance to change, or its operator why not."""
        named = self._registry.named(message.instance)
        if reason := self._refusal(message, named):
            self._refuse(message, reason)
            return
        (lease,) = named
        if lease.role is message.role:
            self._answer(message.reply_to, RoleSet(lease.name, lease.role))
            return
        log.info("%s is to become %s", lease.name, message.role)
        lease.next_role = message.role
        self._asked[lease.address] = message
        self._tell(lease.address, ChangeRole(message.role, message.timeout))

    def registered(self, message: Register) -> None:
        """An instance that was there in another role is there in this one."""
        asked = self._asked.get(message.address)
        if asked is not None and (asked.instance, asked.role) == (message.name, message.role):
            del self._asked[message.address]
            self._answer(asked.reply_to, RoleSet(asked.instance, asked.role))

    def kept(self, message: RoleKept) -> None:
        """An instance goes on as it is."""
        if lease := self._registry.get(message.address):
            lease.next_role = None
        if asked := self._asked.pop(message.address, None):
            self._refuse(asked, message.reason)

    def lost(self, lease: InstanceLease, why: str) -> None:
        """An instance is gone, whatever it was about to become."""
        if asked := self._asked.pop(lease.address, None):
            self._refuse(asked, f"it {why}")

    def _refusal(self, message: SetRole, named: list[InstanceLease]) -> str:
        if len(named) != 1:
            return f"{len(named) or 'no'} instance{'s' * (len(named) > 1)} of that name"
        (lease,) = named
        if lease.next_role is not None:
            return f"it is about to become {lease.next_role} already"
        if lease.role is message.role or message.force:
            return ""
        others = [other.role for other in self._registry if other is not lease and other.next_role is None]
        found = harm(others, lease.role, message.role)
        return f"{found}; force it if that is meant" if found else ""

    def _refuse(self, message: SetRole, reason: str) -> None:
        log.info("%s does not become %s: %s", message.instance, message.role, reason)
        self._answer(message.reply_to, RoleRefused(message.instance, message.role, reason))
