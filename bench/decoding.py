"""Cost of preprocessing images in a sandboxed worker, compared with in-process: time per image, and images per second
of several workers.

    python -m bench.decoding                     # the demo model's geometry: small results
    python -m bench.decoding --max-pixels 16777216 --workers 2
"""

import argparse
import io
import json
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from triptych.checkpoint.config_files import load_config, load_preprocessor_config
from triptych.demo import MODEL_DIR
from triptych.encode.workers import PreprocessWorkers
from triptych.models.base import Preprocessor
from triptych.models.registry import family_of, resolve
from triptych.prompt.probe import probe_image
from triptych.sandbox.protocol import Limits
from triptych.types import ItemPlan

SIZES = ((320, 240), (1920, 1080), (4000, 3000))


def jpeg(width: int, height: int) -> bytes:
    blocks = np.random.default_rng(0).integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(blocks).resize((width, height)).save(out, "JPEG", quality=90)
    return out.getvalue()


def milliseconds(work: Preprocessor, data: bytes, plan: ItemPlan, rounds: int) -> float:
    """Return the median time per image, including one read of the result."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for part in work(data, plan):
            part.patches.sum()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(MODEL_DIR), help="a checkpoint folder")
    parser.add_argument("--max-pixels", type=int, default=0, help="of the resized image, instead of the checkpoint's")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for path in arguments.model.glob("*.json"):
            shutil.copy(path, folder)
        config, settings = load_config(Path(folder)), load_preprocessor_config(Path(folder))
        if arguments.max_pixels:
            settings |= {"size": {"shortest_edge": 65_536, "longest_edge": arguments.max_pixels}}
            (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))
        planner = resolve(family_of(config).planner)(config, settings)
        family = family_of(config)
        if family.preprocessor is None:
            parser.error(f"{arguments.model} is a text-only model")
        inside = resolve(family.preprocessor)(config, settings)
        workers = PreprocessWorkers(Path(folder), arguments.workers, Limits())
        workers.wait_until_ready()
        for size in SIZES:
            data = jpeg(*size)
            plan = planner.plan(probe_image(data))
            here = milliseconds(inside, data, plan, arguments.rounds)
            there = milliseconds(workers, data, plan, arguments.rounds)
            with ThreadPoolExecutor(arguments.workers) as threads:
                began = time.perf_counter()
                list(threads.map(lambda _, data=data, plan=plan: list(workers(data, plan)), range(arguments.rounds)))
                rate = arguments.rounds / (time.perf_counter() - began)
            print(
                f"{size[0]:5} x {size[1]:4}: {plan.grid[1] * plan.grid[2]:6} patches, in-process {here:7.1f} ms, in a "
                f"worker {there:7.1f} ms; {rate:6.1f} a second by {arguments.workers}"
            )
        workers.close()


if __name__ == "__main__":
    main()
