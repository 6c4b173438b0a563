"""``triptych stop``: ends a whole service."""

import argparse
import asyncio

from triptych.cli import flags
from triptych.cli.progress import show
from triptych.cluster.control_client import ControlClient
from triptych.cluster.on_ray.launcher import RayLauncher
from triptych.cluster.service_folder import ServiceFolder
from triptych.config import ClusterConfig
from triptych.errors import StartError
from triptych.messages.operations import StopService


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTIONS]"
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--control",
        metavar="HOST:PORT[,HOST:PORT]",
        help="control address of the frontend; of several, the first that answers is asked (default: none)",
    )
    which.add_argument(
        "--name",
        help="a service that was started on this machine with --detach, with or without a supervisor (default: none)",
    )
    flags.add_group(parser, ClusterConfig)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        _stop_by_name(arguments.name)
    else:
        cluster = flags.settings(ClusterConfig, arguments)
        flags.check_controls("--control", arguments.control, cluster)
        _stop_supervised(arguments.control, cluster)
    print("the service has ended")
    return 0


def _stop_supervised(control: str, cluster: ClusterConfig) -> None:
    with ControlClient(control, cluster) as client:
        show(client.stop(), StopService)


def _stop_by_name(name: str) -> None:
    with ServiceFolder(name) as folder:
        if folder.hold():
            asyncio.run(_end_instances(folder))
        else:
            state = folder.read().state
            _stop_supervised(",".join(state.controls), state.config.cluster)


async def _end_instances(folder: ServiceFolder) -> None:
    """End the instances of a service that has no supervisor, and so no frontend and no requests."""
    record = folder.open()
    try:
        async with RayLauncher(record.place, print, folder=folder, adopts=record.state.topology.names) as launcher:
            for name, ended in (await launcher.end_earlier()).items():
                print(f"instance {name} {ended}")
    except StartError as error:
        raise StartError(f"{error}; if the cluster is gone for good, delete {folder.path}") from None
    folder.forget()
