"""Hit rates and times to the first token by placement policy, on the bundled demo model, beside one instance of each
role that has as much cache as two.

``chats`` are conversations of several turns with pictures of their own and a common system prompt. ``popular`` asks
about pictures of Zipf popularity, each time with another text before the picture, so that only encoder caches help; all
caches together hold a part of the pictures.

    python -m bench.placement [--quick] [--rounds 3] [--output FILE]
"""

import argparse
import asyncio
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.measuring import report
from bench.serve import STREAMED, WORDS, Sample, closed_loop, random_jpeg
from triptych.cluster.service import Service
from triptych.config import EncodeConfig, EngineConfig, FrontendConfig, LeaseConfig, ServeConfig
from triptych.config.admission import PLACEMENTS
from triptych.demo import MODEL_DIR
from triptych.topology import Topology

SERVICES = {"2E1P2D": "1E1P1D", "2E2PD": "1E1PD"}
"""Topologies, and the same with one instance of each role."""
MODEL = "m"
KV_CACHE_TOKENS = 16_384
"""Of one language instance: more than all chats need."""
ENCODE_CACHE_MB = 1
HEARTBEAT = 0.2
SYSTEM = " ".join(WORDS * 4)
ANSWER = "it is a green wheel under a cloud"
"""Stands for every answer in the next turn's prompt, so that all runs have the same prompts."""
SIDE = 192
"""Of a picture, in pixels."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    chats: int = 32
    turns: int = 5
    popular: int = 400
    """Requests about popular pictures."""
    pictures: int = 80
    concurrency: int = 6
    zipf: float = 0.8


QUICK = Size(chats=8, turns=3, popular=60, pictures=30)


def picture(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": random_jpeg(SIDE, SIDE, number)}}


def words(rng: random.Random, count: int) -> dict[str, Any]:
    return {"type": "text", "text": " ".join(rng.choices(WORDS, k=count))}


def body(messages: Messages) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
        **STREAMED,
    }


def chats(size: Size) -> Iterator[list[dict[str, Any]]]:
    """Yield the requests of each turn. Every chat has a picture in its first turn, and another one in its third."""
    rng = random.Random(1)
    held: list[Messages] = [[{"role": "system", "content": SYSTEM}] for _ in range(size.chats)]
    for turn in range(size.turns):
        for number, messages in enumerate(held):
            shown = [picture(1000 * (turn + 1) + number)] if turn in (0, 2) else []
            messages.append({"role": "user", "content": [*shown, words(rng, 12)]})
        bodies = [body(list(messages)) for messages in held]
        rng.shuffle(bodies)
        yield bodies
        for messages in held:
            messages.append({"role": "assistant", "content": ANSWER})


def popular(size: Size) -> Iterator[list[dict[str, Any]]]:
    """Yield requests about pictures of which some are asked about often."""
    rng = random.Random(2)
    weights = [1 / (rank + 1) ** size.zipf for rank in range(size.pictures)]
    shown = rng.choices(range(size.pictures), weights, k=size.popular)
    yield [body([{"role": "user", "content": [words(rng, 12), picture(number)]}]) for number in shown]


LOADS = {"chats": chats, "popular": popular}


async def counters(client: httpx.AsyncClient) -> dict[str, dict[str, float]]:
    """Return the counters of each instance, by its name and their own. Waits until heartbeats have brought them."""
    await asyncio.sleep(3 * HEARTBEAT)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for line in (await client.get("/metrics")).text.splitlines():
        if series := re.fullmatch(r'triptych:(\w+)_total\{.*instance_name="(\w+)".*\} (\S+)', line):
            found[series[2]][series[1]] = float(series[3])
    return found


def difference(after: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {counter: value - before[name].get(counter, 0.0) for counter, value in counts.items()}
        for name, counts in after.items()
    }


def hit_rate(instances: Sequence[dict[str, float]], cache: str) -> float | None:
    queries = sum(one[f"{cache}_cache_queries"] for one in instances)
    return sum(one[f"{cache}_cache_hits"] for one in instances) / queries if queries else None


def busiest(instances: Sequence[dict[str, float]], counter: str) -> float | None:
    """Return the largest share that an instance has of a counter."""
    total = sum(one[counter] for one in instances)
    return max(one[counter] for one in instances) / total if total else None


def summary(found: dict[str, dict[str, float]], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return hit rates by role, times to the first token, and the share that the busiest instance of a role has of the
    prompt tokens or of the items: of those that were looked up, and of those that it encoded."""
    times = sorted(sample.ttft * 1000 for sample in samples if not sample.error)
    by_role: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, counts in found.items():
        by_role[name.rstrip("0123456789")].append(counts)
    language = {role: instances for role, instances in by_role.items() if role != "e"}
    return {
        "errors": sum(bool(sample.error) for sample in samples),
        "encoder_hit_rate": hit_rate(by_role["e"], "mm"),
        "items_encoded": sum(one["mm_items_encoded"] for one in by_role["e"]),
        "prefix_hit_rate": {role: hit_rate(instances, "prefix") for role, instances in language.items()},
        "busiest_share": {
            "e": busiest(by_role["e"], "mm_cache_queries"),
            "e, encoded": busiest(by_role["e"], "mm_items_encoded"),
        }
        | {role: busiest(instances, "prefix_cache_queries") for role, instances in language.items()},
        "ttft_ms": {"p50": statistics.median(times), "p99": times[int(0.99 * len(times))]},
    }


async def measure(topology: str, placement: str, size: Size, caches: int) -> list[dict[str, Any]]:
    """Start a service, ask it everything of each load and stop it. ``caches`` multiplies the size of its caches."""
    results = []
    config = ServeConfig(
        model=MODEL_DIR,
        engine=EngineConfig(threads=1, kv_cache_tokens=caches * KV_CACHE_TOKENS),
        encode=EncodeConfig(encode_cache_mb=caches * ENCODE_CACHE_MB),
        frontend=FrontendConfig.of(port=0, served_model_name=MODEL, placement=placement),
        lease=LeaseConfig(heartbeat=HEARTBEAT),
    )
    async with Service(config, Topology.parse(topology), show=lambda _: None) as service:
        await service.wait_until_ready()
        async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=600) as client:
            before = await counters(client)
            for name, load in LOADS.items():
                samples = [one for bodies in load(size) for one in await closed_loop(client, bodies, size.concurrency)]
                after = await counters(client)
                setup = {"load": name, "topology": topology, "placement": placement if caches == 1 else "one instance"}
                results.append(setup | summary(difference(after, before), samples))
                before = after
    return results


async def compare(services: Sequence[str], size: Size, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of every service. Services alternate within a round, because the machine's speed varies."""
    results: list[dict[str, Any]] = []
    for _ in range(rounds):
        for topology in services:
            results += await measure(SERVICES[topology], PLACEMENTS[0], size, 2)
            for placement in PLACEMENTS:
                results += await measure(topology, placement, size, 1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests, one topology")
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=list(SERVICES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    services = options.services[-1:] if options.quick else options.services
    results = asyncio.run(compare(services, size, options.rounds))
    report({"size": vars(size), "results": results}, options.output)


if __name__ == "__main__":
    main()
