"""``triptych serve``: a whole service, or one part of one."""

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import signal
from dataclasses import asdict, replace
from typing import Any

from triptych import running_time
from triptych.cli import flags
from triptych.cli.choices import choices
from triptych.cli.ray_flags import ray_address, ray_resources, ray_spares
from triptych.cli.seeing import seeing_note
from triptych.cluster.launcher import Launcher
from triptych.cluster.on_ray.launcher import RayLauncher, RayPlace
from triptych.cluster.service import Service
from triptych.cluster.service_manager import tell_service_manager
from triptych.config import ClusterConfig, ServeConfig, flag
from triptych.errors import ConfigError
from triptych.models.registry import identity_of
from triptych.observe import logs, sd_notify
from triptych.observe.machine import pin_to_cores
from triptych.server import instance_main
from triptych.server.worker_extra import check_installed
from triptych.topology import Role, Topology

FRONTEND = "frontend"
DEFAULT_TOPOLOGY = "1E1PD"

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [OPTIONS]"
    flags.add_model(parser, required=False)  # it may be in the file
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
        "--join",
        metavar="HOST:PORT[,HOST:PORT]",
        help="control address of the frontend, or of each of several frontends that share the instances; required for "
        f"any --role but {FRONTEND}",
    )
    parser.add_argument(
        "--name",
        help="name of this instance in logs and metrics (default: its role and process id)",
    )
    parser.add_argument(
        "--on",
        metavar="ray[://HOST:PORT]",
        help="start the instances on the nodes of a Ray cluster: the one that this machine is a node of, or the one of "
        "that GCS address; the frontend runs here (default: instances run here, too)",
    )
    parser.add_argument(
        "--ray-resources",
        metavar="ROLE=NAME:AMOUNT[,…]",
        help="Ray resources that each instance of a role asks for besides CPUs and GPUs, as in E=encoder:1,PD=large:1 "
        "(default: none)",
    )
    parser.add_argument(
        "--ray-spares",
        type=int,
        metavar="N",
        help="with --on ray: places kept free for instances of lost machines, N for each set of resources that "
        "instances ask for (default: 0)",
    )
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    flags.fill_in_start(arguments)
    config = flags.serve_config(arguments)
    pin_to_cores(config.engine.cpus.cores)
    name = flags.model_name(arguments, config)
    config = replace(config, frontend=config.frontend.having({"served_model_name": name}))
    if arguments.role is None or arguments.role == FRONTEND:
        if arguments.join is not None:
            raise ConfigError("--join is for --role and an instance, such as --role E")
        if config.lease.health_port:
            raise ConfigError("--health-port is for --role and an instance, such as --role E")
        identity_of(config.model)  # here, where a signal ends the process: a large checkpoint takes minutes to hash
    if arguments.role != FRONTEND and config.lease.leave_instances:
        raise ConfigError(f"--leave-instances is for --role {FRONTEND}")
    for name in ("ray_resources", "ray_spares"):
        if getattr(arguments, name) and arguments.on is None:
            raise ConfigError(f"{flag(name)} is for --on ray")
    if arguments.role is not None and arguments.on is not None:
        raise ConfigError("--on is for a whole service, not for --role")
    if arguments.role is not None and config.frontend.http.frontends > 1:
        raise ConfigError("--frontends is for a whole service; start each frontend of its own with --role frontend")
    if arguments.role == FRONTEND:
        logs.rename(FRONTEND)
        return running_time.run(_serve_frontend(config))
    if arguments.role is None:
        topology = flags.topology(arguments, config, DEFAULT_TOPOLOGY)
        config.engine.tensor_parallel_size.check(topology.roles)
        if arguments.on:
            return running_time.run(_serve(config, topology, arguments))
        check_installed("an instance")
        for line in choices(config, topology):
            log.info("%s", line)
        return running_time.run(_supervise(config, topology))
    return _run_instance(config, _role(arguments.role), arguments.join, arguments.name)


async def _serve(config: ServeConfig, topology: Topology, arguments: argparse.Namespace) -> int:
    """Serve with instances on the nodes of a Ray cluster."""
    if config.engine.cpus.cores:
        raise ConfigError("--cpus names cores of this machine, and --on ray starts instances on others")
    if config.engine.device.startswith("cuda:"):
        raise ConfigError(f"--device {config.engine.device} names a GPU, which Ray chooses: --device cuda")
    resources, spares = ray_resources(arguments.ray_resources or ""), ray_spares(arguments.ray_spares or 0)
    place = RayPlace(ray_address(arguments.on), resources, spares)
    async with RayLauncher(place, _print_line) as launcher:
        return await _supervise(_on_ray(config, launcher), topology, launcher)


def _on_ray(config: ServeConfig, launcher: RayLauncher) -> ServeConfig:
    """Return the settings with the addresses and the secret of the Ray cluster that the launcher has reached."""
    if config.engine.device == "auto":
        log.info("instances compute on CPUs: --device cuda asks Ray for GPUs, and --device auto doesn't")
    return replace(config, cluster=launcher.cluster(config.cluster))


async def _supervise(config: ServeConfig, topology: Topology, launcher: Launcher | None = None) -> int:
    """Supervise the frontend and the instances of the topology until a signal, until an operator stops the service, or
    until it can't go on. Return an exit code. The arguments are as in ``Service``."""
    interrupted, terminated = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    async with Service(config, topology, _print_line, launcher=launcher) as service:
        manager = asyncio.create_task(tell_service_manager(service))
        asked = service.stop_asked
        ended = [asyncio.create_task(event.wait()) for event in (interrupted, terminated, asked)]
        starting = asyncio.create_task(service.wait_until_ready())
        await asyncio.wait({starting, *ended}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _announce(config, str(topology), service.url, service.control)
            for number, url in enumerate(service.own_urls):
                _print_announcement(f"frontend{number} alone, with its /metrics and /ready: {url}")
            endings: set[asyncio.Future[Any]] = {service.lost, *ended}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        for task in (starting, manager, *ended):
            task.cancel()
        sd_notify.send("STOPPING=1", "STATUS=ending")
        if service.lost.done() and not (interrupted.is_set() or asked.is_set()):
            log.error("%s; stopping the others", service.lost.result())
            return service.lost.result().exit_code
        if (terminated.is_set() or asked.is_set()) and not interrupted.is_set():
            await service.drain(interrupted)
        return 0


async def _serve_frontend(config: ServeConfig) -> int:
    """Serve with a frontend in this process, which instances join by themselves."""
    # imported now, because the supervisor of a whole service and instances don't need it, and it takes long
    from triptych.server.frontend import Frontend
    from triptych.server.frontend_main import serve_frontend

    what = "the frontend alone"
    await serve_frontend(lambda: Frontend(config), lambda one: _announce(config, what, one.url, one.control))
    return 0


def _announce(config: ServeConfig, what: str, url: str, control: str) -> None:
    _print_announcement(f"ready: {config.frontend.http.served_model_name} as {what} on {url}/v1")
    if note := seeing_note(config.frontend, url):
        _print_announcement(note)
    trust = _given_flags(config.cluster)
    join = ["triptych", "serve", str(config.model), "--role", "E", "--join", control, *trust]
    _print_announcement(f"instances can join with: {shlex.join(join)}")
    status = ["triptych", "status", "--control", control, *trust]
    _print_announcement(f"to list instances and their load: {shlex.join(status)}")


def _given_flags(cluster: ClusterConfig) -> list[str]:
    """Return the flags by which another process of the service gets the same cluster settings."""
    given = {name: value for name, value in asdict(cluster).items() if cluster != ClusterConfig() and value}
    return [word for name, value in given.items() for word in (flag(name), value)]


def _run_instance(config: ServeConfig, role: Role, join: str | None, name: str | None) -> int:
    """Run one instance in this process until the frontend or a signal ends it."""
    if join is None:
        raise ConfigError(f"--role {role} needs --join HOST:PORT")
    flags.check_controls("--join", join, config.cluster)
    name = name or f"{role.value.lower()}-{os.getpid()}"
    logs.rename(name)
    instance_main.run(config.instance(role, name, join))
    return 0


def _role(text: str) -> Role:
    try:
        return Role(text.upper())
    except ValueError:
        known = ", ".join([*Role, FRONTEND])
        raise ConfigError(f"--role {text} is not one of {known}") from None


def _print_announcement(text: str) -> None:
    _print_line(logs.announcement(text))


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe mustn't end the service
        print(line, flush=True)
