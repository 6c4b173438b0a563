"""Where the time of a decode step goes, while an instance serves a number of requests at a time.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.decode_step /tmp/mid --batches 1 8 --quantization int8 --out bench/results/decode-step-mid.json

The instance is the product's own process, in which calls are timed. Figures are medians over steps, in microseconds.
"""

import argparse
import asyncio
import functools
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.language_limits import read_bandwidth
from bench.measuring import report
from bench.serve import Load, ask, request_body
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.machine import machine
from triptych.server.frontend import Frontend
from triptych.topology import Role

MODEL = "m"
FIRST = 16
"""Steps that are not counted: the engine has just begun with all of the requests."""

Spans = dict[str, list[tuple[float, float]]]
"""By part, when each of its calls began and ended, in seconds."""


def timed(spans: Spans, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spans[name].append((began, time.perf_counter()))

    return wrapper


def time_kernels(spans: Spans, name: str, owner: Any) -> None:
    """Time the compiled call of each object of a class."""
    make = owner.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._run = timed(spans, name, self._run)

    owner.__init__ = made


def run_instance(config: ServeConfig, join: str, out: Path) -> None:
    """Main function of the instance's process: the product's entry point, with timers."""
    from triptych.engine import runner
    from triptych.engine.loop import EngineLoop
    from triptych.layers import compiled_layers, pruned_head
    from triptych.server import instance_main

    spans: Spans = defaultdict(list)
    time_kernels(spans, "layers", compiled_layers.RunLayers)
    time_kernels(spans, "head", pruned_head.PrunedHead)
    model: Any = runner
    model.Runner.logits = timed(spans, "forward", model.Runner.logits)
    model.Runner.run = timed(spans, "run", model.Runner.run)
    model.Runner.batch = timed(spans, "batch", model.Runner.batch)
    model.sample = timed(spans, "sample", model.sample)
    loop: Any = EngineLoop
    for name in ("_schedule_step", "_handle_output", "_send_pending_tokens"):
        setattr(loop, name, timed(spans, name, getattr(loop, name)))
    remove = loop._remove

    def removed(self: Any, active: Any) -> None:
        if len(spans["run"]) > 2 * FIRST:  # the first request to end: from then on the batch is smaller
            out.write_text(json.dumps(spans))
        spans.clear()
        remove(self, active)

    loop._remove = removed
    instance_main.run(config.instance(Role.EPD, "all", join))


def total_within(spans: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    return sum(end - start for start, end in spans if began <= start < ended)


def parts_of_steps(spans: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return the median microseconds of each part of a step. A step lasts from its start on the compute thread to that
    of the next."""
    steps = list(itertools.pairwise(spans["run"]))[FIRST:-1]
    parts: dict[str, list[float]] = defaultdict(list)
    for (began, ended), (following, _) in steps:
        found = {name: total_within(spans.get(name, ()), began, following) for name in spans}
        kernels = [found.get(name, 0.0) for name in ("layers", "head")]
        parts["step"].append(following - began)
        parts["kernels, layers"].append(kernels[0])
        parts["kernels, LM head"].append(kernels[1])
        parts["forward pass without kernels"].append(found["forward"] - sum(kernels))
        parts["sampling"].append(found["sample"])
        parts["between two steps"].append(following - ended)
        parts["of this, scheduling"].append(found["_schedule_step"])
        parts["of this, inputs"].append(found["batch"])
        parts["of this, results"].append(found["_handle_output"])
        parts["of this, sending"].append(found["_send_pending_tokens"])
    return {name: round(1e6 * statistics.median(seconds), 1) for name, seconds in parts.items()}


async def measured(folder: Path, engine: EngineConfig, batch: int, tokens: int, length: int) -> dict[str, float]:
    """Return the parts of steps of ``batch`` requests that generate ``tokens`` tokens after ``length`` characters."""
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
    load = Load(images=0, text_length=length, output_tokens=tokens)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "spans.json")
        async with Frontend(config) as service:
            process = multiprocessing.get_context("spawn").Process(
                target=run_instance, args=(config, service.control, out), daemon=True
            )
            process.start()
            try:
                async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None) as client:
                    bodies = [request_body(MODEL, load, seed) for seed in range(1 + batch)]
                    while (await ask(client, bodies.pop() if len(bodies) > batch else bodies[0])).error:
                        await asyncio.sleep(0.2)
                    own = psutil.Process().cpu_times()
                    await asyncio.gather(*(ask(client, body) for body in bodies))
                    later = psutil.Process().cpu_times()
            finally:
                process.terminate()
                process.join(10.0)
        found = parts_of_steps(json.loads(out.read_text()))
    seconds = later.user + later.system - own.user - own.system
    return found | {"processor time of client and frontend": round(1e6 * seconds / tokens, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64, help="generated by each request")
    parser.add_argument("--length", type=int, default=256, help="characters of each prompt")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    settings: dict[str, Any] = {"dtype": options.dtype, "quantization": options.quantization}
    engine = EngineConfig(device="cpu", threads=options.threads, **settings)
    steps = {
        batch: asyncio.run(measured(options.model, engine, batch, options.tokens, options.length))
        for batch in options.batches
    }
    found = {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(options).items() if name != "out"},
        "read_gb_per_s": round(read_bandwidth(options.threads), 1),
        "steps_us": steps,
    }
    report(found, options.out)


if __name__ == "__main__":
    main()
