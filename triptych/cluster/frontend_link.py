"""The supervisor's connection to its frontends: tells them what comes back, and hears from them who has joined."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from triptych.cluster.answers import Answers
from triptych.cluster.changes import Changes, Plan
from triptych.cluster.stop import ServiceStop
from triptych.cluster.supervisor import Supervisor
from triptych.config import ClusterConfig
from triptych.errors import BadAddress, StartError, TriptychError
from triptych.messages.channel import Channel, endpoint_of
from triptych.messages.operations import LauncherReport, LauncherStatus, StartChange, StopService
from triptych.types import Address

log = logging.getLogger(__name__)

REPORT_INTERVAL = 0.5
"""Seconds between two reports."""
FIRST_INTERVAL = 0.05
"""The same before the service was first ready, so that the start isn't longer than it has to be."""

MAX_TEXT = 1000
"""Characters of what reports say of changes; they may name many processes."""


class FrontendLink:
    """Exchanges reports with the frontends, on the running event loop."""

    def __init__(
        self,
        supervisor: Supervisor,
        controls: Sequence[str],
        config: ClusterConfig,
        plan: Callable[[StartChange], Awaitable[Plan]],
        no_stop: str = "",
    ) -> None:
        """``controls`` are the frontends' control addresses (HOST:PORT), ``plan`` is as in ``Changes``, and ``no_stop``
        is the refusal of ``ServiceStop``. Raises StartError when this process can't listen for answers."""
        self.stopping = False
        """Whether the frontends are told that the service ends."""
        self._supervisor = supervisor
        self._frontends: dict[Address, bool] = {}
        """Where each frontend listens, and whether it is on standby."""
        self._replaced: dict[Address, Callable[[], bool]] = {}
        """Those that others have replaced, and whether they still run."""
        for control in controls:
            self.add(control)
        try:
            self._channel = Channel(supervisor.clock, config.cluster_host, secret=config.secret())
        except BadAddress as error:
            raise StartError(str(error)) from None
        answer = Answers(self._channel.send, self._channel.disconnect)
        self._changes = Changes(supervisor, plan, answer)
        self.stop = ServiceStop(supervisor, answer, refusal=no_stop)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._take_messages)
        self._task = asyncio.create_task(self._report_regularly())

    def add(self, control: str, *, standby: bool = False) -> None:
        """Exchange reports with the frontend there, too; one on standby accepts no connections. Raises StartError for
        an address that can't be resolved."""
        try:
            where = endpoint_of(control)
        except BadAddress as error:
            raise StartError(str(error)) from None
        self._frontends[where] = standby
        self._replaced.pop(where, None)

    def replaced(self, control: str, runs: Callable[[], bool]) -> None:
        """Tell all that another one replaces the frontend there, as long as it runs."""
        self._replaced[endpoint_of(control)] = runs

    def remove(self, control: str) -> None:
        """Exchange no more reports with the frontend there."""
        where = endpoint_of(control)
        self._frontends.pop(where, None)
        self._replaced.pop(where, None)
        self._channel.disconnect(where)

    def report(self) -> None:
        """Tell every frontend about all processes."""
        launched, spares = self._supervisor.launched(), self._supervisor.spares
        text = self._changes.text[:MAX_TEXT]
        finishing = [where for where, runs in self._replaced.items() if runs()]
        for frontend, standby in self._frontends.items():
            report = LauncherReport(self._channel.address, launched, self.stopping, text, standby, spares, finishing)
            try:
                self._channel.send(frontend, report)
            except TriptychError as error:
                log.warning("couldn't report to the frontend: %s", error)

    async def end_change(self) -> None:
        """End the change in progress, if there is one."""
        await self._changes.close()

    async def close(self) -> None:
        """Stop reporting, and close the connections."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.stop.close()
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close(linger=0)

    async def _report_regularly(self) -> None:
        while True:
            self._take_messages()  # the descriptor doesn't signal what a send has taken in
            self.report()
            self._supervisor.changed.clear()
            interval = REPORT_INTERVAL if self._supervisor.supervision.was_complete else FIRST_INTERVAL
            try:
                async with asyncio.timeout(interval):
                    await self._supervisor.changed.wait()
            except TimeoutError:
                continue

    def _take_messages(self) -> None:
        while True:
            for message in self._channel.drain():
                if isinstance(message, LauncherStatus):
                    self._supervisor.set_joined(message.pid, message.joined)
                elif isinstance(message, StartChange):
                    self._changes.start(message)
                elif isinstance(message, StopService):
                    self.stop.ask(message)
            if not self._channel.pending:
                return
