"""Goodput under overload: requests that are answered within their deadline, per second, as arrivals grow past what the
service can do. What it can't do it should refuse at once, and do no less of the rest.

    python -m bench.overload demo --topology 1E1PD --out bench/results/overload.json

Capacity is measured first, closed-loop. Then arrivals are Poisson at shares of it; each request has a deadline of
``--deadline`` times what one takes alone under full load, which the service knows as --request-timeout.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from bench.serve import Load, request_body
from triptych.cli import flags
from triptych.cluster.service import LocalService
from triptych.config import EngineConfig, FrontDoorConfig, ServeConfig
from triptych.topology import Topology

CALLERS = 8
REFUSED = (429, 503)


@dataclasses.dataclass
class Outcome:
    """How one request went: its status, and seconds until its answer was whole."""

    status: int
    seconds: float


async def ask(client: httpx.AsyncClient, body: dict[str, Any], caller: int) -> Outcome:
    began = time.monotonic()
    try:
        response = await client.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer caller-{caller}"}
        )
        status = response.status_code
    except httpx.HTTPError:
        status = 0
    return Outcome(status, time.monotonic() - began)


async def capacity(client: httpx.AsyncClient, load: Load, concurrency: int, seconds: float) -> tuple[float, float]:
    """Requests per second with so many at a time, and the median time of one."""
    outcomes: list[Outcome] = []
    until = time.monotonic() + seconds

    async def worker(number: int) -> None:
        seed = number * 10**6
        while time.monotonic() < until:
            outcomes.append(await ask(client, request_body("m", load, seed), number % CALLERS))
            seed += 1

    began = time.monotonic()
    await asyncio.gather(*(worker(number) for number in range(concurrency)))
    took = time.monotonic() - began
    good = [one.seconds for one in outcomes if one.status == 200]
    return len(good) / took, statistics.median(good)


async def at_rate(
    client: httpx.AsyncClient, load: Load, *, rate: float, seconds: float, deadline: float, seed: int
) -> dict[str, Any]:
    """Open-loop arrivals for so many seconds."""
    rng = random.Random(seed)
    tasks: list[asyncio.Task[Outcome]] = []
    began = time.monotonic()
    at = 0.0
    while at < seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        number = len(tasks)
        body = request_body("m", load, seed + number)
        tasks.append(asyncio.create_task(ask(client, body, number % CALLERS)))
        at += rng.expovariate(rate)
    outcomes = await asyncio.gather(*tasks)
    took = time.monotonic() - began
    good = [one for one in outcomes if one.status == 200 and one.seconds <= deadline]
    refused = sorted(one.seconds for one in outcomes if one.status in REFUSED)
    return {
        "rate": round(rate, 3),
        "requests": len(outcomes),
        "goodput": round(len(good) / max(took, seconds), 3),
        "good": len(good),
        "late": sum(one.status == 200 for one in outcomes) - len(good),
        "refused": len(refused),
        "timed_out": sum(one.status == 504 for one in outcomes),
        "other": sum(one.status not in (200, 504, *REFUSED) for one in outcomes),
        "refusal_ms_p50": round(1000 * statistics.median(refused), 1) if refused else None,
        "refusal_ms_p99": round(1000 * refused[int(0.99 * (len(refused) - 1))], 1) if refused else None,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    load = Load(options.images, options.size, options.size, options.text_length, options.output_tokens)
    engine = EngineConfig(threads=options.threads, max_num_seqs=options.max_num_seqs)
    folder = flags.model_folder(options.model)
    results: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}, "rates": []}

    def config(timeout: float) -> ServeConfig:
        door = FrontDoorConfig(port=0, served_model_name="m", request_timeout=timeout, max_queue=options.max_queue)
        return ServeConfig(model=folder, engine=engine, front_door=door)

    limits = httpx.Limits(max_connections=None)
    topology = Topology.parse(options.topology)
    deadline = 600.0
    for share in (0.0, *options.shares):  # a service for each: none begins with another's backlog or estimates
        async with LocalService(config(deadline), topology, show=lambda _: None) as service:
            await service.wait_until_ready()
            async with httpx.AsyncClient(
                base_url=service.url, trust_env=False, timeout=deadline + 30, limits=limits
            ) as client:
                warm = options.seconds / 2
                rate, typical = await capacity(
                    client, load, options.concurrency, options.seconds if not share else warm
                )
                if not share:
                    deadline = options.deadline * typical
                    results |= {"capacity": round(rate, 3), "typical_s": round(typical, 3), "deadline_s": deadline}
                    continue
                arrivals = share * results["capacity"]
                entry = await at_rate(
                    client, load, rate=arrivals, seconds=options.seconds, deadline=deadline, seed=int(share * 10**9)
                )
                results["rates"].append({"share": share} | entry)
                print(json.dumps(results["rates"][-1]), flush=True)
    peak = max(entry["goodput"] for entry in results["rates"])
    for entry in results["rates"]:
        entry["of_peak"] = round(entry["goodput"] / peak, 3) if peak else None
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint folder, or demo")
    parser.add_argument("--topology", default="1E1PD")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-queue", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=16, help="at which capacity is measured")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--deadline", type=float, default=3.0, help="times the median request at capacity")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--text-length", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = json.dumps(asyncio.run(measure(options)), indent=2)
    print(result)
    if options.out:
        options.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
