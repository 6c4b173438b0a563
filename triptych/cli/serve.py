"""``triptych serve``: a whole service, or one part of one."""

import argparse
import asyncio
import dataclasses
import logging
import os
import shlex
import signal
from typing import Any

from triptych.cli import flags
from triptych.cluster.local import SUPERVISOR_VARIABLE
from triptych.cluster.service import LocalService
from triptych.config import (
    ClusterConfig,
    ServeConfig,
    as_flags,
    check_ranks,
    parse_cpus,
    processes_of,
    threads_per_process,
)
from triptych.errors import ConfigError
from triptych.observe import logs
from triptych.observe.machine import end_with_parent, pin_to_cores
from triptych.topology import Role, Topology

SUMMARY = "serve a model: all processes of a topology, or one instance that joins a frontend"
FRONTEND = "frontend"
DEFAULT_TOPOLOGY = "1E1PD"

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [OPTIONS]"
    flags.add_model(parser, may_be_in_file=True)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--topology",
        help="instances to start, such as 1EPD, 1E1PD, 1E1P1D, 2E1P3D (default: "
        f"{DEFAULT_TOPOLOGY}; for text alone: 1PD)",
    )
    what.add_argument(
        "--role",
        help=f"run one process alone: an instance ({', '.join(Role)}) or the frontend ({FRONTEND}) (default: none)",
    )
    parser.add_argument(
        "--join", metavar="HOST:PORT", help=f"control address of the frontend; required for any --role but {FRONTEND}"
    )
    parser.add_argument("--name", help="name of this instance in logs and metrics (default: its role and process id)")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    flags.fill_in_start(arguments)
    config = flags.serve_config(arguments)
    pin_to_cores(parse_cpus(config.engine.cpus))
    frontend = dataclasses.replace(config.frontend, served_model_name=flags.model_name(arguments, config))
    config = dataclasses.replace(config, frontend=frontend)
    if arguments.role is None or arguments.role == FRONTEND:
        if arguments.join is not None:
            raise ConfigError("--join is for --role and an instance, such as --role E")
        topology = flags.topology(arguments, config, DEFAULT_TOPOLOGY) if arguments.role is None else None
        if topology is not None:
            check_ranks(config.engine, topology.roles)
        return asyncio.run(_serve(config, topology))
    return _run_instance(config, _role(arguments.role), arguments.join, arguments.name)


async def _serve(config: ServeConfig, topology: Topology | None) -> int:
    """The frontend and the instances of the topology, if any, until a signal or a death."""
    interrupted, terminated = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    async with LocalService(config, topology, show=_show) as service:
        ended = [asyncio.create_task(event.wait()) for event in (interrupted, terminated)]
        starting = asyncio.create_task(service.wait_until_ready())
        await asyncio.wait({starting, *ended}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _announce(service, config, topology)
            endings: set[asyncio.Future[Any]] = {service.lost, *ended}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        for task in ended:
            task.cancel()
        if service.lost.done() and not interrupted.is_set():
            log.error("%s; stopping the others", service.lost.result())
            return 1
        if terminated.is_set() and not interrupted.is_set():
            log.info("SIGTERM: no new requests; finishing those that run")
            await service.drain(interrupted)
        return 0


def _announce(service: LocalService, config: ServeConfig, topology: Topology | None) -> None:
    what = str(topology) if topology else "the frontend alone"
    _tell(f"ready: {config.frontend.served_model_name} as {what} on {service.url}/v1")
    trust = as_flags(config.cluster) if config.cluster != ClusterConfig() else []
    join = ["triptych", "serve", str(config.model), "--role", "E", "--join", service.control, *trust]
    _tell(f"instances can join with: {shlex.join(join)}")
    _tell(f"who is there, and doing what: {shlex.join(['triptych', 'status', '--control', service.control, *trust])}")


def _run_instance(config: ServeConfig, role: Role, join: str | None, name: str | None) -> int:
    """One instance in this process, until the frontend or a signal ends it."""
    if supervisor := os.environ.get(SUPERVISOR_VARIABLE):
        end_with_parent(int(supervisor))
    if join is None:
        raise ConfigError(f"--role {role} needs --join HOST:PORT")
    flags.check_control("--join", join, config.cluster)
    name = name or f"{role.value.lower()}-{os.getpid()}"
    logs.rename(name)
    # before torch is imported, which reads it once
    threads = threads_per_process(config.engine, processes_of(config.engine, role))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from triptych.server.main import run_instance

    run_instance(config, role, join, name, threads)
    return 0


def _role(text: str) -> Role:
    try:
        return Role(text.upper())
    except ValueError:
        known = ", ".join([*Role, FRONTEND])
        raise ConfigError(f"--role {text} is not one of {known}") from None


def _tell(text: str) -> None:
    _show(logs.announcement(text))


def _show(line: str) -> None:
    print(line, flush=True)
