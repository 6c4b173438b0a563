"""Start of a service, and restart of each of its instances after SIGKILL.

    python -m bench.start demo --topology 1EPD 1E1PD 1E1P1D --rounds 5 --out bench/results/start.json

A start is measured from the command to its ready line. A restart is measured from the signal until the frontend has
the instance again; the supervisor waits 0.4 to 0.6 s before it restarts one. The files are in the page cache. Memory is
the proportional set size of all processes.
"""

import argparse
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from os import kill
from pathlib import Path
from typing import Any

from bench.measuring import report
from triptych.measure.load.processes import named_children, usage
from triptych.measure.machine import machine
from triptych.topology import Topology

TIMEOUT = 300.0
"""Seconds for one service, its restarts included."""


def measure(model: str, topology: str, threads: int) -> dict[str, float]:
    """Return seconds, processor seconds and MiB of one start, and seconds of each instance's restart."""
    words = ("serve", model, "--port", "0", "--topology", topology, "--threads", str(threads))
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "triptych", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        too_late = threading.Timer(TIMEOUT, process.kill)
        too_late.start()
        try:
            joins = [rf"\b{name} joined as " for name in Topology.parse(topology).names]
            _wait_for(process, r"^ready: ", *joins)
            found = {"start, s": time.monotonic() - began}
            used = usage(process.pid)
            found |= {"start, processor s": used.cpu_seconds, "memory, MiB": used.proportional_bytes / 2**20}
            for name, join in zip(Topology.parse(topology).names, joins, strict=True):
                began = time.monotonic()
                kill(named_children(process.pid)[name], signal.SIGKILL)
                _wait_for(process, join)
                found[f"restart of {name}, s"] = time.monotonic() - began
            return found
        finally:
            process.terminate()
            process.communicate()
            too_late.cancel()


def _wait_for(process: "subprocess.Popen[str]", *patterns: str) -> None:
    """Read lines until each pattern was found."""
    assert process.stdout is not None
    missing = set(patterns)
    for line in process.stdout:
        missing -= {pattern for pattern in missing if re.search(pattern, line)}
        if not missing:
            return
    raise SystemExit(f"the service ended before it wrote {missing}")


def table(rounds: Sequence[dict[str, float]], topology: str) -> list[str]:
    """Return rows of Markdown: median, and smallest to largest."""
    rows = []
    for name in rounds[0]:
        values = sorted(one[name] for one in rounds)
        rows.append(f"| {topology} | {name} | {statistics.median(values):.2f} | {values[0]:.2f}–{values[-1]:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, or demo")
    parser.add_argument("--topology", nargs="+", default=["1EPD", "1E1PD", "1E1P1D"])
    parser.add_argument("--threads", type=int, default=1, help="threads of each instance (default: 1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    given = parser.parse_args()
    measured: dict[str, Any] = {}
    lines = ["| topology | what | median | range |", "| --- | --- | --- | --- |"]
    for topology in given.topology:
        measured[topology] = [measure(given.model, topology, given.threads) for _ in range(given.rounds)]
        lines += table(measured[topology], topology)
    print(*lines, sep="\n")
    report({"machine": machine(), "rounds": measured}, given.out)


if __name__ == "__main__":
    main()
