"""A machine whose cores and memory several processes share: the more the others work, the longer each one takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from triptych.costs.profile import Stage

WINDOW = 2.0
"""Seconds over which a process's busy share is averaged: the end of a job isn't changed by jobs that begin meanwhile,
so what counts is how often these are there."""


@dataclass
class _Share:
    """How much a process of late works at a stage."""

    threads: int
    share: float = 0.0
    at: float = 0.0

    def now(self, time: float) -> float:
        return min(1.0, self.share * math.exp((self.at - time) / WINDOW))

    def add(self, time: float, seconds: float) -> None:
        self.share, self.at = min(1.0, self.now(time) + seconds / WINDOW), time


class SharedMachine:
    """Slows work down by what other processes on the machine do."""

    def __init__(self, cores: int, slowdown: Callable[[Stage, Stage], float], taken: float = 0.0) -> None:
        """``slowdown`` says how many times as long a stage takes beside another that works without pause, on cores of
        its own. ``taken`` are cores that what isn't simulated uses, on average."""
        self._cores = cores
        self._taken = taken
        self._slowdown = slowdown
        self._shares: dict[tuple[str, Stage], _Share] = {}

    def seconds(self, process: str, stage: Stage, threads: int, seconds: float, time: float) -> float:
        """Return how long work of a process takes that begins now, given how long it takes alone."""
        factor, wanted = 1.0, threads + self._taken
        for (other, beside), one in self._shares.items():
            if other != process and (share := one.now(time)) > 0.001:
                factor += share * (self._slowdown(stage, beside) - 1.0)
                wanted += share * one.threads
        over = max(0.0, wanted - self._cores)
        # all get equal shares, but threads of one job wait for the slowest, which shares its core with one other
        slowest = min(1.0, over) * min(1.0, threads / self._cores)
        took = seconds * max(factor, 1.0) * (1.0 + max(over / self._cores, slowest))
        own = self._shares.get((process, stage))
        if own is None:
            own = self._shares[process, stage] = _Share(threads)
        own.add(time, took)
        return took
