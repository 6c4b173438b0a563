"""Client of a running service's control socket, for operators. Every process that can connect to this socket is fully
trusted (docs/decisions/0010-trust.md); clients of the HTTP port are not."""

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from triptych.clock import SystemClock
from triptych.config import ClusterConfig, split_addresses
from triptych.errors import BadAddress, ConfigError, FrontendSilent, StartError
from triptych.messages.channel import Channel, endpoint_of
from triptych.messages.codec import Message
from triptych.messages.operations import (
    ChangeEnded,
    ChangeProgress,
    ChangeRefused,
    GetStatus,
    RoleRefused,
    RoleSet,
    SetRole,
    StartChange,
    StartRollout,
    StartScale,
    Status,
    StopService,
)
from triptych.topology import Role
from triptych.types import Address

ANSWER_TIMEOUT = 5.0
"""Seconds within which a running frontend answers."""
SEARCH_TIMEOUT = 2.0
"""The same while several are tried in turn."""
CONNECT_TIMEOUT = 1.0
"""Seconds to see whether a process listens at an address."""
SUPERVISOR_TIMEOUT = 15.0
"""Seconds without news of a change after which its supervisor counts as gone; it sends some every second."""


class ControlClient:
    """A connection to the frontend whose control address is ``control`` (HOST:PORT). Of several, separated by commas,
    the first that answers is asked. A context manager."""

    def __init__(self, control: str, cluster: ClusterConfig) -> None:
        """Raise StartError when this process can't listen for answers."""
        self._control, self._clock = control, SystemClock()
        self._received: deque[Message] = deque()
        try:
            self._frontends = [endpoint_of(one) for one in split_addresses(control)]
            self._channel = Channel(self._clock, cluster.cluster_host, secret=cluster.secret())
        except BadAddress as error:
            raise StartError(str(error)) from None

    def __enter__(self) -> "ControlClient":
        if len(self._frontends) > 1:
            try:
                self._frontends = [self._first_that_answers()]
            except StartError:
                self._channel.close(linger=0)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close(linger=0)

    def status(self) -> Status:
        """Return the instances and their load. Raises FrontendSilent when the frontend doesn't answer."""
        status: Status = self._ask(GetStatus(self._channel.address), (Status,), ANSWER_TIMEOUT)
        return status

    def set_role(self, instance: str, role: Role, timeout: float, *, force: bool = False) -> None:
        """Return once the instance of that name has the role; it gets ``timeout`` seconds to finish its work. ``force``
        as in ``SetRole``. Raises StartError, with the reason, when it keeps its role, and FrontendSilent without an
        answer."""
        question = SetRole(self._channel.address, instance, role, timeout, force)
        answer: RoleSet | RoleRefused = self._ask(question, (RoleSet, RoleRefused), timeout + ANSWER_TIMEOUT)
        if isinstance(answer, RoleRefused):
            raise StartError(f"{instance} does not change its role to {role}: {answer.reason}")

    def rollout(self, settings: Mapping[str, str], *, surge: bool, model: str = "") -> Iterator[ChangeProgress]:
        """Yield what a rollout does, until all processes were replaced. The arguments are as in ``StartRollout``.
        Raises ConfigError when it is refused, StartError when it ends early, and FrontendSilent without an answer."""
        yield from self._change(StartRollout(self._channel.address, dict(settings), surge, model))

    def scale(self, counts: Mapping[Role, int]) -> Iterator[ChangeProgress]:
        """Yield what a change of the number of instances does, until there are as many of each role as ``counts``
        says. Raises as ``rollout`` does."""
        yield from self._change(StartScale(self._channel.address, dict(counts)))

    def stop(self) -> Iterator[ChangeProgress]:
        """Yield what the end of the service does, until no process of it is left. Raises as ``rollout`` does."""
        yield from self._change(StopService(self._channel.address))

    def _change(self, question: StartChange | StopService) -> Iterator[ChangeProgress]:
        news = (ChangeProgress, ChangeEnded, ChangeRefused)
        answer = self._ask(question, news, ANSWER_TIMEOUT)
        while isinstance(answer, ChangeProgress):
            yield answer
            answer = self._wait_for(
                news, SUPERVISOR_TIMEOUT, f"no news from the supervisor; the {question.kind} may go on"
            )
        if isinstance(answer, ChangeRefused):
            raise ConfigError(f"the {question.kind} is refused: {answer.reason}")
        if answer.reason:
            raise StartError(f"{answer.done} of {answer.total} {question.outcome}: {answer.reason}")

    def _ask(self, question: Message, answers: tuple[type[Any], ...], timeout: float) -> Any:
        self._channel.send(self._frontends[0], question)
        try:
            return self._wait_for(answers, timeout, f"no answer from the frontend at {self._control}")
        except FrontendSilent as error:
            why = "has it the same --cluster-secret-file?" if self._listens() else "no process listens there"
            raise FrontendSilent(f"{error}: {why}") from None

    def _listens(self) -> bool:
        """Return whether a process listens at the frontend's address."""
        host, _, port = self._frontends[0].removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
        except OSError:
            return False
        return True

    def _first_that_answers(self) -> Address:
        for frontend in self._frontends:
            self._channel.send(frontend, GetStatus(self._channel.address))
            with contextlib.suppress(FrontendSilent):
                self._wait_for((Status,), SEARCH_TIMEOUT, "")
                return frontend
        raise FrontendSilent(f"no answer from any frontend at {self._control}")

    def _wait_for(self, answers: tuple[type[Any], ...], timeout: float, silence: str) -> Any:
        """Return the next message of these kinds. Raises FrontendSilent with ``silence`` when none comes in time."""
        deadline = self._clock.now() + timeout
        while True:
            while self._received:
                if isinstance(message := self._received.popleft(), answers):
                    return message
            if (left := deadline - self._clock.now()) <= 0:
                raise FrontendSilent(silence)
            self._received.extend(self._channel.receive(left))
