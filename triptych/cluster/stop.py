"""Ends a whole service as an operator asks for it, and tells what becomes of its processes."""

import asyncio
import logging

from triptych.cluster.answers import Answers
from triptych.cluster.changes import PROGRESS_INTERVAL
from triptych.cluster.supervisor import Supervisor
from triptych.messages.operations import ChangeEnded, ChangeProgress, ChangeRefused, StopService
from triptych.types import Address

log = logging.getLogger(__name__)


class ServiceStop:
    """The end of one service. It says what is asked; the command that supervises the service carries it out. Used by
    one event loop."""

    def __init__(self, supervisor: Supervisor, answer: Answers, *, refusal: str = "") -> None:
        """``refusal`` is why the service can't be stopped so; empty if it can."""
        self.asked = asyncio.Event()
        """Set once the service is to end."""
        self._supervisor = supervisor
        self._answer = answer
        self._refusal = refusal
        self._operators: list[Address] = []
        self._total = 0
        self._task: asyncio.Task[None] | None = None

    def ask(self, message: StopService) -> None:
        """Ask for the end, or answer the operator why not. Several may ask, and all are told."""
        if self._refusal:
            self._answer(message.reply_to, ChangeRefused(self._refusal))
            return
        log.info("an operator stops the service")
        self._operators.append(message.reply_to)
        if self._task is None:
            self._total = len(self._supervisor.running)
            self._task = asyncio.create_task(self._report())
        self.asked.set()

    async def close(self) -> None:
        """Tell the operators that the service has ended."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if killed := sorted(self._supervisor.killed):
            text = f"warning: not ended in time, and killed: {', '.join(killed)}"
            self._tell_all(ChangeProgress(text, self._num_ended, self._total))
        left = self._supervisor.running
        self._tell_all(ChangeEnded(self._num_ended, self._total, f"not ended: {', '.join(left)}" if left else ""))

    async def _report(self) -> None:
        while True:
            text = f"waiting for {', '.join(self._supervisor.running)}"
            self._tell_all(ChangeProgress(text, self._num_ended, self._total))
            await asyncio.sleep(PROGRESS_INTERVAL / 2)

    @property
    def _num_ended(self) -> int:
        return max(0, self._total - len(self._supervisor.running))

    def _tell_all(self, answer: ChangeProgress | ChangeEnded) -> None:
        for operator in self._operators:
            self._answer(operator, answer)
