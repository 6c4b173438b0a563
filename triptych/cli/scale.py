"""``triptych scale``: adds instances to a running service, or drains and ends some."""

import argparse

from triptych.cli import flags
from triptych.cli.progress import show
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import ConfigError
from triptych.messages.operations import StartScale
from triptych.topology import MAX_INSTANCES, Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "counts",
        metavar="ROLE=NUMBER",
        nargs="+",
        help="how many instances of a role there are to be, as in E=3; roles that aren't named keep theirs",
    )
    flags.add_control(parser)
    flags.add_group(parser, ClusterConfig)


def run(arguments: argparse.Namespace) -> int:
    cluster = flags.settings(ClusterConfig, arguments)
    flags.check_controls("--control", arguments.control, cluster)
    counts = _counts(arguments.counts)
    with ControlClient(arguments.control, cluster) as client:
        show(client.scale(counts), StartScale)
    print("now", " ".join(f"{role}={count}" for role, count in counts.items()))
    return 0


def _counts(given: list[str]) -> dict[Role, int]:
    counts: dict[Role, int] = {}
    for text in given:
        letters, _, number = text.partition("=")
        if letters.upper() not in list(Role):
            raise ConfigError(f"{text!r} is not ROLE=NUMBER, where roles are {', '.join(Role)}")
        if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number) <= MAX_INSTANCES):
            raise ConfigError(f"{text!r} is not ROLE=NUMBER, with a number from 0 to {MAX_INSTANCES}")
        role = Role(letters.upper())
        if role in counts:
            raise ConfigError(f"{role} is there twice: {counts[role]} and {number}")
        counts[role] = int(number)
    return counts
