"""Divides items among encode instances: which rows each of several instances should send. Pure functions.

An item can be divided only where no part, and no atomic span, has rows on both sides.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from triptych.prompt.prompt import PlannedItem
from triptych.router.caches import PartName, part_names

SECTION_SECONDS = 0.1
"""Seconds of encoding from which a further section is worth it: another instance needs the file, too, and decodes it
again. With ``--sweep``, ``bench/several_encoders.py`` measures where dividing an item begins to pay: the shortest
video that it asks about still took 0.6 of the time."""
PIECES_PER_SHARE = 4
"""An item that costs less than this part of what each instance would do of the request isn't divided: whole items then
balance the instances well enough."""


@dataclass(frozen=True)
class EncoderState:
    """An encode instance among which items are divided."""

    load: float
    """Cost of the work that it does before a new item."""
    has_part: Callable[[PartName], bool]
    """Whether it probably has a part's rows, or is encoding it (``Instance.has_part``)."""


@dataclass(frozen=True)
class _Unit:
    """The parts between two neighbouring rows where an item can be divided."""

    first_row: int
    cost: float
    parts: tuple[int, ...]


@dataclass
class _Stretch:
    """Consecutive units that one instance has in its cache, or that none has."""

    holder: int | None
    units: list[_Unit]

    @property
    def cost(self) -> float:
        return sum(unit.cost for unit in self.units)


def divide(
    items: Sequence[PlannedItem], salt: str, encoders: Sequence[EncoderState], least: float
) -> list[tuple[int, ...]]:
    """Return for each item of a request the rows before which it is divided, ascending; none for most items.

    Sections are such that the instances finish together if each takes one: those with less to do get more, and what one
    has cached stays together. ``least`` is the cost from which a section is worth it.
    """
    total = sum(item.plan.cost for item in items)
    least = max(least, total / max(1, PIECES_PER_SHARE * len(encoders)))
    loads, cuts = [encoder.load for encoder in encoders], list[tuple[int, ...]]()
    for item in items:
        if len(encoders) > 1 and item.plan.num_parts > 1 and item.plan.cost >= 2 * least:
            names = part_names(item.key, salt, range(item.plan.num_parts))
            cuts.append(_cuts(_runs(_units(item), names, encoders, least), loads, least))
        else:
            cuts.append(())
            _take(loads, [item.plan.cost])
    return cuts


def shares(cost: float, loads: Sequence[float], least: float) -> list[float]:
    """Return how a cost is shared by instances with these loads, so that they finish together: largest share first, for
    the instance with the lowest load. Instances whose share would be below ``least`` get none."""
    ordered = sorted(loads)
    for number in range(len(ordered), 1, -1):
        level = (cost + sum(ordered[:number])) / number
        if level - ordered[number - 1] >= least:
            return [level - load for load in ordered[:number]]
    return [cost]


def _cuts(runs: Sequence[_Stretch], loads: list[float], least: float) -> tuple[int, ...]:
    """Return the rows at which runs begin, and within those that no instance has. Adds what each does to ``loads``."""
    cuts = list[int]()
    for run in runs:
        cuts.append(run.units[0].first_row)
        if run.holder is None:
            taken = shares(run.cost, loads, least)
            cuts += _within(run.units, taken)
            _take(loads, taken)
    return tuple(cuts[1:])


def _take(loads: list[float], taken: Sequence[float]) -> None:
    """Add shares, the largest first, to the loads, the lowest first."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    for number, share in zip(order, taken, strict=False):
        loads[number] += share


def _within(units: Sequence[_Unit], taken: Sequence[float]) -> Iterator[int]:
    """Yield the rows that divide units as nearly as possible into these shares, in order."""
    ends = list(accumulate(unit.cost for unit in units))
    last = 0
    for target in accumulate(taken[:-1]):
        number = min(bisect.bisect_left(ends, target), len(units) - 1)
        before = ends[number - 1] if number else 0.0
        number += target - before > ends[number] - target
        if last < number < len(units):
            yield units[number].first_row
            last = number


def _units(item: PlannedItem) -> list[_Unit]:
    """Return what an item can be divided into, in the order of its rows."""
    plan, bounds = item.plan, [0, *item.plan.boundaries]
    spans = item.placement.spans
    if any(span.atomic for span in spans):
        starts = set(accumulate((span.length for span in spans), initial=0))
        bounds = [row for row in bounds if row in starts]
    parts: list[list[int]] = [[] for _ in bounds]
    for number, part in enumerate(plan.parts):
        parts[bisect.bisect_right(bounds, min(part.runs)[0]) - 1].append(number)
    costs = [sum(plan.parts[number].cost for number in numbers) for numbers in parts]
    return [_Unit(row, cost, tuple(numbers)) for row, cost, numbers in zip(bounds, costs, parts, strict=True)]


def _runs(
    units: Sequence[_Unit], names: Sequence[PartName], encoders: Sequence[EncoderState], least: float
) -> list[_Stretch]:
    """Return the units as runs, each of at least ``least`` unless it is the only one: what is less joins another."""
    runs = list[_Stretch]()
    for unit in units:
        holders = [
            number
            for number, encoder in enumerate(encoders)
            if all(encoder.has_part(names[part]) for part in unit.parts)
        ]
        if runs and (runs[-1].holder in holders if holders else runs[-1].holder is None):
            runs[-1].units.append(unit)
        else:
            runs.append(_Stretch(holders[0] if holders else None, [unit]))
    joined = runs[:1]
    for run in runs[1:]:
        if joined[-1].cost < least:
            joined[-1] = _Stretch(run.holder, joined[-1].units + run.units)
        elif run.cost < least or run.holder == joined[-1].holder:
            joined[-1].units += run.units
        else:
            joined.append(run)
    return joined
