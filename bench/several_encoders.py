"""What a second encode instance saves: the time to the last row of one request's media, divided among two instances
and made by one.

    python -m bench.several_encoders --out bench/results/several-encoders.json
    python -m bench.several_encoders --rounds 1 --cases "12 tiles"

Instances have one thread each, so a machine needs a core for each of them and one for the frontend. Checkpoints are
made with random weights: the tower of ``bench.make_checkpoint``'s ``mid``, and InternVL's with tiles of 448 pixels,
before small decoders. A service with one encode instance and one with several get requests in turns; each has its own
media, so that no cache helps. A time goes from the end of planning to the landing of the last row, as the request's
timeline has them.

``--sweep`` asks about short videos instead, divided whatever they cost. Where both services take equally long, dividing
begins to pay; ``SECTION_SECONDS`` of ``triptych/router/division.py`` should be half of that video's encoding.
"""

import argparse
import asyncio
import base64
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from bench.measuring import report
from bench.preprocess import make_video
from bench.serve import Load, Sample, ask, request_body
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.machine import machine
from triptych.router import division
from triptych.server.frontend import Frontend
from triptych.topology import Role

START_TIMEOUT = 120.0
HEARTBEATS = 3.0
"""Seconds after the first requests, in which heartbeats bring what the towers' pace is."""
MODEL = "m"


@dataclass(frozen=True)
class Case:
    """A request that is asked in both ways."""

    checkpoint: str
    media: Callable[[int], list[dict[str, Any]]]
    """Makes the parts of its message, by a number that no other request has."""


def pictures(number: int, width: int, height: int) -> Callable[[int], list[dict[str, Any]]]:
    """Return what makes that many pictures."""

    def make(seed: int) -> list[dict[str, Any]]:
        return request_body(MODEL, Load(number, width, height), seed)["messages"][0]["content"][:-1]

    return make


def video(seconds: int) -> Callable[[int], list[dict[str, Any]]]:
    """Return what makes a video of that length, of 30 frames a second."""

    def make(seed: int) -> list[dict[str, Any]]:
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            make_video(Path(file.name), 30 * seconds, 320, 240, seed)
            url = f"data:video/mp4;base64,{base64.b64encode(file.read()).decode()}"
        return [{"type": "video_url", "video_url": {"url": url}}]

    return make


CASES = {
    "16 images": Case("mid", pictures(16, 448, 448)),
    "60 s of video": Case("mid", video(60)),
    "12 tiles": Case("tiles", pictures(1, 4 * 448, 3 * 448)),
}
SWEEP = {f"{seconds} s of video": Case("mid", video(seconds)) for seconds in (1, 2, 4, 8, 16)}


def make_mid(folder: Path) -> None:
    """Write a checkpoint with the tower of ``mid``. Imports here, since every process imports this module."""
    import torch

    from bench.make_checkpoint import PRESETS
    from tests.support.random_checkpoint import Sizes, model_config, write_settings, write_tokenizer, write_weights

    towers = {name: getattr(Sizes(), name) for name in Sizes.__dataclass_fields__ if name.startswith("vision_")}
    sizes = replace(PRESETS["small"], layers=4, deepstack=(2, 4, 6), **towers)
    write_settings(folder, sizes)
    write_tokenizer(folder, sizes.vocabulary)
    write_weights(folder, model_config(sizes), 0, torch.bfloat16, sizes=sizes)


def make_tiles(folder: Path) -> None:
    """Write an InternVL checkpoint that cuts images into up to twelve tiles of 448 pixels."""
    from tests.support.tiny import OWN_TOWERS, make_tiny

    tiny = OWN_TOWERS["internvl"]
    size = {"height": 448, "width": 448}
    larger = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
    config = tiny.config | {
        "image_seq_length": 256,
        "vision_config": tiny.config["vision_config"] | larger | {"image_size": [448, 448]},
    }
    images = (tiny.preprocessor or {}) | {"size": size, "max_patches": 12}
    videos = (tiny.video_preprocessor or {}) | {"size": size}
    made = replace(tiny, config=config, preprocessor=images, video_preprocessor=videos)
    make_tiny(folder, made)


MAKE = {"mid": make_mid, "tiles": make_tiles}


def run_instance(config: ServeConfig, role: Role, name: str, join: str) -> None:
    """Run an instance in a process of its own."""
    from triptych.server import instance_main

    instance_main.run(config.instance(role, name, join))


@dataclass
class Running:
    """A service, and a client of it."""

    client: httpx.AsyncClient
    asked: int = 0

    async def seconds(self, case: Case) -> tuple[float, list[str]]:
        """Ask once. Return the time to the last row, and the instances that encoded."""
        self.asked += 1
        body = request_body(MODEL, Load(0, text_length=16, output_tokens=1), self.asked)
        body["messages"][0]["content"][:0] = case.media(self.asked)
        sample = await ask(self.client, body)
        if sample.error:
            raise SystemExit(sample.error)
        return last_row(sample), sorted({row["instance"] for row in sample.timeline if row["stage"] == "encode"})


def last_row(sample: Sample) -> float:
    """Return the seconds from the end of planning to the last row."""
    planned = max(row["end_ms"] for row in sample.timeline if row["stage"] == "plan")
    return float(max(row["end_ms"] for row in sample.timeline if row["stage"] == "transfer") - planned) / 1000


async def start(stack: AsyncExitStack, folder: Path, encoders: int) -> Running:
    """Start a service with this many encode instances and a language instance, and have each encode once."""
    engine = EngineConfig(threads=1, dtype="auto", receive_blocks=512)
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
    frontend = await stack.enter_async_context(Frontend(config))
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=frontend.url, trust_env=False, timeout=None))
    context = multiprocessing.get_context("spawn")
    names = [("pd", Role.PD), *((f"e{number}", Role.E) for number in range(encoders))]
    processes: list[BaseProcess] = [
        context.Process(target=run_instance, args=(config, role, name, frontend.control), daemon=True)
        for name, role in names
    ]
    for process in processes:
        process.start()
        stack.callback(process.join, 10.0)
        stack.callback(process.terminate)
    async with asyncio.timeout(START_TIMEOUT):
        while len(frontend.router.membership) < len(names):
            await asyncio.sleep(0.1)
            if any(process.exitcode is not None for process in processes):
                raise SystemExit("an instance has exited")
    return Running(client)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each case."""
    if options.sweep:
        division.SECTION_SECONDS = 0.0
    cases = {name: case for name, case in (SWEEP if options.sweep else CASES).items() if name in options.cases}
    found: dict[str, Any] = {}
    for checkpoint in dict.fromkeys(case.checkpoint for case in cases.values()):
        with tempfile.TemporaryDirectory() as folder:
            MAKE[checkpoint](Path(folder))
            async with AsyncExitStack() as stack:
                numbers = {"one": 1, "several": options.encoders}
                services = {way: await start(stack, Path(folder), number) for way, number in numbers.items()}
                for name, case in cases.items():
                    if case.checkpoint == checkpoint:
                        found[name] = await measure_case(services, case, options.rounds)
    return {"machine": machine(), "encoders": options.encoders, "rounds": options.rounds, "cases": found}


async def measure_case(services: dict[str, Running], case: Case, rounds: int) -> dict[str, Any]:
    """Return one case's seconds in both services, and their ratio, after a request to each that isn't counted."""
    for service in services.values():
        await service.seconds(case)
    await asyncio.sleep(HEARTBEATS)
    seconds: dict[str, list[float]] = {way: [] for way in services}
    instances: dict[str, list[str]] = {}
    for _ in range(rounds):
        for way, times in seconds.items():
            taken, instances[way] = await services[way].seconds(case)
            times.append(round(taken, 3))
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "seconds": medians,
        "ratio": round(medians["several"] / medians["one"], 3),
        "raw": seconds,
        "encoded_by": instances,
    }


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="short videos, to find where dividing begins to pay")
    parser.add_argument("--cases", nargs="*", default=[*CASES, *SWEEP])
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    report(asyncio.run(measure(options)), options.out)


if __name__ == "__main__":
    main()
