"""``triptych status``: who is there in a running service, and doing what; and another role for one of them."""

import argparse
import math
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from triptych.cli import flags
from triptych.cluster.operator import Operator
from triptych.config import ClusterConfig
from triptych.errors import ConfigError
from triptych.messages.stats import PoolUsage
from triptych.messages.work import InstanceStatus, Status
from triptych.topology import Role

SUMMARY = "show a running service's instances, or give one of them another role"


NOT_A_TERMINAL = 160
"""Columns when nothing says how many there are: room for each instance's pools in one line each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control",
        metavar="HOST:PORT",
        required=True,
        help="control address of the frontend, which it prints when it is ready",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("changing roles")
    group.add_argument(
        "--set-role",
        metavar="INSTANCE=ROLE",
        action="append",
        default=[],
        help="let that instance finish its requests and continue in that role, with the weights it has; may be "
        "repeated: changes are made one after the other (default: none)",
    )
    group.add_argument(
        "--drain-timeout",
        metavar="SECONDS",
        default="30",
        help="seconds that it may take to finish; if it takes longer, nothing changes (default: 30)",
    )
    group.add_argument(
        "--force",
        action="store_true",
        help="even if requests are rejected meanwhile, or an instance is left without work",
    )
    flags.add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    cluster = flags.settings(ClusterConfig, arguments)
    flags.check_control("--control", arguments.control, cluster)
    changes = [_change(text) for text in arguments.set_role]
    timeout = _seconds(arguments.drain_timeout)
    with Operator(arguments.control, cluster) as operator:
        for instance, role in changes:
            operator.set_role(instance, role, timeout, force=arguments.force)
        status = operator.status()
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(status).decode() + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else NOT_A_TERMINAL)
        console.print(_summary(status), markup=False)
        console.print(_table(status))
    return 0


def _change(text: str) -> tuple[str, Role]:
    instance, _, role = text.rpartition("=")
    if not instance or role.upper() not in list(Role):
        raise ConfigError(f"--set-role {text!r} is not INSTANCE=ROLE, where roles are {', '.join(Role)}")
    return instance, Role(role.upper())


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 10**6:
        raise ConfigError(f"--drain-timeout {text!r} is not a number of seconds")
    return seconds


def _summary(status: Status) -> str:
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    return f"{state}, {status.requests} requests"


def _table(status: Status) -> Table:
    table = Table("instance", "role", "process", "heard", "work", "pools")
    for one in status.instances:
        heard = f"{one.silent:.1f} s ago"
        work = f"{one.load.running} running, {one.load.waiting} waiting"
        table.add_row(one.name, _role(one), str(one.pid), heard, work, "\n".join(map(_pool, one.load.pools)))
    return table


def _role(one: InstanceStatus) -> str:
    return f"{one.role} → {one.next_role}" if one.next_role else str(one.role)


def _pool(pool: PoolUsage) -> str:
    cached = f", {pool.cached:,} cached" if pool.cached else ""
    return f"{pool.used:,} of {pool.size:,} {pool.name}{cached}"
