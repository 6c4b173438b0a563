"""Goodput of several topologies on the same cores, under mixed loads with Poisson arrivals: the requests per second
that meet two targets, time to first token and time per output token.

    python -m bench.make_checkpoint /tmp/small --preset small
    python -m bench.goodput /tmp/small --out bench/results/goodput-small.json --plot docs/pictures/goodput.png

The targets are the same for every topology: multiples of what such a request takes on the first setup by itself. Rates
are multiples of that setup's closed-loop throughput. Within one run every setup gets the same requests at the same
times.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.serve import Load, Sample, ask, closed_loop, report, request_body
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.measure.machine import machine
from triptych.topology import Topology

SETUPS = ("1EPD:2", "2EPD:1", "1E1PD:1", "1EP1D:1")
TTFT_TIMES, TPOT_TIMES = 5.0, 2.0
OUTPUT_TOKENS = 32
MODEL = "m"

TEXT = Load(images=0, text_length=256, output_tokens=OUTPUT_TOKENS)
SMALL = Load(images=1, width=256, height=256, text_length=128, output_tokens=OUTPUT_TOKENS)
LARGE = Load(images=1, width=512, height=512, text_length=128, output_tokens=OUTPUT_TOKENS)
MANY = Load(images=4, width=256, height=256, text_length=128, output_tokens=OUTPUT_TOKENS)

MIXES: dict[str, dict[Load, float]] = {
    "image-heavy": {SMALL: 0.3, LARGE: 0.4, MANY: 0.2, TEXT: 0.1},
    "image-light": {SMALL: 0.15, LARGE: 0.05, TEXT: 0.8},
    "text-only": {TEXT: 1.0},
}


@dataclass(frozen=True)
class Promise:
    """Latency targets in seconds."""

    ttft: float
    tpot: float

    def kept(self, sample: Sample) -> bool:
        return not sample.error and sample.ttft <= self.ttft and sample.tpot <= self.tpot


@dataclass(frozen=True)
class Arrival:
    """A request that is sent ``after`` seconds from the start."""

    after: float
    load: Load
    seed: int


def arrivals(mix: dict[Load, float], rate: float, requests: int, seed: int) -> list[Arrival]:
    """Return Poisson arrivals at ``rate`` per second, each of a random kind."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    now = 0.0
    while len(found) < requests:
        load = rng.choices(list(mix), weights=list(mix.values()))[0]
        found.append(Arrival(now, load, rng.randrange(2**31)))
        now += rng.expovariate(rate)
    return found


def offered(at: Sequence[Arrival]) -> float:
    """Return the actual arrival rate, which for few requests differs from the nominal one."""
    return (len(at) - 1) / at[-1].after


async def arrive(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], at: Sequence[Arrival]) -> list[Sample]:
    """Send each body at its time, whether or not earlier ones are done."""
    began, running = time.perf_counter(), []
    for arrival, body in zip(at, bodies, strict=True):
        await asyncio.sleep(max(0.0, began + arrival.after - time.perf_counter()))
        running.append(asyncio.create_task(ask(client, body)))
    return list(await asyncio.gather(*running))


def bodies_of(at: Sequence[Arrival]) -> list[dict[str, Any]]:
    return [request_body(MODEL, arrival.load, arrival.seed) for arrival in at]


class Setup:
    """A running topology with a number of threads per instance, as in ``1E1PD:1``."""

    def __init__(self, folder: Path, name: str) -> None:
        topology, _, threads = name.partition(":")
        engine = EngineConfig(threads=int(threads or 1), kv_cache_tokens=32768)
        config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
        self._service = Service(config, Topology.parse(topology), show=lambda _: None)

    async def __aenter__(self) -> httpx.AsyncClient:
        await self._service.__aenter__()
        await self._service.wait_until_ready()
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=self._service.url, trust_env=False, timeout=None, limits=limits)
        for number, load in enumerate([SMALL, LARGE, MANY, TEXT] * 2):
            await ask(self._client, request_body(MODEL, load, 10**9 + number))
        return self._client

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()
        await self._service.__aexit__(None, None, None)


async def promises(folder: Path, setup: str) -> dict[Load, Promise]:
    """Return the targets per kind of request: its latency by itself times the allowed factor."""
    found = {}
    async with Setup(folder, setup) as client:
        for load in (TEXT, SMALL, LARGE, MANY):
            samples = [await ask(client, request_body(MODEL, load, number)) for number in range(5)]
            ttft, tpot = (statistics.median(getattr(s, name) for s in samples) for name in ("ttft", "tpot"))
            found[load] = Promise(TTFT_TIMES * ttft, TPOT_TIMES * tpot)
    return found


async def capacity(folder: Path, setup: str, mix: dict[Load, float], requests: int) -> float:
    """Return the throughput of a closed loop of eight, in requests per second."""
    at = arrivals(mix, 1.0, requests, seed=1)
    async with Setup(folder, setup) as client:
        bodies, began = bodies_of(at), time.perf_counter()
        await closed_loop(client, bodies, 8)
        return len(bodies) / (time.perf_counter() - began)


def judged(
    at: Sequence[Arrival], samples: Sequence[Sample], promised: dict[Load, Promise], took: float
) -> dict[str, Any]:
    kept = sum(promised[arrival.load].kept(sample) for arrival, sample in zip(at, samples, strict=True))
    shown = report(list(samples), took)
    shown.pop("stages_ms", None)
    return {"kept": round(kept / len(at), 3), **shown}


async def study(options: argparse.Namespace) -> dict[str, Any]:
    promised = await promises(options.model, options.setups[0])
    result: dict[str, Any] = {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(options).items() if name not in {"out", "plot"}},
        "promises_ms": [
            {**asdict(load), "ttft": round(1e3 * p.ttft, 1), "tpot": round(1e3 * p.tpot, 1)}
            for load, p in promised.items()
        ],
        "mixes": {},
    }
    for name in options.mixes:
        base = await capacity(options.model, options.setups[0], MIXES[name], options.requests)
        points: dict[str, list[dict[str, Any]]] = {setup: [] for setup in options.setups}
        for setup in options.setups:
            async with Setup(options.model, setup) as client:
                for times in options.rates:
                    rate = times * base
                    at = arrivals(MIXES[name], rate, options.requests, seed=int(1000 * times))
                    bodies, began = bodies_of(at), time.perf_counter()
                    samples = await arrive(client, bodies, at)
                    shown = judged(at, samples, promised, time.perf_counter() - began)
                    came = offered(at)
                    points[setup].append({"rate": round(came, 3), "goodput": round(came * shown["kept"], 3), **shown})
                    print(name, setup, points[setup][-1], flush=True)
        result["mixes"][name] = {"capacity": round(base, 3), "setups": points, "best": best(points)}
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def best(points: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Return each setup's highest goodput, and its ratio to the first setup's."""
    highest = {setup: max(point["goodput"] for point in found) for setup, found in points.items()}
    first = next(iter(highest.values()))
    return {
        setup: {"goodput": value, "of_first": round(value / first, 3) if first else None}
        for setup, value in highest.items()
    }


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(result["mixes"]), 4.2), layout="constrained")
    for axes, (name, mix) in zip(
        figure.subplots(1, len(result["mixes"]), squeeze=False)[0], result["mixes"].items(), strict=True
    ):
        for setup, points in mix["setups"].items():
            axes.plot([p["rate"] for p in points], [p["goodput"] for p in points], "o-", label=setup)
        top = max(point["rate"] for point in next(iter(mix["setups"].values())))
        axes.plot([0, top], [0, top], ":", color="black", label="all in time")
        axes.set(title=name, xlabel="requests per second offered", ylabel="in time", ylim=(0, None), xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--setups", nargs="+", default=SETUPS, help="topology:threads")
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=MIXES)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.4, 0.7, 1.0], help="of the capacity")
    parser.add_argument("--requests", type=int, default=24, help="at each rate")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON, mix by mix")
    parser.add_argument("--plot", type=Path, help="where to draw goodput over rate; needs matplotlib")
    options = parser.parse_args()
    result = asyncio.run(study(options))
    print(json.dumps({name: mix["best"] for name, mix in result["mixes"].items()}, indent=1))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
