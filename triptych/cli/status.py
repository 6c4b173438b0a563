"""``triptych status``: shows the instances of a running service and their load, and changes their roles."""

import argparse
import math
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from triptych.cli import flags
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import ConfigError
from triptych.messages.operations import InstanceStatus, LaunchedInstance, LaunchState, Status
from triptych.messages.stats import PoolUsage
from triptych.topology import Role, Topology

DEFAULT_WIDTH = 160
"""Columns when the output isn't a terminal: room for each of an instance's pools in one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_control(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("changing roles")
    group.add_argument(
        "--set-role",
        metavar="INSTANCE=ROLE",
        action="append",
        default=[],
        help="drain the instance, and change its role to one that its loaded weights allow; may be repeated, and "
        "changes are made in order (default: none)",
    )
    group.add_argument(
        "--drain-timeout",
        metavar="SECONDS",
        default="30",
        help="seconds for the instance to drain; if it takes longer, it keeps its role (default: 30)",
    )
    group.add_argument(
        "--force",
        action="store_true",
        help="change the role even if requests are rejected meanwhile, or an instance is left without work",
    )
    flags.add_group(parser, ClusterConfig)


def run(arguments: argparse.Namespace) -> int:
    cluster = flags.settings(ClusterConfig, arguments)
    flags.check_controls("--control", arguments.control, cluster)
    changes = [_parse_change(text) for text in arguments.set_role]
    timeout = _seconds(arguments.drain_timeout)
    with ControlClient(arguments.control, cluster) as client:
        for instance, role in changes:
            client.set_role(instance, role, timeout, force=arguments.force)
        status = client.status()
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(status).decode() + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else DEFAULT_WIDTH)
        console.print(_summary(status), markup=False)
        console.print(_table(status))
    return 0


def _parse_change(text: str) -> tuple[str, Role]:
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
    change = f"\n{status.change}" if status.change else ""
    topology = str(Topology.of(one.role for one in status.instances if not one.draining)) or "no instances"
    topology += f" + {len(status.servers)} vLLM" if status.servers else ""
    return f"{state}, {topology}, {status.requests} requests, model {status.model.digest}{change}"


def _table(status: Status) -> Table:
    launched = {one.name: one for one in status.launched}
    remote = bool(status.spares) or any(one.node or one.pending for one in status.launched)
    table = Table("instance", "role", "process", "last heartbeat", "work", "pools", "restarts", *["node"] * remote)
    for one in status.instances:
        heartbeat = f"{one.seconds_since_heartbeat:.1f} s ago"
        work = f"{'draining: ' * one.draining}{one.load.running} running, {one.load.waiting} waiting"
        pools = "\n".join(map(_pool, one.load.pools))
        kept = launched.get(one.name)
        restarts, node = (str(kept.restarts), kept.node) if kept else ("", "")
        table.add_row(one.name, _role(one), str(one.pid), heartbeat, work, pools, restarts, *[node] * remote)
    joined = {one.name for one in status.instances}
    for process in status.launched:
        if process.name not in joined:
            role = str(process.role or "frontend")
            state, restarts = _state(process), str(process.restarts)
            table.add_row(process.name, role, "", "", state, "", restarts, *[process.node] * remote)
    for server in status.servers:
        work = f"{server.running} running" if server.state == "serving" else server.state
        work += f": {server.why}" if server.why else ""
        table.add_row(server.name, "vLLM", "", server.url, work, "", str(server.losses), *[""] * remote)
    for spare in status.spares:
        state = f"free: {spare.asks}" if spare.node else f"pending: {spare.pending or spare.asks}"
        table.add_row("spare place", "", "", "", state, "", "", spare.node)
    return table


def _state(process: LaunchedInstance) -> str:
    if process.state is LaunchState.RESTARTING:
        return f"restarts in {process.restart_in:.1f} s"
    return f"pending: {process.pending}" if process.pending else str(process.state)


def _role(one: InstanceStatus) -> str:
    return f"{one.role} → {one.next_role}" if one.next_role else str(one.role)


def _pool(pool: PoolUsage) -> str:
    cached = f", {pool.cached:,} cached" if pool.cached else ""
    return f"{pool.used:,} of {pool.size:,} {pool.name}{cached}"
