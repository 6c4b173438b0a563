"""The requests of a measurement, and what their answers come to."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych.measure.load.client import Sample, percentile
from triptych.measure.load.pictures import picture
from triptych.measure.load.questions import chat_body, content, words
from triptych.measure.split.plan import SLO_TPOT, SLO_TTFT, Mix, Size, SplitPlan

MAX_REQUESTS = 500
"""Requests of one piece of a measurement, at most."""
REPEATED = 4
"""Pictures that are used again and again where a cache may help."""
MAX_PICTURES = 16
"""Pictures of one request, at most."""
MAX_PIECES = 1000
"""Pieces of one round, at most."""


@dataclass(frozen=True)
class ServiceLevel:
    """Times in seconds within which a request is in time."""

    ttft: float
    tpot: float

    def kept(self, sample: Sample) -> bool:
        return not sample.error and sample.ttft <= self.ttft and sample.tpot <= self.tpot

    @classmethod
    def of(cls, plan: SplitPlan, alone: Sequence[Sample]) -> "ServiceLevel":
        """Return the plan's, or multiples of the times of requests that were answered alone."""
        ttft, tpot = (statistics.median(times) for times in zip(*((one.ttft, one.tpot) for one in alone), strict=True))
        return cls(plan.slo_ttft or SLO_TTFT * ttft, plan.slo_tpot or SLO_TPOT * tpot)


@dataclass(frozen=True)
class Requests:
    """Makes the bodies of one round's requests, the same ones for each topology."""

    model: str
    output_tokens: int
    round: int

    def of(self, mix: Mix, piece: int, count: int) -> list[bytes]:
        """Return requests that are new to all caches. ``piece`` numbers the pieces of a round that must share none."""
        return [self._one(mix, seed) for seed in self._seeds(piece, count)]

    def images(self, size: Size, count: int, piece: int) -> bytes:
        """Return a request with pictures of one size."""
        (seed,) = self._seeds(piece, 1)
        mix = Mix("", count, 64, size.width, size.height)
        return self._one(mix, seed)

    def cached(self, mix: Mix, piece: int, count: int, *, repeated: bool) -> list[bytes]:
        """Return requests of a picture after a text of its own, of pictures in turn if ``repeated``."""
        seeds = self._seeds(piece, count)
        shown = [seeds[index % REPEATED] if repeated else seed for index, seed in enumerate(seeds)]
        return [
            chat_body(
                self.model,
                content([picture(MAX_PICTURES * one, mix.width, mix.height)], words(seed, mix.text_length))[::-1],
                self.output_tokens,
            )
            for seed, one in zip(seeds, shown, strict=True)
        ]

    def _one(self, mix: Mix, seed: int) -> bytes:
        pictures = [picture(MAX_PICTURES * seed + number, mix.width, mix.height) for number in range(mix.pictures)]
        return chat_body(self.model, content(pictures, words(seed, mix.text_length)), self.output_tokens)

    def _seeds(self, piece: int, count: int) -> range:
        first = (self.round * MAX_PIECES + piece) * MAX_REQUESTS
        return range(first, first + count)


def answered(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if not sample.error]


def failure(samples: Iterable[Sample]) -> str:
    """Return the first failure, empty if there is none."""
    return next((sample.error for sample in samples if sample.error), "")


def latencies(good: Sequence[Sample]) -> dict[str, float]:
    """Return times of answered requests in milliseconds."""
    ttft, tpot = [1e3 * one.ttft for one in good], [1e3 * one.tpot for one in good]
    return {
        "ttft_p50": statistics.median(ttft),
        "ttft_p99": percentile(ttft, 0.99),
        "tpot_p50": statistics.median(tpot),
        "tpot_p99": percentile(tpot, 0.99),
    }


def throughput(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Return what a closed loop comes to that took these seconds; latencies only if any request was answered."""
    good = answered(samples)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": sum(one.tokens for one in good) / seconds,
        **(latencies(good) if good else {}),
    }


def goodput(samples: Sequence[Sample], times: Sequence[float], level: ServiceLevel) -> dict[str, float]:
    """Return what requests come to that were sent at these times, at least two of them. The rate is that of the actual
    times, which for few requests differs from the nominal one."""
    good = answered(samples)
    offered = (len(times) - 1) / times[-1]
    kept = sum(map(level.kept, samples)) / len(samples)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "offered": offered,
        "goodput": offered * kept,
        "kept": 100 * kept,
        **(latencies(good) if good else {}),
    }


def stage_ms(samples: Sequence[Sample], stage: str) -> float:
    """Return the median over requests of the milliseconds that a stage worked on each; 0 for a stage that did not."""
    spent: list[float] = [
        sum(one["end_ms"] - one["start_ms"] for one in sample.timeline if one["stage"] == stage) for sample in samples
    ]
    return statistics.median(spent)
