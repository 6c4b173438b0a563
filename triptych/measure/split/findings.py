"""Sentences about what splitting gained or cost, each drawn from figures of the tables.

Two figures are called different only if the ranges of their rounds have no value in common.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triptych.measure.split.figures import Results, Row, Spread
from triptych.measure.split.plan import CLIENT, SplitPlan
from triptych.measure.split.tables import NEW, OFF, ON, REPEATED


@dataclass(frozen=True)
class Measure:
    """A figure that topologies are compared by."""

    table: str
    column: str
    name: str
    more_is_better: bool
    rate: str = ""
    """Which rate of arrivals; empty for figures that have none."""

    def row(self, mix: str, topology: str) -> Row:
        return (mix, self.rate, topology) if self.rate else (mix, topology)


COMPARED = (
    Measure("closed", "tokens_per_second", "output tokens/s in the closed loop", True),
    Measure("closed", "ttft_p50", "time to first token in the closed loop (p50)", False),
    Measure("closed", "tpot_p99", "time per token in the closed loop (p99)", False),
    Measure("closed", "cpu", "processor time per request", False),
    Measure("alone", "ttft", "time to first token alone", False),
    Measure("alone", "tpot", "time per token alone", False),
)


def findings(results: Results, plan: SplitPlan) -> Iterator[str]:
    """Yield one sentence for each thing that the figures show, none where figures are missing."""
    if plan.rounds == 1:
        yield "One round shows no spread, so topologies aren't compared."
    else:
        yield from _topologies(results, plan)
        yield from _images(results, plan)
        yield from _cache(results, plan)
    yield from _memory(results, plan)
    yield from _first_use(results, plan)
    yield from _transfers(results, plan)
    yield from _resumes(results)


def changed(compared: Mapping[str, tuple[Spread, Spread, bool]]) -> str:
    """Return in words what changed from the first figure of each pair to the second, by name of the figure. The third
    part is whether more is better."""
    said: dict[str, list[str]] = {"gained": [], "cost": [], "no difference beyond the spread": []}
    for name, (first, second, more_is_better) in compared.items():
        if not first.differs(second) or not first.median:
            said["no difference beyond the spread"].append(name)
        else:
            word = "gained" if (second.median > first.median) == more_is_better else "cost"
            said[word].append(f"{name} × {second.median / first.median:.2f}")
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in said.items() if names)


def _topologies(results: Results, plan: SplitPlan) -> Iterator[str]:
    """Compare each topology with the first."""
    goodput = [
        Measure("arrivals", "goodput", f"goodput at rate {share:g}", True, rate=f"{share:g}") for share in plan.rates
    ]
    first, *others = plan.topologies
    for mix in plan.mixes:
        for topology in others:
            compared = {}
            for measure in (*COMPARED, *goodput):
                one, two = (
                    results.spread(measure.table, measure.row(mix.name, name), measure.column)
                    for name in (first, topology)
                )
                if one is not None and two is not None:
                    compared[measure.name] = (one, two, measure.more_is_better)
            if compared:
                yield f"{mix.name} requests, `{topology}` beside `{first}`: {changed(compared)}."


def _images(results: Results, plan: SplitPlan) -> Iterator[str]:
    """Compare the topologies with the first, for the most and largest pictures that both have figures for."""
    first, *others = plan.topologies
    table = results.table("images")
    for topology in others if table else ():
        for size, count in (
            (str(size), str(count)) for size in plan.image_sizes[::-1] for count in plan.image_counts[::-1]
        ):
            one, two = (results.spread("images", (size, count, name), "ttft") for name in (first, topology))
            if one is not None and two is not None:
                said = changed({"time to first token": (one, two, False)})
                yield f"pictures of {size}, {count} in a request, `{topology}` beside `{first}`: {said}."
                break


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


def _cache(results: Results, plan: SplitPlan) -> Iterator[str]:
    for topology in plan.cache_topologies:
        for pictures in (NEW, REPEATED):
            off, on = (results.spread("cache", (topology, state, pictures), "ttft_p50") for state in (OFF, ON))
            if off is not None and on is not None:
                said = changed({"time to first token": (off, on, False)})
                yield f"encoder cache on `{topology}`, pictures {pictures}, on beside off: {said}."


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
