"""Goodput under overload: requests per second that are answered within their deadline, as arrivals exceed capacity. The
service should reject the excess at once, and its goodput should not drop.

    python -m bench.overload demo --topology 1E1PD --out bench/results/overload.json

Capacity is measured first, in a closed loop. Then arrivals are Poisson at fractions of it. Each request's deadline is
``--deadline`` times the median duration at capacity, which the service gets as --request-timeout. A separate process
prepares the requests in advance and sends them. The result includes the processor time of that process and of the
frontend (this process), which the instances can't use.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.serve import Load, request_body
from triptych.cli import flags
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.topology import Topology

NUM_CLIENTS = 8
REJECTED = (429, 503)
MOST_PER_SECOND = 100
"""Requests per second that are prepared to measure capacity. All differ, so that caches don't help."""
ANSWER_TIMEOUT = 600.0
"""Seconds after which the load generator abandons a request."""


@dataclasses.dataclass
class RequestOutcome:
    """Outcome of one request."""

    status: int
    """HTTP status, 0 for none."""
    seconds: float
    """Until the answer was complete."""


@dataclasses.dataclass
class Offered:
    """Outcome of a load."""

    outcomes: list[RequestOutcome]
    seconds: float
    cpu_seconds: float
    """Processor time of the load generator."""
    lag: float = 0.0
    """Maximum delay of a request behind its scheduled time, in seconds."""


# ── the generator: a process of its own ──────────────────────────────────────────────────────────────────────


def prepared(url: str, load: Load, seeds: range) -> list[bytes]:
    """Return complete HTTP requests, from each client in turn."""
    host = urlsplit(url).netloc
    found = []
    for seed in seeds:
        body = json.dumps(request_body("m", load, seed)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Authorization: Bearer client-{seed % NUM_CLIENTS}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        found.append(head.encode() + body)
    return found


async def ask(url: str, request: bytes) -> RequestOutcome:
    began = time.monotonic()
    status, answer = 0, b""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
            try:
                writer.write(request)
                status = int((await reader.readline()).split()[1])
                answer = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError, IndexError, ValueError):
        status = status if status in REJECTED else 0
    if status == 200 and (b"[DONE]" not in answer or b'"error"' in answer):
        status = 504  # it timed out after streaming had started
    return RequestOutcome(status, time.monotonic() - began)


def closed_loop(url: str, load: Load, *, concurrency: int, seconds: float) -> Offered:
    """Keep ``concurrency`` requests running, until the time is up or all prepared requests are sent."""

    async def run() -> Offered:
        requests = iter(prepared(url, load, range(10**6, 10**6 + int(MOST_PER_SECOND * seconds))))
        outcomes: list[RequestOutcome] = []
        began, used = time.monotonic(), time.process_time()

        async def worker() -> None:
            while time.monotonic() < began + seconds and (request := next(requests, None)):
                outcomes.append(await ask(url, request))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return Offered(outcomes, time.monotonic() - began, time.process_time() - used)

    return asyncio.run(run())


def open_loop(url: str, load: Load, *, rate: float, seconds: float, seed: int) -> Offered:
    """Send requests at Poisson times for ``seconds`` seconds, regardless of their outcomes."""

    async def run() -> Offered:
        rng = random.Random(seed)
        times = [0.0]
        while times[-1] < seconds:
            times.append(times[-1] + rng.expovariate(rate))
        requests = prepared(url, load, range(seed, seed + len(times)))
        lag = 0.0
        tasks = []
        began, used = time.monotonic(), time.process_time()
        for at, request in zip(times, requests, strict=True):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            lag = max(lag, time.monotonic() - began - at)
            tasks.append(asyncio.create_task(ask(url, request)))
        outcomes = await asyncio.gather(*tasks)
        return Offered(outcomes, time.monotonic() - began, time.process_time() - used, lag)

    return asyncio.run(run())


# ── the service and the summary ──────────────────────────────────────────────────────────────────────────────


def summary(
    offered: Offered, frontend_cpu_seconds: float, *, rate: float, seconds: float, deadline: float
) -> dict[str, Any]:
    outcomes = offered.outcomes
    good = [one for one in outcomes if one.status == 200 and one.seconds <= deadline]
    refused = sorted(one.seconds for one in outcomes if one.status in REJECTED)
    return {
        "rate": round(rate, 3),
        "requests": len(outcomes),
        "goodput": round(len(good) / max(offered.seconds, seconds), 3),
        "good": len(good),
        "late": sum(one.status == 200 for one in outcomes) - len(good),
        "refused": len(refused),
        "timed_out": sum(one.status == 504 for one in outcomes),
        "other": sum(one.status not in (200, 504, *REJECTED) for one in outcomes),
        "refusal_ms_p50": round(1000 * statistics.median(refused), 1) if refused else None,
        "refusal_ms_p99": round(1000 * refused[int(0.99 * (len(refused) - 1))], 1) if refused else None,
        "generator_cores": round(offered.cpu_seconds / offered.seconds, 3),
        "generator_lag_ms_max": round(1000 * offered.lag, 1),
        "frontend_cores": round(frontend_cpu_seconds / offered.seconds, 3),
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    load = Load(options.images, options.size, options.size, options.text_length, options.output_tokens)
    engine = EngineConfig(threads=options.threads, max_num_seqs=options.max_num_seqs)
    folder = flags.model_folder(options.model)
    settings = {name: str(value) for name, value in vars(options).items() if name != "out"}
    results: dict[str, Any] = {"options": settings, "rates": []}

    def config(timeout: float) -> ServeConfig:
        frontend = FrontendConfig.of(
            port=0, served_model_name="m", request_timeout=timeout, max_queue=options.max_queue
        )
        return ServeConfig(model=folder, engine=engine, frontend=frontend)

    topology = Topology.parse(options.topology)
    deadline = ANSWER_TIMEOUT
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as generator:
        for share in (0.0, *options.shares):  # a new service for each, without backlog or learned estimates
            async with Service(config(deadline), topology, show=lambda _: None) as service:
                await service.wait_until_ready()
                in_generator = partial(asyncio.get_running_loop().run_in_executor, generator)
                seconds = options.seconds / 2 if share else options.seconds
                closed = partial(closed_loop, service.url, load, concurrency=options.concurrency, seconds=seconds)
                warm = await in_generator(closed)
                if not share:
                    good = [one.seconds for one in warm.outcomes if one.status == 200]
                    typical = statistics.median(good)
                    deadline = options.deadline * typical
                    results |= {"capacity": round(len(good) / warm.seconds, 3), "typical_s": round(typical, 3)}
                    results |= {"deadline_s": round(deadline, 3)}
                    continue
                how: dict[str, float] = {"rate": share * results["capacity"], "seconds": options.seconds}
                used = time.process_time()
                offered = await in_generator(partial(open_loop, service.url, load, seed=int(share * 10**9), **how))
                entry = summary(offered, time.process_time() - used, deadline=deadline, **how)
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
