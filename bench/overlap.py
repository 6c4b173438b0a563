"""Benefit of prefilling rows that have landed while others are being encoded: time to first token of one request with
several images or a video, compared with a prefill that waits for all rows.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.overlap /tmp/mid --out bench/results/overlap-mid.json
    python -m bench.overlap /tmp/mid --video-seconds 30 --out bench/results/overlap-video-mid.json

Two services of an encode and a language instance each, with one thread per instance, get requests alternately. Waiting
for all rows is an option of this benchmark only.
"""

import argparse
import asyncio
import base64
import json
import multiprocessing
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.preprocess import make_video
from bench.serve import Load, Sample, ask, request_body
from triptych.cli.waterfall import waterfall
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.machine import machine
from triptych.server.frontend import Frontend
from triptych.topology import Role

START_TIMEOUT = 120.0
RECEIVE_BLOCKS = 256
"""Enough for all rows of a request, without which the service that waits for all rows would deadlock."""
MODEL = "m"


def run_instance(config: ServeConfig, role: Role, join: str, waits: bool) -> None:
    """Main function of an instance's process: the product's entry point, modified to wait for all rows."""
    from triptych.engine.embedding_source import EmbeddingSource
    from triptych.server import instance_main

    if waits:
        as_they_land = EmbeddingSource.ready_tokens

        def once_all_have_landed(media: EmbeddingSource, active: Any) -> int:
            ready = as_they_land(media, active)
            return ready if ready == len(active.request.tokens) else active.request.num_computed

        EmbeddingSource.ready_tokens = once_all_have_landed  # type: ignore[assignment, method-assign]
    instance_main.run(config.instance(role, role.value.lower(), join))


@dataclass
class Setup:
    """A running service and its instances' processes."""

    service: Frontend
    client: httpx.AsyncClient
    processes: list[BaseProcess]

    async def ask(self, body: dict[str, Any]) -> Sample:
        sample = await ask(self.client, body)
        if sample.error:
            raise SystemExit(sample.error)
        return sample


async def start(stack: AsyncExitStack, config: ServeConfig, *, waits: bool) -> Setup:
    service = await stack.enter_async_context(Frontend(config))
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None))
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=run_instance, args=(config, role, service.control, waits), daemon=True)
        for role in (Role.E, Role.PD)
    ]
    for process in processes:
        process.start()
        stack.callback(process.join, 10.0)
        stack.callback(process.terminate)
    async with asyncio.timeout(START_TIMEOUT):
        while (await client.get("/ready")).status_code != httpx.codes.OK:
            await asyncio.sleep(0.1)
            if any(process.exitcode is not None for process in processes):
                raise SystemExit("an instance has exited")
    return Setup(service, client, processes)


def body_of(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return a request with images, or with a video, unique to the seed."""
    if not options.video_seconds:
        load = Load(options.images, options.size, options.size, options.text_length, output_tokens=2)
        return request_body(MODEL, load, seed)
    body = request_body(MODEL, Load(0, text_length=options.text_length, output_tokens=2), seed)
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        make_video(Path(file.name), 30 * options.video_seconds, options.size, options.size, seed)
        url = f"data:video/mp4;base64,{base64.b64encode(file.read()).decode()}"
    body["messages"][0]["content"].insert(0, {"type": "video_url", "video_url": {"url": url}})
    return body


def overlap_ms(timeline: list[dict[str, Any]]) -> float:
    """Return how long prefill ran before the last item was encoded."""
    encoded = max(row["end_ms"] for row in timeline if row["stage"] == "encode")
    prefills = [row for row in timeline if row["stage"] == "prefill"]
    return round(sum(max(0.0, min(row["end_ms"], encoded) - row["start_ms"]) for row in prefills), 1)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    engine = EngineConfig(
        threads=1,
        max_num_batched_tokens=options.max_num_batched_tokens,
        dtype=options.dtype,
        receive_blocks=RECEIVE_BLOCKS,
    )
    config = ServeConfig(
        model=options.model, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL)
    )
    samples: dict[str, list[Sample]] = {"overlap": [], "waits": []}
    async with AsyncExitStack() as stack:
        setups = {name: await start(stack, config, waits=name == "waits") for name in samples}
        for setup in setups.values():
            await setup.ask(request_body(MODEL, Load(1, options.size, options.size, 16, output_tokens=2), 10**6))
        for number in range(options.rounds):
            body = body_of(options, seed=number)
            for name, setup in setups.items():
                # new to both services, so that no cache helps
                samples[name].append(await setup.ask(body))
    medians = {name: statistics.median(sample.ttft for sample in found) for name, found in samples.items()}
    return {
        "machine": machine(),
        "load": {name: str(value) for name, value in vars(options).items() if name != "out"},
        "prompt_tokens": samples["overlap"][0].prompt_tokens,
        "ttft_s": {name: round(seconds, 3) for name, seconds in medians.items()},
        "ratio": round(medians["overlap"] / medians["waits"], 3),
        "raw_ttft_s": {name: [round(sample.ttft, 3) for sample in found] for name, found in samples.items()},
        "prefill_before_last_encode_ms": {
            name: statistics.median(overlap_ms(sample.timeline) for sample in found) for name, found in samples.items()
        },
        "timelines": {name: found[-1].timeline for name, found in samples.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--video-seconds", type=int, default=0, help="a video of this length instead of images")
    parser.add_argument("--size", type=int, default=448)
    parser.add_argument("--text-length", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON, and the waterfalls as .txt")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    console = Console(width=110, record=True)
    for name, timeline in result["timelines"].items():
        console.print(f"{name}: first token after {result['ttft_s'][name]} s (median of {options.rounds})")
        console.print(waterfall(timeline))
    console.print(f"ratio {result['ratio']}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        options.out.with_suffix(".txt").write_text(console.export_text())


if __name__ == "__main__":
    main()
