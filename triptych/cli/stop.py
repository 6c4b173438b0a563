"""``triptych stop``: ends a whole service."""

import argparse

from triptych.cli import flags
from triptych.cli.progress import show
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.messages.operations import StopService


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTIONS]"
    parser.add_argument(
        "--control",
        metavar="HOST:PORT[,HOST:PORT]",
        required=True,
        help="control address of the frontend; of several, the first that answers is asked",
    )
    flags.add_group(parser, ClusterConfig)


def run(arguments: argparse.Namespace) -> int:
    cluster = flags.settings(ClusterConfig, arguments)
    flags.check_controls("--control", arguments.control, cluster)
    with ControlClient(arguments.control, cluster) as client:
        show(client.stop(), StopService)
    print("the service has ended")
    return 0
