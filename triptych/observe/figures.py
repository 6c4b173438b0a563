"""Figures of the last minutes, hour and day, in bounded memory: what was measured of each request, by spans of
time."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from triptych.observe.pipeline import FAILED, Figures, FiguresBucket, RequestView

RANGES = {300: 5.0, 3600: 30.0, 86_400: 600.0}
"""Seconds that figures go back → seconds of a span."""
MAX_SAMPLES = 200
"""Requests of a span whose times are kept; of more, a random choice."""

Times = tuple[float, float | None]
"""Seconds to the first token, and seconds for each further one; None without any."""


@dataclass
class _Counts:
    """What was counted in one span of time."""

    ended: int = 0
    failed: int = 0
    measured: int = 0
    """Answered requests, whose times are known."""
    tokens: int = 0
    prompt: int = 0
    """Prompt tokens of answered requests. The counts below are of these, too: others may have ended before they
    reached a cache."""
    reused: int = 0
    items: int = 0
    encoded: int = 0


@dataclass
class _Span:
    began: float
    counts: _Counts = field(default_factory=_Counts)
    samples: list[Times] = field(default_factory=list)

    def add(self, view: RequestView) -> None:
        counts = self.counts
        counts.ended += 1
        counts.failed += view.state == FAILED
        counts.tokens += view.num_tokens
        if view.time_to_first_token is None or view.state == FAILED:
            return
        counts.measured += 1
        counts.prompt += view.num_prompt
        counts.reused += view.num_reused
        counts.items += view.num_items
        counts.encoded += len({one.item for one in view.timeline if one.stage == "encode"})
        times = view.time_to_first_token, view.time_per_token
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(times)
        elif (place := random.randrange(counts.measured)) < MAX_SAMPLES:
            self.samples[place] = times
        self.__dict__.pop("quantiles", None)

    @cached_property
    def quantiles(self) -> tuple[list[float], list[float]]:
        """Median and 90th percentile of both times."""
        first, each = zip(*self.samples, strict=True) if self.samples else ((), ())
        return _quantiles(first), _quantiles([one for one in each if one is not None])

    def bucket(self, to_first: float, to_next: float) -> FiguresBucket:
        counts = self.counts
        good = sum(first <= to_first and (each is None or each <= to_next) for first, each in self.samples)
        return FiguresBucket(
            time=self.began,
            num_ended=counts.ended,
            num_failed=counts.failed,
            num_good=round(good * counts.measured / len(self.samples)) if self.samples else 0,
            num_tokens=counts.tokens,
            time_to_first_token=self.quantiles[0],
            time_per_token=self.quantiles[1],
            prefix_hit_rate=counts.reused / counts.prompt if counts.prompt else None,
            encode_hit_rate=max(0.0, 1 - counts.encoded / counts.items) if counts.items else None,
        )


class FigureLog:
    """Counts the requests that have ended in the last day."""

    def __init__(self) -> None:
        self._spans = {back: deque[_Span](maxlen=round(back / step)) for back, step in RANGES.items()}

    def add(self, view: RequestView, ended: float) -> None:
        """Count a request that ended then, in seconds since the epoch."""
        for back, spans in self._spans.items():
            began = ended - ended % RANGES[back]
            if not spans or spans[-1].began < began:
                spans.append(_Span(began))
            spans[-1].add(view)

    def figures(self, now: float, to_first: float, to_next: float, back: int = 3600) -> Figures:
        """Return the figures of the last ``back`` seconds, one of ``RANGES``. Good are the answers whose time to the
        first token, and mean time for each further one, are at most these, in seconds."""
        recent = [span for span in self._spans[back] if span.began > now - back]
        return Figures(RANGES[back], [span.bucket(to_first, to_next) for span in recent])


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[int(share * (len(ordered) - 1) + 0.5)] for share in (0.5, 0.9)] if ordered else []
