"""Role changes of running instances, requested by operators or by a policy: checked, sent, and answered once they are
done."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from triptych.messages.codec import Message
from triptych.messages.operations import RoleRefused, RoleSet, SetRole
from triptych.messages.work import ChangeRole, ChangingRole, Register, RoleKept
from triptych.router.instance import Instance
from triptych.router.membership import Membership
from triptych.topology import Role
from triptych.types import Address

log = logging.getLogger(__name__)

Answer = Callable[[RoleSet | RoleRefused], object]
"""Takes the answer to a request for a change."""


def role_change_impact(others: Sequence[Role], current: Role, target: Role) -> str:
    """Return why the service would lack a stage while or after the instance changes its role; empty if it wouldn't. A
    draining instance has neither role."""
    before = _missing_stages([*others, current])
    missing = [stage for stage in _missing_stages(others) if stage not in before]
    if missing:
        return f"no other instance {' or '.join(missing)}, so requests would be rejected until it has changed"
    unpaired = _unpaired_roles([*others, current])
    return next((reason for reason in _unpaired_roles([*others, target]) if reason not in unpaired), "")


def _missing_stages(roles: Iterable[Role]) -> list[str]:
    """Return the stages that none of these roles runs, as verbs."""
    roles = list(roles)
    prefills = any(role.prefills and role.decodes for role in roles) or any(role.sends_kv for role in roles)
    done = {
        "encodes": any(role.encodes for role in roles),
        "prefills": prefills,
        "decodes": any(role.decodes for role in roles),
    }
    return [verb for verb, is_done in done.items() if not is_done]


def _unpaired_roles(roles: Iterable[Role]) -> list[str]:
    """Return why some of these roles would have no work, one sentence for each."""
    roles = list(roles)
    sends, takes = any(role.sends_kv for role in roles), any(role.takes_kv for role in roles)
    unpaired = []
    if takes and not sends:
        unpaired.append("afterwards no instance would prefill for instances that only decode")
    if sends and not takes:
        unpaired.append("afterwards instances that only prefill would have no instance to prefill for")
    return unpaired


class RoleChanges:
    """Role changes in progress, each with an operator or a policy waiting for the answer."""

    def __init__(
        self,
        membership: Membership,
        *,
        address: Address,
        send: Callable[[Address, Message], None],
        reply: Callable[[Address, Message], None],
    ) -> None:
        """``address`` is this frontend's. ``send`` is for instances, ``reply`` for operators."""
        self._membership = membership
        self._address = address
        self._send = send
        self._reply = reply
        self._pending: dict[Address, tuple[SetRole, Answer]] = {}

    def request_change(self, message: SetRole, answer: Answer | None = None) -> None:
        """Send an instance its new role, or answer with the reason why not. Without an ``answer``, the operator that
        sent the message gets it."""
        answer = answer or partial(self._reply, message.reply_to)
        named = self._membership.named(message.instance)
        if reason := self._refusal(message, named):
            self._refuse(message, answer, reason)
            return
        (instance,) = named
        if instance.role is message.role:
            answer(RoleSet(instance.name, instance.role))
            return
        log.info("%s is changing its role to %s", instance.name, message.role)
        self._membership.set_next_role(instance, message.role)
        self._pending[instance.address] = message, answer
        self._send(instance.address, ChangeRole(message.role, message.timeout, self._address))

    def registered(self, message: Register) -> None:
        """An instance has registered again, perhaps with the role that was requested."""
        pending = self._pending.get(message.address)
        if pending is None:
            return
        asked, answer = pending
        if (asked.instance, asked.role) == (message.name, message.role):
            del self._pending[message.address]
            answer(RoleSet(asked.instance, asked.role))

    def changing(self, message: ChangingRole) -> None:
        """An instance is changing its role, because this or another frontend has asked for it."""
        if instance := self._membership.get(message.address):
            self._membership.set_next_role(instance, message.role)

    def kept(self, message: RoleKept) -> None:
        """An instance keeps its role."""
        if instance := self._membership.get(message.address):
            self._membership.set_next_role(instance, None)
        if pending := self._pending.pop(message.address, None):
            self._refuse(*pending, message.reason)

    def lost(self, instance: Instance, why: str) -> None:
        """An instance is gone."""
        if pending := self._pending.pop(instance.address, None):
            self._refuse(*pending, f"it {why}")

    def _refusal(self, message: SetRole, named: list[Instance]) -> str:
        if len(named) != 1:
            return f"{len(named) or 'no'} instance{'s' * (len(named) > 1)} of that name"
        (instance,) = named
        if instance.next_role is not None:
            return f"it is already changing to {instance.next_role}"
        if instance.role is message.role or message.force:
            return ""
        others = [other.role for other in self._membership if other is not instance and other.next_role is None]
        impact = role_change_impact(others, instance.role, message.role)
        return f"{impact}; use --force to change it anyway" if impact else ""

    def _refuse(self, message: SetRole, answer: Answer, reason: str) -> None:
        log.info("%s keeps its role instead of %s: %s", message.instance, message.role, reason)
        answer(RoleRefused(message.instance, message.role, reason))
