"""Helpers of the micro-benchmarks: median times and reports."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from triptych.heap import keep_freed_memory, share_heap

Work = Callable[[], Any]


def like_an_instance(threads: int) -> None:
    """Configure this process's threads and memory like an instance's."""
    share_heap()
    torch.set_num_threads(threads)
    keep_freed_memory()


def median_seconds(work: Work, rounds: int) -> float:
    """Return the median over ``rounds`` runs after the first."""
    return medians_in_turns({"": work}, rounds)[""]


def medians_in_turns(
    ways: Mapping[str, Work], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return each method's seconds, as the median over ``rounds`` rounds."""
    found = seconds_in_turns(ways, rounds, clock)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def seconds_in_turns(
    ways: Mapping[str, Work], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return each method's seconds in ``rounds`` rounds after the first. Methods alternate within a round, because the
    machine's speed varies."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, work in ways.items():
            began = clock()
            work()
            found[name].append(clock() - began)
    return {name: seconds[1:] for name, seconds in found.items()}


def report(found: Mapping[str, Any], out: Path | None) -> None:
    """Print the figures as JSON, and write them to ``out`` if given."""
    shown = json.dumps(found, indent=1, ensure_ascii=False)
    print(shown)
    if out:
        out.write_text(shown + "\n")
