"""``triptych plan``: simulates topologies with a profile and a workload, and says which one to start."""

import argparse
from pathlib import Path

from triptych.cli import flags
from triptych.server.worker_extra import check_installed
from triptych.workload.mix import WORKLOADS

REQUESTS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --profile FILE --workload W [OPTIONS]"
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", required=True, help="what triptych profile has measured"
    )
    parser.add_argument(
        "--workload",
        metavar="NAME|FILE",
        required=True,
        help=f"what is asked: {', '.join(WORKLOADS)}, a description in TOML (FILE.toml), or a trace of serve --record",
    )
    parser.add_argument(
        "--slo",
        metavar="OBJECTIVES",
        required=True,
        help="times that requests must keep, to the first token and for each later one: ttft=2s,tpot=60ms",
    )
    parser.add_argument(
        "--attain", type=flags.number, default=0.99, metavar="SHARE", help="share of requests that must (default: 0.99)"
    )
    parser.add_argument(
        "--cores", type=int, default=0, metavar="N", help="cores of one machine (default: those that were profiled)"
    )
    parser.add_argument(
        "--instances",
        type=int,
        default=0,
        metavar="N",
        help="instances with a machine each, in place of --cores (default: none)",
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of each instance (default: an even share)"
    )
    parser.add_argument("--topologies", metavar="TOPOLOGY,...", help="what to compare (default: what fits)")
    parser.add_argument(
        "--requests",
        type=int,
        default=REQUESTS,
        metavar="N",
        help=f"least requests of each simulated run (default: {REQUESTS}); more make sharper percentiles",
    )
    parser.add_argument("--seed", type=int, default=0, help="what draws the workload and the spread (default: 0)")
    parser.add_argument(
        "--price",
        type=flags.number,
        metavar="PER_CORE_HOUR",
        help="price of a core for an hour: adds costs (default: none)",
    )
    parser.add_argument("--model", default="MODEL", help="model in the command that is printed (default: MODEL)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="file for a drawing of goodput over rate (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    check_installed("a plan")
    from triptych.cli import planned  # simulations have the engine's parts, which import PyTorch

    return planned.run(arguments)
