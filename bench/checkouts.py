"""Two checkouts of the project: how long encoding, prefill and decoding take in one, as ratios to the other.

    git worktree add /tmp/before HEAD~1
    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.checkouts /tmp/mid /tmp/before --formats float32 float16 --out bench/results/checkouts.json

Each checkout has a process with its own kernels. The two take turns, so that other work on the machine slows both, and
each pair of turns yields a ratio. A turn is one picture, one prompt, or the median of several decode steps. What is
measured is that of ``bench.formats``, of this checkout in both cases: the other one must have the functions that it
calls.
"""

import argparse
import importlib
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

HERE = Path(__file__).parent.parent
KINDS = ("encode", "prefill", "decode")
REST = 0.05
"""Seconds before each turn. Threads of the other process wait actively for their next work, and then sleep."""
STEPS = 8
"""Decode steps in a turn: the first ones after a rest take longer."""


class Worker:
    """A process that measures one checkout, one work at a time. ``works`` are the names of ``bench.formats.WORKS``."""

    def __init__(self, checkout: Path, model: Path, name: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--work", str(checkout), str(model), name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.works = self._answer().split(",")

    def seconds(self, work: str) -> float:
        """Return the seconds of a turn of one of ``works``. Raises SystemExit if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"the process of {self._process.args!r} has ended")
        return line.strip()


def work(checkout: str, model: str, name: str, threads: str) -> None:
    """Main function of a worker: run the works whose names it reads, and write their seconds."""
    sys.path.insert(0, checkout)
    importlib.import_module("triptych")  # its modules, too, are now those of this checkout; not so the benchmarks
    sys.path.insert(0, str(HERE))
    import torch

    from bench import formats
    from bench.measuring import like_an_instance

    like_an_instance(int(threads))
    torch.manual_seed(0)
    with torch.inference_mode():
        loaded = formats.load(Path(model), name)
        print(",".join(formats.WORKS), flush=True)
        for line in sys.stdin:
            taken = []
            for _ in range(STEPS if "decode" in line else 1):
                began = time.perf_counter()
                formats.WORKS[line.strip()](loaded)
                taken.append(time.perf_counter() - began)
            print(statistics.median(taken), flush=True)


def ratios(workers: list[Worker], works: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Return ``compared`` by work."""
    found: dict[str, dict[str, Any]] = {}
    for name in [name for name in workers[0].works if name.split()[0] in works]:
        taken: list[list[float]] = [[], []]
        for turn in range(1 + rounds):
            for worker, seconds in in_turn(list(zip(workers, taken, strict=True)), turn):
                time.sleep(REST)
                seconds.append(worker.seconds(name))
        found[name] = compared(*(seconds[1:] for seconds in taken))
    return found


def in_turn(checkouts: list[T], turn: int) -> list[T]:
    """Return the checkouts in the order of a turn: the one that was last is first."""
    return checkouts if turn % 2 else checkouts[::-1]


def compared(before: list[float], after: list[float]) -> dict[str, list[float]]:
    """Return the medians and the least of the other checkout's and of this one's seconds, in milliseconds, and the
    quartiles of the ratios of this one to the other, turn by turn."""
    quartiles = statistics.quantiles([own / other for own, other in zip(after, before, strict=True)], n=4)
    return {
        "median_ms": [round(1e3 * statistics.median(seconds), 2) for seconds in (before, after)],
        "least_ms": [round(1e3 * min(seconds), 2) for seconds in (before, after)],
        "ratio_quartiles": [round(ratio, 3) for ratio in quartiles],
    }


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what comparisons of two checkouts have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder of a family with pictures")
    parser.add_argument("other", type=Path, help="the other checkout, which ratios are to")
    parser.add_argument("--rounds", type=int, default=rounds, help="at least 2")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the given options. Ends the program if they are wrong."""
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("quartiles need at least 2 rounds")
    if not (options.other / "triptych").is_dir():
        parser.error(f"{options.other} is not a checkout of the project")
    return options


def main() -> None:
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--formats", nargs="+", default=["float32", "float16", "bfloat16", "int8"])
    parser.add_argument("--works", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    options = parsed(parser)
    # not at the top: a worker imports the project from the checkout that it measures
    from bench.formats import FORMATS
    from bench.measuring import report
    from triptych.measure.machine import machine

    if unknown := set(options.formats) - FORMATS.keys():
        parser.error(f"{unknown} are not among {[*FORMATS]}")
    shown = {name: str(value) for name, value in vars(options).items() if name != "out"}
    found: dict[str, Any] = {"machine": machine(), "options": shown}
    found["commits"] = [commit(checkout) for checkout in (options.other, HERE)]
    found["formats"] = {}
    for name in options.formats:
        workers = [Worker(one, options.model, name, options.threads) for one in (options.other, HERE)]
        try:
            found["formats"][name] = ratios(workers, options.works, options.rounds)
        finally:
            for worker in workers:
                worker.close()
    report(found, options.out)


def commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
