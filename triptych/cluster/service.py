"""A whole service on one machine: the frontend in this process, an instance in each child process."""

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

from triptych.checkpoint.config_files import load_config
from triptych.cluster.local import LocalCluster, Print, wait_until_ready
from triptych.config import ServeConfig
from triptych.errors import TopologyError
from triptych.heap import gc_frozen
from triptych.models.registry import family_of
from triptych.server.frontend import Frontend
from triptych.topology import Topology


def check_roles(model: Path, topology: Topology) -> None:
    """Raises TopologyError for instances that encode when the model is one of text alone."""
    encoding = [role for role in topology.roles if role.encodes]
    if encoding and not family_of(load_config(model)).takes_media:
        raise TopologyError(
            f"topology {topology} has instances that encode ({encoding[0]}), and {model} is a model of text alone: "
            "try 1PD or 1P1D"
        )


class LocalService:
    """An async context manager: inside, the service starts; ``wait_until_ready`` says when it can be used. Without a
    topology it is a frontend that instances join by themselves."""

    def __init__(self, config: ServeConfig, topology: Topology | None, show: Print) -> None:
        self._config = config
        self._topology = topology
        if topology is not None:
            check_roles(config.model, topology)
        encodes = topology is None or any(role.encodes for role in topology.roles)
        self._frontend = Frontend(config, expects_encoders=encodes)
        self._cluster = LocalCluster(config, topology, self._frontend.control, show) if topology else None
        self._settled = contextlib.ExitStack()
        self.lost: asyncio.Future[str] = (
            self._cluster.lost if self._cluster else asyncio.get_running_loop().create_future()
        )

    @property
    def url(self) -> str:
        return self._frontend.url

    @property
    def control(self) -> str:
        return self._frontend.control

    async def __aenter__(self) -> "LocalService":
        await self._frontend.__aenter__()
        try:
            if self._cluster:
                await self._cluster.start()
        except BaseException as error:  # an interrupt too: no process is left behind
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settled.close()
        if self._cluster:
            await self._cluster.stop()
        await self._frontend.__aexit__(kind, error, trace)

    async def wait_until_ready(self) -> None:
        """Returns once every instance has joined. Raises StartError when one ends before."""
        if self._cluster and self._topology:
            registry, expected = self._frontend.router.registry, len(self._topology.roles)
            await wait_until_ready(self._cluster, lambda: len(registry) >= expected, self._config.lease.start_timeout)
        self._settled.enter_context(gc_frozen())

    async def drain(self, hurry: asyncio.Event) -> None:
        """Lets running requests finish, up to the drain timeout or until ``hurry`` is set."""
        draining, hurried = asyncio.create_task(self._frontend.drain()), asyncio.create_task(hurry.wait())
        first: set[asyncio.Future[Any]] = {draining, hurried, self.lost}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurried):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
