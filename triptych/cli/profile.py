"""``triptych profile``: measures what a model's work costs on this machine, for plans and simulations."""

import argparse
import logging
import os
from pathlib import Path

from rich.console import Console

from triptych.cli import flags
from triptych.cli.text_table import TextColumn, cell, table_lines
from triptych.costs import profile as profiles
from triptych.costs.profile import Profile
from triptych.errors import ConfigError
from triptych.measure.load import drawings
from triptych.measure.profile.measure import ProfileBench
from triptych.measure.profile.plan import FULL, QUICK
from triptych.observe import logs
from triptych.observe.machine import pin_to_cores
from triptych.server.worker_extra import check_installed

BUSY = 0.3
"""Load for each core from which on a profile isn't to be trusted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL --out FILE [OPTIONS]"
    flags.add_model(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="file for the profile, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="folder for a drawing of each cost (default: none)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions: too rough for plans")
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    check_installed("a profile")
    config = flags.serve_config(arguments)
    name = flags.model_name(arguments, config)
    if arguments.plot and not drawings.can_draw():
        raise ConfigError(drawings.MISSING)
    _check_folder(arguments.out)  # rather refused now than after minutes
    pin_to_cores(config.engine.cpus.cores)
    console = Console(stderr=True)

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores:
        show(f"this machine is busy: its load is {load:.1f} on {cores} cores, so costs will be too high")
    bench = ProfileBench(config, name, QUICK if arguments.quick else FULL, show)
    with logs.quiet(logging.ERROR, unless=False):
        profile = bench.run()
    profiles.write(profile, arguments.out)
    for line in bench.skipped:
        show(f"not measured: {line}")
    for row in table_lines(_columns(profile), console.width):
        console.print(row)
    if arguments.plot:
        _draw(profile, arguments.plot)
    show(f"wrote {arguments.out}")
    return 0


def _columns(profile: Profile) -> list[TextColumn]:
    costs = list(profile.costs())
    return [
        TextColumn("cost", [cell(name) for name, _ in costs]),
        TextColumn("points", [cell(str(len(cost.points))) for _, cost in costs], rank=2, right=True),
        TextColumn("fit is off by", [cell(f"{100 * cost.error.median:.1f} %") for _, cost in costs], right=True),
        TextColumn("left out", [cell(f"{100 * cost.error.left_out:.1f} %") for _, cost in costs], right=True),
        TextColumn("spread", [cell(f"{100 * cost.noise:.1f} %") for _, cost in costs], right=True),
        TextColumn("seconds", [cell(str(cost.form)) for _, cost in costs], rank=1, least=20),
    ]


def _check_folder(path: Path) -> None:
    """Raise ConfigError where no file can be written."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ConfigError(f"{path} can't be written: no folder to write it to")


def _draw(profile: Profile, folder: Path) -> None:
    from triptych.measure.profile.plot import draw

    try:
        draw(profile, folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} can't be written: {error.strerror}") from None
