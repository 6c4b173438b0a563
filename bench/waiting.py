"""Whether small requests wait for others' videos: time to first token of texts and of small images beside videos of a
minute, and alone; and how long the videos take beside them, and one after another alone.

    python -m bench.waiting --out bench/results/waiting.json
    python -m bench.waiting --topologies 1EPD --videos 2 --seconds 20 --model FOLDER

Within each topology, all media differ, so that no cache helps. The checkpoint has random weights: the tower of
``bench.make_checkpoint``'s ``mid`` before a small decoder. Texts and images are asked one after another, each a moment
after the answer before, at first alone and then for as long as the videos, all sent at once, take.

``waited_for`` says where texts waited beside the videos: the median milliseconds of each interval of their timelines.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.measuring import report
from bench.serve import Load, Sample, ask, request_body
from bench.several_encoders import make_mid, video
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.machine import machine
from triptych.topology import Topology

MODEL = "m"
SMALL: dict[str, Load] = {
    "text": Load(0, text_length=128, output_tokens=4),
    "image": Load(1, 224, 224, text_length=16, output_tokens=4),
}
PAUSE = 0.2
"""Seconds between an answer and the next request."""


class Asking:
    """A client of a service, which asks nothing twice."""

    def __init__(self, client: httpx.AsyncClient, seconds: int) -> None:
        self._client = client
        self._seconds = seconds
        self._asked = 0

    async def small(self, kind: str) -> Sample:
        """Ask a small request."""
        self._asked += 1
        return _checked(await ask(self._client, request_body(MODEL, SMALL[kind], self._asked)))

    def body_of_video(self) -> dict[str, Any]:
        """Make a request with a video."""
        self._asked += 1
        body = request_body(MODEL, Load(0, text_length=16, output_tokens=1), self._asked)
        body["messages"][0]["content"][:0] = video(self._seconds)(self._asked)
        return body

    async def videos(self, bodies: Sequence[dict[str, Any]], at_once: int) -> float:
        """Ask requests with videos, ``at_once`` of them at a time. Returns the seconds until the last is answered."""
        began, free = time.perf_counter(), asyncio.Semaphore(at_once)

        async def one(body: dict[str, Any]) -> None:
            async with free:
                _checked(await ask(self._client, body))

        async with asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(one(body))
        return time.perf_counter() - began

    async def in_turns(self, number: int, until: asyncio.Event | None = None) -> dict[str, list[Sample]]:
        """Ask ``number`` small requests of each kind; with an event, until it is set."""
        samples: dict[str, list[Sample]] = {kind: [] for kind in SMALL}
        while not until.is_set() if until else len(samples["text"]) < number:
            for kind, found in samples.items():
                found.append(await self.small(kind))
                await asyncio.sleep(PAUSE)
        return samples


def _checked(sample: Sample) -> Sample:
    if sample.error:
        raise SystemExit(sample.error)
    return sample


def p99(samples: Sequence[Sample]) -> float:
    """Return the 99th percentile of the times to first token, in seconds."""
    times = sorted(sample.ttft for sample in samples)
    return times[min(len(times) - 1, round(0.99 * (len(times) - 1)))]


def intervals(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the median milliseconds of each stage in the timelines."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for one in sample.timeline:
            found.setdefault(one["stage"], []).append(one["end_ms"] - one["start_ms"])
    return {stage: round(statistics.median(times), 1) for stage, times in found.items()}


async def measure_topology(folder: Path, topology: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a topology's figures."""
    engine = EngineConfig(threads=options.threads, dtype="auto", kv_cache_tokens=32768)
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
    async with Service(config, Topology.parse(topology), show=lambda _: None) as service:
        await service.wait_until_ready()
        async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None) as client:
            asking = Asking(client, options.seconds)
            await asking.in_turns(4)
            first, *bodies = [asking.body_of_video() for _ in range(2 * options.videos + 1)]
            await asking.videos([first], 1)
            alone = await asking.in_turns(options.requests)
            in_sequence = await asking.videos(bodies[: options.videos], 1)
            ended = asyncio.Event()
            beside = asyncio.create_task(asking.in_turns(0, ended))
            together = await asking.videos(bodies[options.videos :], options.videos)
            ended.set()
            loaded = await beside
    kinds = {
        kind: {
            "requests": [len(alone[kind]), len(loaded[kind])],
            "p99_ms_alone": round(1e3 * p99(alone[kind]), 1),
            "p99_ms_beside": round(1e3 * p99(loaded[kind]), 1),
            "p50_ms_alone": round(1e3 * statistics.median(one.ttft for one in alone[kind]), 1),
            "p50_ms_beside": round(1e3 * statistics.median(one.ttft for one in loaded[kind]), 1),
            "p99_ratio": round(p99(loaded[kind]) / p99(alone[kind]), 2),
            "waited_for": {"alone": intervals(alone[kind]), "beside": intervals(loaded[kind])},
        }
        for kind in SMALL
    }
    times = {"seconds_in_sequence": in_sequence, "seconds_beside": together, "ratio": together / in_sequence}
    return {**kinds, "videos": {name: round(value, 2) for name, value in times.items()}}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each topology."""
    found = {}
    with tempfile.TemporaryDirectory() as made:
        if options.model is None:
            make_mid(Path(made))
        for topology in options.topologies:
            found[topology] = await measure_topology((options.model or Path(made)).resolve(), topology, options)
            print(topology, found[topology], flush=True)
    asked = {name: getattr(options, name) for name in ("videos", "seconds", "requests", "threads")}
    return {"machine": machine(), **asked, "topologies": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", default=["1EPD", "1E1PD", "1E1P1D"])
    parser.add_argument("--model", type=Path, help="another checkpoint folder")
    parser.add_argument("--videos", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=60, help="length of each video")
    parser.add_argument("--requests", type=int, default=100, help="texts, and images, that are asked alone")
    parser.add_argument("--threads", type=int, default=1, help="of each instance")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    options = parser.parse_args()
    report(asyncio.run(measure(options)), options.out)


if __name__ == "__main__":
    main()
