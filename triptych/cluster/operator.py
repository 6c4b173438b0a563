"""What operators ask a running service, over the socket that its instances join at: who may do that may do anything
(docs/decisions/0010-trust.md), and who reaches the HTTP port alone may not."""

import time
from types import TracebackType
from typing import Any

from triptych.config import ClusterConfig
from triptych.errors import BadAddress, StartError
from triptych.messages.channel import Channel, endpoint
from triptych.messages.codec import Message
from triptych.messages.work import GetStatus, RoleRefused, RoleSet, SetRole, Status
from triptych.topology import Role

ANSWERS_WITHIN = 5.0
"""Seconds within which a frontend that is there says something."""


class Operator:
    """A connection to the frontend whose control address is ``control`` (HOST:PORT). A context manager."""

    def __init__(self, control: str, cluster: ClusterConfig) -> None:
        """Raises StartError when this process can't listen for answers."""
        host, _, port = control.rpartition(":")
        self._control = control
        try:
            self._frontend = endpoint(host.strip("[]"), port)
            self._channel = Channel(cluster.cluster_host, secret=cluster.secret())
        except BadAddress as error:
            raise StartError(str(error)) from None

    def __enter__(self) -> "Operator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close(linger=0)

    def status(self) -> Status:
        """Who is there, and what they have in hand. Raises StartError when nobody answers."""
        status: Status = self._ask(GetStatus(self._channel.address), (Status,), ANSWERS_WITHIN)
        return status

    def set_role(self, instance: str, role: Role, timeout: float, *, force: bool = False) -> None:
        """Returns once the instance of that name has the role; it gets ``timeout`` seconds to finish what it works on.
        ``force`` as in ``SetRole``. Raises StartError, with the reason, when it keeps the one that it has."""
        asked = SetRole(self._channel.address, instance, role, timeout, force)
        answer: RoleSet | RoleRefused = self._ask(asked, (RoleSet, RoleRefused), timeout + ANSWERS_WITHIN)
        if isinstance(answer, RoleRefused):
            raise StartError(f"{instance} does not become {role}: {answer.reason}")

    def _ask(self, question: Message, answers: tuple[type[Any], ...], timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        self._channel.send(self._frontend, question)
        while (left := deadline - time.monotonic()) > 0:
            for message in self._channel.receive(left):
                if isinstance(message, answers):
                    return message
        raise StartError(
            f"no answer from the frontend at {self._control}: is it there, and has it the same --cluster-secret-file?"
        )
