"""Sentences about what splitting gained or cost, each drawn from figures of the tables.

Two figures are called different only if the ranges of their rounds have no value in common.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triptych.split_bench.figures import Results, Row, Spread
from triptych.split_bench.plan import CLIENT, SplitPlan
from triptych.split_bench.tables import NEW, OFF, ON, REPEATED


@dataclass(frozen=True)
class Measure:
    """A figure that topologies are compared by."""

    table: str
    column: str
    name: str
    more_is_better: bool


COMPARED = (
    Measure("closed", "tokens_per_second", "output tokens/s in the closed loop", True),
    Measure("closed", "ttft_p50", "time to first token in the closed loop, p50", False),
    Measure("closed", "tpot_p99", "time per token in the closed loop, p99", False),
    Measure("closed", "cpu", "processor time per request", False),
    Measure("alone", "ttft", "time to first token of a request alone", False),
    Measure("alone", "tpot", "time per token of a request alone", False),
)


def findings(results: Results, plan: SplitPlan) -> Iterator[str]:
    """Yield one sentence for each thing that the figures show, none where figures are missing."""
    for mix in plan.mixes:
        for measure in COMPARED:
            rows: dict[str, Row] = {topology: (mix.name, topology) for topology in plan.topologies}
            yield from _compared(results, measure, rows, f"{mix.name} requests")
        for share in plan.rates:
            rows = {topology: (mix.name, f"{share:g}", topology) for topology in plan.topologies}
            goodput = Measure("arrivals", "goodput", f"goodput at a rate of {share:g}", True)
            yield from _compared(results, goodput, rows, f"{mix.name} requests")
    yield from _memory(results, plan)
    yield from _largest_images(results, plan)
    yield from _cache(results, plan)
    yield from _first_use(results, plan)
    yield from _transfers(results, plan)
    yield from _resumes(results)


def compared(first: Spread, other: Spread, *, more_is_better: bool) -> str:
    """Return in words what changed from the first figure to the other one."""
    if not first.differs(other) or not first.median:
        return "no difference beyond the spread"
    word = "gained" if (other.median > first.median) == more_is_better else "cost"
    return f"{word}: {other.median / first.median:.2f} times as much"


def _compared(results: Results, measure: Measure, rows: Mapping[str, Row], load: str) -> Iterator[str]:
    spreads = {name: results.spread(measure.table, row, measure.column) for name, row in rows.items()}
    (first, base), *others = spreads.items()
    if base is None:
        return
    said = [
        f"`{name}` {compared(base, spread, more_is_better=measure.more_is_better)}"
        for name, spread in others
        if spread is not None
    ]
    if said:
        yield f"{load}, {measure.name}, beside `{first}`: {'; '.join(said)}."


def _memory(results: Results, plan: SplitPlan) -> Iterator[str]:
    mix = plan.mixes[0].name
    found = {}
    for setup in plan.setups:
        if setup.settings:
            continue
        parts = [
            results.spread("processes", (mix, setup.topology, name, stages), "pss")
            for name, stages in setup.processes.items()
            if name != CLIENT
        ]
        known = [one.median for one in parts if one is not None]
        if len(known) == len(parts):
            found[setup.topology] = sum(known)
    if len(found) > 1:
        yield f"Memory of all processes (PSS): {', '.join(f'`{name}` {mib:,.0f} MiB' for name, mib in found.items())}."


def _largest_images(results: Results, plan: SplitPlan) -> Iterator[str]:
    table = results.table("images")
    if table is None:
        return
    size, count = str(plan.image_sizes[-1]), str(plan.image_counts[-1])
    rows = {topology: (size, count, topology) for topology in plan.topologies}
    measure = Measure("images", "ttft", "time to first token", False)
    yield from _compared(results, measure, rows, f"{count} pictures of {size} in a request")


def _cache(results: Results, plan: SplitPlan) -> Iterator[str]:
    for topology in plan.cache_topologies:
        for pictures in (NEW, REPEATED):
            off, on = (results.spread("cache", (topology, state, pictures), "ttft_p50") for state in (OFF, ON))
            if off is not None and on is not None:
                said = compared(off, on, more_is_better=False)
                yield f"Encoder cache on `{topology}`, pictures {pictures}, time to first token, beside off: {said}."


def _first_use(results: Results, plan: SplitPlan) -> Iterator[str]:
    for mix in plan.mixes:
        found = {name: results.spread("first-use", (mix.name, name), "ratio") for name in plan.topologies}
        said = [f"`{name}` {spread.median:.1f}" for name, spread in found.items() if spread is not None]
        if said:
            yield f"First {mix.name} request, time to first token ÷ that of later ones: {', '.join(said)}."


def _transfers(results: Results, plan: SplitPlan) -> Iterator[str]:
    table = results.table("transfers")
    largest = f"{plan.tokens[-1]:,}"
    for kind in dict.fromkeys(row[0] for row in table.rows) if table else ():
        found = {row[2]: results.spread("transfers", row, "ms") for row in _rows(results, kind, largest)}
        said = [f"{fabric} {spread.median:,.1f} ms" for fabric, spread in found.items() if spread is not None]
        if said:
            yield f"{largest} tokens of {kind} travel in: {', '.join(said)}."


def _rows(results: Results, kind: str, tokens: str) -> Sequence[Row]:
    table = results.table("transfers")
    return [row for row in table.rows if row[:2] == (kind, tokens)] if table else []


def _resumes(results: Results) -> Iterator[str]:
    table = results.table("resumes")
    ratios = [results.spread("resumes", row, "ratio") for row in table.rows] if table else []
    known = [one.median for one in ratios if one is not None]
    if known:
        yield (
            f"A pool that holds only some of the tokens took {min(known):.2f} to {max(known):.2f} times as long as one "
            "that holds all."
        )
