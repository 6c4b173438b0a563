"""Ends a whole service as an operator asks for it, and tells what becomes of its processes."""

import asyncio
import logging
from collections.abc import Callable

from triptych.cluster.changes import PROGRESS_INTERVAL
from triptych.cluster.local import LocalCluster
from triptych.errors import TriptychError
from triptych.messages.codec import Send
from triptych.messages.operations import ChangeEnded, ChangeProgress, ChangeRefused, StopService
from triptych.types import Address

log = logging.getLogger(__name__)


class ServiceStop:
    """The end of one service. It says what is asked; the command that supervises the service carries it out. Used by
    one event loop."""

    def __init__(
        self, cluster: LocalCluster, send: Send, disconnect: Callable[[Address], None], *, refusal: str = ""
    ) -> None:
        """``send`` and ``disconnect`` are as in ``Changes``. ``refusal`` is why the service can't be stopped so; empty
        if it can."""
        self.asked = asyncio.Event()
        """Set once the service is to end."""
        self._cluster = cluster
        self._send = send
        self._disconnect = disconnect
        self._refusal = refusal
        self._operators: list[Address] = []
        self._total = 0
        self._task: asyncio.Task[None] | None = None

    def ask(self, message: StopService) -> None:
        """Ask for the end, or answer the operator why not. Several may ask, and all are told."""
        if self._refusal:
            self._tell([message.reply_to], ChangeRefused(self._refusal))
            self._disconnect(message.reply_to)
            return
        log.info("an operator stops the service")
        self._operators.append(message.reply_to)
        if self._task is None:
            self._total = len(self._cluster.running)
            self._task = asyncio.create_task(self._report())
        self.asked.set()

    async def close(self) -> None:
        """Tell the operators that the service has ended."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if killed := sorted(self._cluster.killed):
            text = f"warning: not ended in time, and killed: {', '.join(killed)}"
            self._tell(self._operators, ChangeProgress(text, self._num_ended, self._total))
        left = self._cluster.running
        self._tell(
            self._operators, ChangeEnded(self._num_ended, self._total, f"not ended: {', '.join(left)}" if left else "")
        )
        for operator in self._operators:
            self._disconnect(operator)

    async def _report(self) -> None:
        while True:
            text = f"waiting for {', '.join(self._cluster.running)}"
            self._tell(self._operators, ChangeProgress(text, self._num_ended, self._total))
            await asyncio.sleep(PROGRESS_INTERVAL / 2)

    @property
    def _num_ended(self) -> int:
        return max(0, self._total - len(self._cluster.running))

    def _tell(self, operators: list[Address], answer: ChangeRefused | ChangeProgress | ChangeEnded) -> None:
        for operator in operators:
            try:
                self._send(operator, answer)
            except TriptychError as error:
                log.debug("couldn't answer an operator: %s", error)
