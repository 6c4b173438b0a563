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
from triptych.server.worker_extra import check_installed
from triptych.topology import Topology


def check_roles(model: Path, topology: Topology) -> None:
    """Raise TopologyError for a topology with instances that encode and a text-only model."""
    encoding = [role for role in topology.roles if role.encodes]
    if encoding and not family_of(load_config(model)).takes_media:
        raise TopologyError(
            f"topology {topology} has instances that encode ({encoding[0]}), and {model} is a text-only model: "
            "try 1PD or 1P1D"
        )


class LocalService:
    """A service that starts when this async context manager is entered and can be used after ``wait_until_ready``.
    Without a topology it is a frontend alone, which instances join by themselves."""

    def __init__(self, config: ServeConfig, topology: Topology | None, show: Print) -> None:
        self._config = config
        self._topology = topology
        if topology is not None:
            check_installed("an instance")
            check_roles(config.model, topology)
        encodes = topology is None or any(role.encodes for role in topology.roles)
        self._frontend = Frontend(config, expects_encoders=encodes)
        specs = config.instances(topology, self._frontend.control) if topology else []
        self._cluster = LocalCluster(specs, show) if topology else None
        self._frozen = contextlib.ExitStack()
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
        self._frozen.close()
        if self._cluster:
            await self._cluster.stop()
        await self._frontend.__aexit__(kind, error, trace)

    async def wait_until_ready(self) -> None:
        """Return once every instance has joined. Raises StartError when one ends before."""
        if self._cluster and self._topology:
            registry, expected = self._frontend.router.membership, len(self._topology.roles)
            await wait_until_ready(self._cluster, lambda: len(registry) >= expected, self._config.lease.start_timeout)
        self._frozen.enter_context(gc_frozen())

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let running requests finish, until the drain timeout or until ``hurry`` is set."""
        draining, hurried = asyncio.create_task(self._frontend.drain()), asyncio.create_task(hurry.wait())
        first: set[asyncio.Future[Any]] = {draining, hurried, self.lost}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurried):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
