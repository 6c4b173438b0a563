"""``triptych bench transfer``: measures how fast rows are transferred between processes on this machine."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from triptych.errors import StartError
from triptych.measure.transfer import report
from triptych.measure.transfer.measure import FABRICS, FULL, QUICK, measure

SUMMARY = "measure how fast embedding rows are transferred between processes on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTIONS]"
    parser.add_argument(
        "--fabric",
        nargs="+",
        choices=FABRICS,
        default=[],
        metavar="FABRIC",
        help=f"fabrics to measure, of {', '.join(FABRICS)} (default: all that are installed)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path(),
        help="folder for transfer.json (default: the working directory)",
    )
    parser.add_argument("--quick", action="store_true", help="small payloads and few repeats: takes about 30 seconds")


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--out {arguments.out}: {error.strerror}") from None
    results = measure(arguments.fabric, QUICK if arguments.quick else FULL, console.print)
    for table in report.tables(results):
        console.print(table)
    written = arguments.out / "transfer.json"
    written.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"wrote {written}")
    return 0
