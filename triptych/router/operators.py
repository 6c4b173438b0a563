"""Handles the messages of operators: questions and orders, each of which is answered once."""

from collections.abc import Callable
from typing import Any

from triptych.clock import Clock
from triptych.gateway.servers import Servers
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import (
    ChangeRefused,
    GetStatus,
    RoleRefused,
    SetRole,
    StartChange,
    StartRollout,
    StartScale,
    Status,
    StopService,
)
from triptych.router.availability import Availability
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.membership import Membership
from triptych.router.role_changes import RoleChanges
from triptych.types import Address


class OperatorMessages:
    """Handles what operators send."""

    def __init__(
        self,
        *,
        membership: Membership,
        lifecycle: RequestLifecycle,
        availability: Availability,
        role_changes: RoleChanges,
        identity: ModelIdentity,
        servers: Servers | None = None,
        notify: Callable[[Address, Message], None],
        reply: Callable[[Address, Message], None],
        clock: Clock,
    ) -> None:
        """``notify`` is for supervisors. ``reply`` answers an operator, who sends no further messages."""
        self._membership = membership
        self._launched = membership.launched
        self._lifecycle = lifecycle
        self._availability = availability
        self._role_changes = role_changes
        self._identity = identity
        self._servers = servers
        self._notify = notify
        self._reply = reply
        self._clock = clock

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return what handles each type of message."""
        return {
            SetRole: self._on_set_role,
            GetStatus: self._on_get_status,
            StartRollout: self._on_start_change,
            StartScale: self._on_start_change,
            StopService: self._on_start_change,
        }

    def _on_get_status(self, message: GetStatus) -> None:
        now = self._clock.now()
        status = Status(
            self._availability.can_serve and not self._lifecycle.draining,
            self._lifecycle.draining,
            len(self._lifecycle.requests),
            [instance.status(now) for instance in self._membership],
            self._identity,
            self._launched.processes(now),
            self._launched.change(now),
            self._launched.spares(now),
            [one.status() for one in self._servers or ()],
        )
        self._reply(message.reply_to, status)

    def _on_set_role(self, message: SetRole) -> None:
        if self._lifecycle.draining:
            self._reply(message.reply_to, RoleRefused(message.instance, message.role, "the service is shutting down"))
        else:
            self._role_changes.request_change(message)

    def _on_start_change(self, message: StartChange | StopService) -> None:
        """Pass it on to the supervisor, which answers the operator itself: this frontend may be replaced, too."""
        launchers = self._launched.launchers(self._clock.now())
        if self._lifecycle.draining and not isinstance(message, StopService):
            self._reply(message.reply_to, ChangeRefused("the service is shutting down"))
        elif len(launchers) != 1:
            reason = "one supervisor is needed, of what it has started with triptych serve"
            self._reply(message.reply_to, ChangeRefused(f"{reason}; {len(launchers)} report to this frontend"))
        elif isinstance(message, StartScale) and (others := self._in_other_roles()):
            self._reply(message.reply_to, ChangeRefused(f"{others}: set the role back first"))
        else:
            self._notify(launchers[0], message)

    def _in_other_roles(self) -> str:
        """Return which instances have another role than they were started in; empty if none has."""
        started = {one.name: one.role for one in self._launched.processes(self._clock.now())}
        return ", ".join(
            f"{instance.name} has been changed to {instance.next_role or instance.role}"
            for instance in self._membership
            if started.get(instance.name) not in (None, instance.next_role or instance.role)
        )
