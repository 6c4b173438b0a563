"""``triptych rollout``: replaces the processes of a running service one by one."""

import argparse

from triptych.cli import flags
from triptych.cli.progress import show
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import ConfigError
from triptych.messages.operations import StartRollout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_control(parser)
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="changes",
        help="a setting of instances that changes, as in max-num-seqs=64; may be repeated (default: none changes)",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="another checkpoint of the same architecture, such as a later revision (default: the one that is served)",
    )
    parser.add_argument(
        "--no-surge",
        action="store_true",
        help="end each old instance before its replacement starts, where memory doesn't suffice for both; requests "
        "wait while a stage has none",
    )
    flags.add_group(parser, ClusterConfig)


def run(arguments: argparse.Namespace) -> int:
    cluster = flags.settings(ClusterConfig, arguments)
    flags.check_controls("--control", arguments.control, cluster)
    changes = _changes(arguments.changes)
    model = str(flags.model_folder(arguments.model)) if arguments.model else ""
    with ControlClient(arguments.control, cluster) as client:
        show(client.rollout(changes, surge=not arguments.no_surge, model=model), StartRollout)
    print("all processes were replaced")
    return 0


def _changes(given: list[str]) -> dict[str, str]:
    changes: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not separator or not name:
            raise ConfigError(f"--set {text!r} is not NAME=VALUE")
        if name in changes:
            raise ConfigError(f"--set {name} is there twice: {changes[name]!r} and {value!r}")
        changes[name] = value
    return changes
