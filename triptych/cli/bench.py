"""``triptych bench``: measurements of the documentation, on this machine and with this machine's models."""

import argparse

from triptych.cli import bench_split, bench_transfer

BENCHES = {"transfer": bench_transfer, "split": bench_split}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, module in BENCHES.items():
        bench = benches.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        bench.set_defaults(parser=bench)
        module.add_arguments(bench)


def run(arguments: argparse.Namespace) -> int:
    code: int = BENCHES[arguments.bench].run(arguments)
    return code
