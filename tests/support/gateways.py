"""Services before language servers that only imitate vLLM."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.support.serving import Served, served, wait_for
from tests.support.vllm_server import VllmServer, vllm_server

WORDS = " ".join(VllmServer.words)
"""What such a server answers."""


def gateway(
    folder: Path, *servers: VllmServer, kind: str = "vllm", topology: str = "1E", **settings: Any
) -> AbstractContextManager[Served]:
    """Return a service before servers, of the ``kind`` that ``--engine`` names."""
    urls = ",".join(server.url for server in servers)
    return served(folder, topology, servers=f"{kind}={urls}", **{"restart_hold": 30.0} | settings)


def states(service: Served) -> list[str]:
    """Return the states of the servers before which a service stands."""
    return [str(server.state) for server in service.running.frontend.router.servers or ()]


def ready(service: Served, number: int = 1) -> None:
    """Wait until this many of its servers serve."""
    wait_for(lambda: states(service).count("serving") == number)


@contextmanager
def gateway_and_server(folder: Path, **settings: Any) -> Iterator[tuple[Served, VllmServer]]:
    """Start a service and the one server before which it stands; yield both once that serves."""
    with vllm_server(folder) as server, gateway(folder, server, **settings) as service:
        ready(service)
        yield service, server
