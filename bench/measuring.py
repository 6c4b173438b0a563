"""What the measurements of single parts share: medians of times, and where figures go."""

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
    """From here on this process computes and keeps its memory as an instance does."""
    share_heap()
    torch.set_num_threads(threads)
    keep_freed_memory()


def median_seconds(work: Work, rounds: int) -> float:
    """Of so many runs after the first."""
    return medians_in_turns({"": work}, rounds)[""]


def medians_in_turns(ways: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Seconds that each way takes, the median of so many rounds after the first. In a round they take turns, because a
    machine isn't equally fast all the time."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def report(found: Mapping[str, Any], out: Path | None) -> None:
    """Prints the figures as JSON, and writes them to ``out`` if it is given."""
    shown = json.dumps(found, indent=1, ensure_ascii=False)
    print(shown)
    if out:
        out.write_text(shown + "\n")
