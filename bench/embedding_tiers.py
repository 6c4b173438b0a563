"""What a hit in each tier of the encoder cache costs, beside encoding the picture again.

    python -m bench.embedding_tiers --out bench/results/embedding-tiers.json
    python -m bench.embedding_tiers --sizes 448 --rounds 3 --tiers memory shm

The tower is that of ``bench.make_checkpoint``'s ``mid``, with rows as wide as there. Encoding again goes from a JPEG to
rows: preprocessing in one thread, and the tower in ``--threads``. A hit goes from a lookup of the part's name to its
rows. All ways take turns, so that the machine's speed is the same for them.

``memory`` is the instance's own. Rows of ``shm``, ``disk`` and ``pool`` were put there by another store, as by another
process. Before each read, a disk's file is dropped from the page cache. The pool is a Mooncake Store whose master and
memory are other processes of this machine.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.families import picture
from bench.make_checkpoint import PRESETS
from bench.measuring import like_an_instance, report
from tests.support.mooncake_pool import mooncake_master
from tests.support.random_checkpoint import model_config, write_settings, write_tokenizer, write_weights
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.compute_thread import ComputeThread
from triptych.config import EngineConfig
from triptych.encode import pool_store
from triptych.encode.file_store import FileStore
from triptych.encode.pool_store import PoolStore
from triptych.encode.runner import EncoderRunner
from triptych.encode.store import EmbeddingRows, EmbeddingStore, MemoryStore, row_name
from triptych.executor import started_executor
from triptych.measure.machine import machine
from triptych.models.registry import family_of, resolve
from triptych.prompt.probe import probe_image
from triptych.server.model_bundle import ModelBundle

ROOM = 2**30
AGAIN = "encode"
TIERS = ("memory", "shm", "disk", "pool")


def make_mid(folder: Path) -> None:
    """Write a checkpoint with the tower of ``mid``, and rows as wide, before one layer of a decoder."""
    sizes = replace(PRESETS["mid"], layers=4, vocabulary=2000)
    write_settings(folder, sizes)
    write_tokenizer(folder, sizes.vocabulary)
    write_weights(folder, model_config(sizes), 0, torch.bfloat16, sizes=sizes)


def encoding(folder: Path, threads: int, stack: ExitStack) -> Callable[[bytes], EmbeddingRows]:
    """Return what makes a picture's rows of its file."""
    config, settings = load_config(folder), (load_preprocessor_config(folder), load_video_config(folder))
    family = family_of(config)
    assert family.preprocessor is not None
    planner, preprocess = (resolve(name)(config, *settings) for name in (family.planner, family.preprocessor))
    model = ModelBundle(Checkpoint(folder), EngineConfig(threads=threads, dtype="auto"))
    executor = stack.enter_context(started_executor(1, "compute"))
    compute = ComputeThread(executor, SystemClock(), lambda: None)
    runner = EncoderRunner(model.load_encoder(), model.weights.activations, compute)

    def encode(data: bytes) -> EmbeddingRows:
        (part,) = preprocess(data, planner.plan(probe_image(data)))
        (rows,) = runner.encode([part])
        return rows

    return encode


def stores(names: list[str], folder: Path, stack: ExitStack) -> dict[str, tuple[EmbeddingStore, EmbeddingStore]]:
    """Return, for each tier, a store that rows are put in, and the one that they are looked up in."""
    memory = MemoryStore(ROOM)
    found: dict[str, tuple[EmbeddingStore, EmbeddingStore]] = {"memory": (memory, memory)}
    for name, place in (
        ("shm", Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))),
        ("disk", folder),
    ):
        both = [FileStore(place / "rows", ROOM, SystemClock(), started_executor, name=name) for _ in range(2)]
        for one in both:
            stack.callback(one.close)
        found[name] = both[0], both[1]
    if "pool" in names:
        pool_store.LOOKUP_SECONDS = pool_store.PUT_SECONDS = 60.0  # each is measured, however slow
        master = stack.enter_context(mooncake_master(lends=False))
        master.lend(ROOM // 4)
        found["pool"] = stack.enter_context(master.store()), stack.enter_context(master.store())
    return {name: found[name] for name in names}


def drop_pages(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a square picture: milliseconds, and their ratio to those of encoding it again."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))) for _ in range(2)]
        make_mid(folders[0])
        encode, data = encoding(folders[0], options.threads, stack), picture(size, size)
        rows, name = encode(data), row_name("layout", "picture", "")
        tiers = stores(options.tiers, folders[1], stack)
        for written, _ in tiers.values():
            written.put([name], rows)

        for written, _ in tiers.values():
            if isinstance(written, FileStore | PoolStore):
                written.flush()
        seconds: dict[str, list[float]] = {way: [] for way in (AGAIN, *tiers)}
        for _ in range(options.rounds):
            began = time.perf_counter()
            encode(data)
            seconds[AGAIN].append(time.perf_counter() - began)
            drop_pages(folders[1] / "rows")
            for tier, (_, store) in tiers.items():
                began = time.perf_counter()
                (found,) = store.lookup([name]).result(60)
                seconds[tier].append(time.perf_counter() - began)
                if found is None or (found != rows).any():
                    raise SystemExit(f"{tier}: the rows aren't there")
        return summary(seconds) | {"rows": len(rows), "mib": round(rows.nbytes / 2**20, 2)}


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians in ms, and of the tiers the median and the spread of each round's ratio to encoding."""
    again = seconds[AGAIN]
    figures: dict[str, Any] = {AGAIN: {"ms": round(1000 * statistics.median(again), 2)}}
    for tier, times in seconds.items():
        if tier != AGAIN:
            ratios = sorted(one / other for one, other in zip(times, again, strict=True))
            figures[tier] = {
                "ms": round(1000 * statistics.median(times), 2),
                "ratio": round(statistics.median(ratios), 4),
                "lowest": round(ratios[0], 4),
                "highest": round(ratios[-1], 4),
            }
    return figures


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[448, 1344], help="sides of the pictures, in pixels")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: that of /tmp")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    like_an_instance(options.threads)
    found = {f"{size} × {size}": measure(size, options) for size in options.sizes}
    report({"machine": machine(), "threads": options.threads, "rounds": options.rounds, "sizes": found}, options.out)


if __name__ == "__main__":
    main()
