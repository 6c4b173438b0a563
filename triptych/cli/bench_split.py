"""``triptych bench split``: measures one process beside encode, prefill and decode apart, and beside replicas."""

import argparse
import logging
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from triptych.checkpoint.config_files import load_config
from triptych.cli import flags
from triptych.cluster.service import check_roles
from triptych.config import ServeConfig
from triptych.errors import ConfigError
from triptych.measure.machine import machine
from triptych.measure.split import report
from triptych.measure.split.figures import Results
from triptych.measure.split.plan import (
    FULL,
    OF_MEDIA,
    QUICK,
    TABLES,
    TEXT_TOPOLOGIES,
    TOPOLOGIES,
    SplitPlan,
    division,
    threads_of,
)
from triptych.measure.split.run import run_split
from triptych.measure.split.tables import EMBEDDINGS, KV, tables_of
from triptych.measure.split.transfers import TransferSizes
from triptych.measure.split.visit import SplitBench
from triptych.models.registry import family_of
from triptych.observe import logs
from triptych.observe.machine import pin_to_cores
from triptych.topology import Topology

SUMMARY = "measure one process beside encode, prefill and decode as processes of their own, and beside replicas"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL --report FILE [OPTIONS]"
    flags.add_model(parser)
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        required=True,
        help="page for the results; its drawings are put in a folder of the same name",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the values of all rounds (default: none)")
    parser.add_argument(
        "--tables", metavar="TABLE,...", help=f"what to measure, of {', '.join(TABLES)} (default: all that apply)"
    )
    parser.add_argument(
        "--topologies",
        metavar="TOPOLOGY,...",
        help="what to compare, the basis first "
        f"(default: {','.join(TOPOLOGIES)}; for text models {','.join(TEXT_TOPOLOGIES)})",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, loads and sizes: takes about 3 minutes")
    parser.add_argument("--rounds", type=int, help=f"rounds (default: {FULL.rounds}, with --quick {QUICK.rounds})")
    parser.add_argument(
        "--seconds",
        type=flags.number,
        help=f"seconds of each load, about (default: {FULL.seconds:g}, with --quick {QUICK.seconds:g})",
    )
    for name, of in (("ttft", "to the first token"), ("tpot", "for each later token")):
        parser.add_argument(
            f"--slo-{name}",
            type=flags.number,
            default=0.0,
            metavar="SECONDS",
            help=f"seconds {of} within which a request counts as goodput (default: 0, for a multiple of the time "
            "that a request takes alone)",
        )
    parser.add_argument("--verbose", action="store_true", help="show the logs of the services")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    config = flags.serve_config(arguments)
    plan = _plan(arguments, config)
    pin_to_cores(config.engine.cpus.cores)
    name = flags.model_name(arguments, config)
    config = replace(config, frontend=config.frontend.having({"port": 0, "control_port": 0}))
    about = report.About(shlex.join(["triptych", *sys.argv[1:]]), name, machine())
    # rather refused now than after minutes
    _write(Results([]), plan, about, arguments)
    console.print(f"about {plan.minutes:.0f} minutes if the model is as fast as {flags.DEMO}", highlight=False)
    needs_pairs = {"transfers", "resumes"} & set(plan.tables)
    sizes = TransferSizes.of(config, KV, EMBEDDINGS) if needs_pairs else None
    cores = about.machine["cores"]
    threads = {topology: division(threads_of(config, topology), cores) for topology in plan.topologies}
    results = Results(tables_of(plan, threads, sizes))
    bench = SplitBench(config, name, plan, results, _print_error if arguments.verbose else lambda _: None)

    def done() -> None:
        _write(results, plan, about, arguments)  # each time, so that nothing is lost when the command is killed

    try:
        with logs.quiet(logging.ERROR, unless=arguments.verbose):
            run_split(bench, sizes, lambda line: console.print(line, markup=False, highlight=False), done)
    except KeyboardInterrupt:
        results.interrupted = True
        done()
        raise
    console.print(f"wrote {arguments.report}", markup=False)
    missing = len(list(results.missing()))
    if missing:
        console.print(f"{missing} rows lack figures: the page says why")
    return 1 if missing else 0


def _plan(arguments: argparse.Namespace, config: ServeConfig) -> SplitPlan:
    """Return what the flags ask for. Raises ConfigError, TopologyError and CheckpointError."""
    takes_media = family_of(load_config(config.model)).takes_media
    plan = replace(
        QUICK if arguments.quick else FULL,
        takes_media=takes_media,
        tables=_tables(arguments.tables, takes_media=takes_media),
        topologies=_topologies(arguments.topologies, config) or (TOPOLOGIES if takes_media else TEXT_TOPOLOGIES),
        slo_ttft=_checked("--slo-ttft", arguments.slo_ttft, 0),
        slo_tpot=_checked("--slo-tpot", arguments.slo_tpot, 0),
    )
    if arguments.rounds is not None:
        plan = replace(plan, rounds=int(_checked("--rounds", arguments.rounds, 1)))
    if arguments.seconds is not None:
        plan = replace(plan, seconds=_checked("--seconds", arguments.seconds, 0.5))
    return plan


def _checked(name: str, value: float, least: float) -> float:
    if value < least:
        raise ConfigError(f"{name} {value:g} is too small: at least {least:g}")
    return value


def _tables(given: str | None, *, takes_media: bool) -> tuple[str, ...]:
    """Return the tables of a list. Raises ConfigError for an unknown one, and for one that the model can't fill."""
    possible = [name for name in TABLES if takes_media or name not in OF_MEDIA]
    names = _split(given)
    for name in names:
        if name not in TABLES:
            raise ConfigError(f"--tables {name} is none of {', '.join(TABLES)}")
        if name not in possible:
            raise ConfigError(f"--tables {name} needs a model that takes media")
    return tuple(name for name in possible if not names or name in names)


def _topologies(given: str | None, config: ServeConfig) -> tuple[str, ...]:
    """Return the topologies of a list. Raises TopologyError for one that can't serve the model."""
    parsed = [Topology.parse(name) for name in _split(given)]
    for topology in parsed:
        check_roles(config.model, topology)
    return tuple(dict.fromkeys(map(str, parsed)))


def _split(given: str | None) -> list[str]:
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def _write(results: Results, plan: SplitPlan, about: report.About, arguments: argparse.Namespace) -> None:
    """Write the report. Raises ConfigError where that isn't possible."""
    try:
        report.write(results, plan, about, arguments.report, arguments.json)
    except OSError as error:
        raise ConfigError(f"{error.filename or arguments.report} can't be written: {error.strerror}") from None


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
