"""Runs a plan: services in turns, round by round, then transfers."""

from collections.abc import Callable

from triptych import running_time
from triptych.errors import TriptychError
from triptych.measure.split.plan import Setup
from triptych.measure.split.tables import rows_of
from triptych.measure.split.transfers import Show, TransferSizes, measure_transfers
from triptych.measure.split.visit import SplitBench, visit


def run_split(bench: SplitBench, sizes: TransferSizes | None, show: Show, done: Callable[[], None]) -> None:
    """Fill the tables. ``show`` gets a line for each step, and ``done`` is called after it. What fails is a reason in
    its rows, and the rest is measured."""
    rounds = bench.plan.rounds
    for number in range(rounds):
        # every other round backwards, so that a machine that slows down doesn't favour the first
        for setup in bench.plan.setups[:: -1 if number % 2 else 1]:
            show(f"round {number + 1} of {rounds}: {setup}")
            try:
                running_time.run(visit(bench, setup, number))
            except TriptychError as error:
                _fail(bench, setup, f"round {number + 1}: {error}")
            done()
    if sizes is not None:
        measure_transfers(bench.plan, sizes, bench.results, show)
        done()


def _fail(bench: SplitBench, setup: Setup, reason: str) -> None:
    for table in bench.results.tables:
        bench.results.fail(reason, table.name, rows_of(table, setup))
