"""``triptych chaos``: ends, stops and drains processes of a service under load, and reports what its clients saw."""

import argparse
import contextlib
import dataclasses
import logging
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from triptych import running_time
from triptych.cli import flags
from triptych.config import ServeConfig
from triptych.errors import ConfigError
from triptych.measure.chaos import report
from triptych.measure.chaos.another_model import make_another
from triptych.measure.chaos.bench import Bench
from triptych.measure.chaos.clocks import settable_clock
from triptych.measure.chaos.disks import small_disks
from triptych.measure.chaos.faults import FAULTS, NUM_REQUESTS, Fault
from triptych.measure.chaos.measure import FaultResult, run_faults
from triptych.measure.chaos.walk import TOPOLOGIES, Ground, plan_walk
from triptych.measure.chaos.walking import run_walk, walk_lines
from triptych.observe import logs
from triptych.observe.machine import pin_to_cores
from triptych.server.worker_extra import check_installed
from triptych.topology import Topology

MIN_REQUESTS = 4
WALK_SECONDS, MIN_SECONDS = 180.0, 5.0
SHARED_MEMORY = Path("/dev/shm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [OPTIONS]"
    flags.add_model(parser, required=False)  # --list needs none
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        default=Path("chaos.md"),
        help="page for the results; its drawings are put in a folder of the same name (default: chaos.md)",
    )
    parser.add_argument(
        "--only", metavar="FAULT,...", default="", help="faults to run, of those that --list shows (default: all)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=NUM_REQUESTS,
        help=f"requests at once, at least {MIN_REQUESTS}; all loads are in proportion (default: {NUM_REQUESTS})",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        help="times that each fault is run, each time at another moment of the load (default: 1)",
    )
    parser.add_argument(
        "--walk",
        type=int,
        metavar="SEED",
        help="instead of the faults one by one, do the acts of a plan that this number decides: faults and acts of "
        "an operator, several at a time (default: the faults)",
    )
    parser.add_argument(
        "--seconds", type=float, default=WALK_SECONDS, help=f"length of a walk (default: {WALK_SECONDS:g})"
    )
    parser.add_argument(
        "--topology", help=f"instances of a walk (default: one of {', '.join(TOPOLOGIES)}, decided by SEED)"
    )
    parser.add_argument("--list", action="store_true", help="list the faults and run none")
    parser.add_argument("--verbose", action="store_true", help="show the logs of the services")
    flags.add_settings(parser)
    # answers are compared, token by token
    parser.set_defaults(dtype="float32")


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    faults = _chosen(arguments.only)
    if arguments.list:
        _show(faults, console)
        return 0
    if arguments.model is None:
        arguments.parser.error("the following arguments are required: MODEL")
    if arguments.requests < MIN_REQUESTS:
        raise ConfigError(f"--requests {arguments.requests} is too small: at least {MIN_REQUESTS}")
    if arguments.repeat < 1:
        raise ConfigError(f"--repeat {arguments.repeat} is too small: at least 1")
    if arguments.seconds < MIN_SECONDS:
        raise ConfigError(f"--seconds {arguments.seconds:g} is too short: at least {MIN_SECONDS:g}")
    if arguments.topology and arguments.walk is None:
        raise ConfigError("--topology is for --walk: each fault of the list has one of its own")
    check_installed("chaos")
    faults = [again for fault in faults for again in fault.repeated(arguments.repeat)]
    config = flags.serve_config(arguments)
    pin_to_cores(config.engine.cpus.cores)
    name = flags.model_name(arguments, config)
    config = dataclasses.replace(config, frontend=config.frontend.having({"port": 0, "control_port": 0}))
    if arguments.walk is not None:
        return _walk(arguments, config, name, console)
    _write([], arguments.report)  # rather refused now than after minutes
    kept: list[str] = []
    bench = Bench(config, name, arguments.requests, _print_error if arguments.verbose else kept.append)

    results: list[FaultResult] = []

    def done(result: FaultResult) -> None:
        console.print(report.line(result), markup=False, highlight=False)
        results.append(result)
        _write(results, arguments.report)  # each time, so an interrupted command leaves what it has
        if result.failures:
            _keep_log(arguments.report, result.fault.name, kept)
        kept.clear()

    with logs.quiet(logging.ERROR, unless=arguments.verbose):
        running_time.run(run_faults(bench, faults, done))
    console.print(f"wrote {arguments.report}", markup=False)
    return 1 if any(result.failures for result in results) else 0


def _walk(arguments: argparse.Namespace, config: ServeConfig, name: str, console: Console) -> int:
    """Do a walk, and show its plan and what it showed."""
    seed, seconds = arguments.walk, arguments.seconds
    topology = Topology.parse(arguments.topology or TOPOLOGIES[seed % len(TOPOLOGIES)])
    kept: list[str] = []

    def say(line: str) -> None:
        kept.append(line)
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk, clock = folder / "disk", folder / "clock"
        disk.mkdir()
        clock.mkdir()
        disks = (disk, SHARED_MEMORY)
        if why := stack.enter_context(small_disks(*disks)):
            say(f"no disk is filled: {why}")
        if why := stack.enter_context(settable_clock(clock)):
            say(f"no clock is set: {why}")
        ground = Ground(topology, config.model, make_another(config.model, folder / "other"), disks, clock)
        steps = plan_walk(seed, ground, seconds)
        say(f"walk {seed} on {topology} for {seconds:g} s: {len(steps)} steps")
        for step in steps:
            say(str(step))
        config = config.having({"enable_log_requests": True, "request_log_file": str(disk / "requests.log")})
        stack.enter_context(logs.quiet(logging.ERROR, unless=arguments.verbose))
        bench = Bench(config, name, arguments.requests, _print_error if arguments.verbose else kept.append)
        result = running_time.run(run_walk(bench, steps, ground, seconds, say))
    for line in walk_lines(result):
        say(line)
    if result.failures:
        say(f"again: {shlex.join(['triptych', *sys.argv[1:]])}")
    _keep_log(arguments.report, f"walk-{seed}", kept)
    return 1 if result.failures else 0


def _chosen(only: str) -> Sequence[Fault]:
    """Return the faults of that list of names, in the order of ``FAULTS``. Raises ConfigError for an unknown one."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {fault.name for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]} is no fault: triptych chaos --list shows them")
    return [fault for fault in FAULTS if not names or fault.name in names]


def _show(faults: Sequence[Fault], console: Console) -> None:
    table = Table("fault", "what happens", "topology", "added p99 (s)")
    for fault in faults:
        limits = ", ".join(f"{kind} ≤ {limit:g}" for kind, limit in fault.limits.items())
        table.add_row(fault.name, fault.title, fault.topology, limits or "not compared")
    console.print(table)


def _write(results: Sequence[FaultResult], page: Path) -> None:
    """Write the report of these results. Raises ConfigError where that isn't possible."""
    try:
        report.write(results, page, shlex.join(["triptych", *sys.argv[1:]]))
    except OSError as error:
        raise ConfigError(f"--report {page} can't be written: {error.strerror}") from None


def _keep_log(page: Path, name: str, lines: Sequence[str]) -> None:
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.log").write_text("\n".join(lines) + "\n")


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
