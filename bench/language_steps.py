"""Overhead of a step: the time between two forward passes while several sequences decode."""

import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.serve import Load, ask, request_body
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.server.frontend import Frontend
from triptych.topology import Role

MODEL = "m"


def run_instance(config: ServeConfig, join: str, threads: int, batch: int, out: Path) -> None:
    """Main function of the instance's process: the product's entry point, with timing of the model."""
    from triptych.engine.runner import Runner
    from triptych.server import instance_main

    spans: list[tuple[float, float]] = []
    logits: Callable[..., Any] = Runner.logits

    def timed(runner: Runner, step: Any, after_layer: Any) -> Any:
        began = time.perf_counter()
        found = logits(runner, step, after_layer)
        if step.attention[0].query_lens == [1] * batch:
            spans.append((began, time.perf_counter()))
            out.write_text(json.dumps(spans[-200:])) if len(spans) % 20 == 0 else None
        return found

    Runner.logits = timed  # type: ignore[assignment, method-assign]
    instance_main.run(config.instance(Role.EPD, "all", join))


async def overhead(folder: Path, engine: EngineConfig, batch: int) -> dict[str, float]:
    """Return medians in ms over consecutive steps of ``batch`` sequences."""
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "spans.json")
        async with Frontend(config) as service:
            arguments = (config, service.control, engine.threads, batch, out)
            process = multiprocessing.get_context("spawn").Process(target=run_instance, args=arguments, daemon=True)
            process.start()
            try:
                async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None) as client:
                    bodies = [request_body(MODEL, Load(images=0, output_tokens=64), seed) for seed in range(batch)]
                    while (await ask(client, bodies[0])).error:
                        await asyncio.sleep(0.2)
                    await asyncio.gather(*(ask(client, body) for body in bodies))
            finally:
                process.terminate()
                process.join(10.0)
        spans: list[tuple[float, float]] = json.loads(out.read_text())
    between = [later[0] - earlier[1] for earlier, later in itertools.pairwise(spans)]
    return {
        "batch": batch,
        "outside_the_model_ms": round(1e3 * statistics.median(between), 3),
        "model_ms": round(1e3 * statistics.median(end - began for began, end in spans), 2),
    }
