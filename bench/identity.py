"""Time to identify a model: with no digest known, and with all of them remembered. Also the time that hashing takes
of its cores, which other processes of the machine affect less.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.identity /tmp/mid --out bench/results/identity-mid.json

The folder's files have been read once before, so that the disk doesn't count: compare with the rate at which yours
reads. Each round begins with an empty cache folder of its own. Files that were just made aren't remembered: wait some
seconds after making the checkpoint.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measuring import report
from triptych.checkpoint.digests import FileDigests
from triptych.checkpoint.safetensors_header import weight_files
from triptych.measure.machine import machine

ROUNDS = 5


def seconds_of(digests: FileDigests, files: list[Path]) -> float:
    began = time.perf_counter()
    digests.of(files)
    return time.perf_counter() - began


def measure(files: list[Path]) -> dict[str, Any]:
    """Return seconds without and with remembered digests, and bytes hashed per second."""
    first, cores, again = [], [], []
    for _ in range(1 + ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            hashing, remembering = FileDigests(), FileDigests()
            began = time.process_time()
            first.append(seconds_of(hashing, files))
            cores.append(time.process_time() - began)
            again.append(seconds_of(remembering, files))
            assert (hashing.num_hashed, remembering.num_hashed) == (len(files), 0)
    seconds, num_bytes = statistics.median(first[1:]), sum(file.stat().st_size for file in files)
    return {
        "files": len(files),
        "gb": round(num_bytes / 1e9, 3),
        "hashing_s": round(seconds, 3),
        "gb_per_s": round(num_bytes / 1e9 / seconds, 2),
        "gb_per_core_s": round(num_bytes / 1e9 / statistics.median(cores[1:]), 2),
        "remembered_ms": round(1e3 * statistics.median(again[1:]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    found = measure(weight_files(options.model))
    report({"machine": machine(), "options": {"model": str(options.model)}, **found}, options.out)


if __name__ == "__main__":
    main()
