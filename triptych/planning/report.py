"""What a plan says: which service to start, by how much it is better, and what binds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triptych.planning.candidates import Candidate
from triptych.planning.search import KeptRate, SearchResult
from triptych.planning.trial import Slo, Trial

RUNNERS_UP = 5
HOUR = 3600.0


@dataclass(frozen=True)
class Price:
    """What a service costs, at a price for an hour of one core."""

    per_core_hour: float

    def per_million_tokens(self, one: KeptRate) -> float | None:
        """Return the price of a million generated tokens at the capacity; None without tokens."""
        return self._per(one, one.at.tokens_per_second if one.at else 0.0, 1e6)

    def per_thousand_items(self, one: KeptRate) -> float | None:
        """Return the price of a thousand media items at the capacity; None without items."""
        return self._per(one, one.at.items_per_second if one.at else 0.0, 1e3)

    def _per(self, one: KeptRate, rate: float, number: float) -> float | None:
        cores = one.candidate.total_cores
        return self.per_core_hour * cores * number / (rate * HOUR) if rate else None


def advice(result: SearchResult) -> str:
    """Return whether to split, in a sentence."""
    split, unsplit, chosen = result.best_split, result.best_unsplit, result.chosen
    if unsplit is None:
        return f"Take {chosen.candidate}: no unsplit one was among the candidates."
    if result.splits:
        assert split is not None
        if not unsplit.rate:
            return f"Split: {split.candidate} keeps {_rate(split)}, and no unsplit topology keeps the objectives."
        return (
            f"Split: {split.candidate} keeps {_rate(split)}, {result.gain:.2f} × the best unsplit one "
            f"({unsplit.candidate}, {_rate(unsplit)})."
        )
    if split is None or not split.rate:
        return f"Don't split: {unsplit.candidate} keeps {_rate(unsplit)}, and no split topology keeps the objectives."
    return (
        f"Don't split: {unsplit.candidate} keeps {_rate(unsplit)}, and the best split one, {split.candidate}, "
        f"{_rate(split)} ({result.gain:.2f} ×)."
    )


def as_json(result: SearchResult, slo: Slo, bound: Trial, price: Price | None, command: str) -> dict[str, Any]:
    """Return all that was found, for programs. ``command`` starts the chosen one."""
    unsplit = result.best_unsplit
    return {
        "advice": advice(result),
        "split": result.splits,
        "gain_over_unsplit": round(result.gain, 4) if result.gain != float("inf") else None,
        "objectives": {"ttft_s": slo.ttft, "tpot_s": slo.tpot, "share": slo.share},
        "best": str(result.chosen.candidate),
        "best_unsplit": str(unsplit.candidate) if unsplit else None,
        "command": command,
        "binds": bound.binds.sentence,
        "candidates": [_candidate(one, price) for one in result.capacities],
    }


def _candidate(one: KeptRate, price: Price | None) -> dict[str, Any]:
    at, candidate = one.at, one.candidate
    found: dict[str, Any] = {
        "topology": str(candidate.topology),
        "threads": candidate.threads,
        "settings": candidate.changes,
        "requests_per_second": round(one.rate, 4),
    }
    if at is not None:
        found |= {
            "ttft_s": {"p50": round(at.ttft[0], 4), "p99": round(at.ttft[1], 4)},
            "tpot_s": {"p50": round(at.tpot[0], 4), "p99": round(at.tpot[1], 4)},
            "tokens_per_second": round(at.tokens_per_second, 2),
            "busy": {name: round(share, 3) for name, share in at.busy.items()},
        }
    if price is not None:
        found["price"] = {
            "per_million_tokens": price.per_million_tokens(one),
            "per_thousand_items": price.per_thousand_items(one),
        }
    return found


def shown(result: SearchResult) -> Iterator[KeptRate]:
    """Yield what a table has: the best, the best unsplit one, and the runners-up; of each topology the best."""
    topologies, unsplit = set[str](), result.best_unsplit
    for one in result.capacities:
        name = str(one.candidate.topology)
        if name in topologies or not one.rate:
            continue
        topologies.add(name)
        if len(topologies) <= 1 + RUNNERS_UP or one is unsplit:
            yield one


def _rate(one: KeptRate) -> str:
    return f"{one.rate:.3g} requests/s"


def describe(candidate: Candidate) -> str:
    """Return a candidate's name with the threads of each instance."""
    return f"{candidate} ({candidate.threads} thread{'s' if candidate.threads > 1 else ''} each)"
