"""Simulates which encode instance gets an item, with the router's own policies and records, by the number of frontends.

Items have invented costs and a Zipf popularity. Encode instances work first come, first served; a hit costs 5 % of
encoding. Each frontend knows only the work that it gave out itself.

    python -m bench.placement_sim [--quick] [--output FILE]
"""

import argparse
import heapq
import random
import statistics
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measuring import report
from triptych.router.caches import EncodedItems
from triptych.router.placement import POLICIES, PlacementPolicy, Work, least_loaded

ENCODERS, ITEMS, CACHED, REQUESTS = 4, 4000, 400, 30000
HIT_COST = 0.05
"""Of encoding."""
COST_UNITS = 10_000
"""Of a second: plans have whole costs."""


@dataclass(eq=False)
class Target:
    """An encode instance, as one frontend sees it."""

    name: str
    outstanding: int = 0
    num_assigned: int = 0
    encoded: EncodedItems = field(default_factory=EncodedItems)


@dataclass
class Encoder:
    """An encode instance."""

    free_at: float = 0.0
    busy: float = 0.0
    """Seconds of work in all."""
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def encode(self, item: int, cost: float, now: float) -> tuple[float, bool]:
        """Return when an item is done, and whether it was cached."""
        cached = item in self.cache
        self.cache[item] = None
        self.cache.move_to_end(item)
        if len(self.cache) > CACHED:
            self.cache.popitem(last=False)
        seconds = cost * (HIT_COST if cached else 1.0)
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        return self.free_at, cached


@dataclass(frozen=True)
class Load:
    """Requests, by what they ask for."""

    zipf: float
    rate: float
    """Of what the instances can encode without caches."""
    requests: int
    seed: int = 1


def choose(policy: PlacementPolicy, targets: list[Target], work: Work) -> Target:
    """Choose as ``EncodeDispatcher`` does: an instance that has the item cached is taken even if it is busy."""
    holders = [target for target in targets if policy.uses_caches and work.key in target.encoded]
    target = least_loaded(holders, work) or policy.choose(targets, work)
    assert target is not None
    return target


def simulate(policy: PlacementPolicy, num_frontends: int, load: Load) -> dict[str, Any]:
    """Return the hit rate, the seconds from an item's arrival until it is encoded, and how uneven the work was."""
    rng = random.Random(load.seed)
    weights = [1 / (rank + 1) ** load.zipf for rank in range(ITEMS)]
    wanted = rng.choices(range(ITEMS), weights, k=load.requests)
    costs = [min(2.0, rng.lognormvariate(-2.5, 0.8)) for _ in range(ITEMS)]
    mean = sum(cost * weight for cost, weight in zip(costs, weights, strict=True)) / sum(weights)
    encoders = [Encoder() for _ in range(ENCODERS)]
    frontends = [[Target(f"e{number}") for number in range(ENCODERS)] for _ in range(num_frontends)]
    running: list[tuple[float, int, Target, int]] = []
    now, hits, waits = 0.0, 0, []
    for number, item in enumerate(wanted):
        now += rng.expovariate(load.rate * ENCODERS / mean)
        targets = rng.choice(frontends)
        while running and running[0][0] <= now:
            _, _, target, cost = heapq.heappop(running)
            target.outstanding -= cost
        work = Work(max(1, round(costs[item] * COST_UNITS)), str(item).encode())
        target = choose(policy, targets, work)
        done, cached = encoders[targets.index(target)].encode(item, costs[item], now)
        target.outstanding += work.cost
        target.num_assigned += 1
        target.encoded.add(work.key, 1, CACHED)
        heapq.heappush(running, (done, number, target, work.cost))
        hits += cached
        waits.append(done - now)
    counted = sorted(waits[load.requests // 10 :])
    return {
        "hit_rate": hits / load.requests,
        "mean_ms": statistics.mean(counted) * 1000,
        "p99_ms": counted[int(0.99 * len(counted))] * 1000,
        "busiest_share": max(one.busy for one in encoders) / sum(one.busy for one in encoders),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests, one load")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    requests = REQUESTS // 10 if options.quick else REQUESTS
    loads = [(zipf, rate) for zipf in (0.8, 1.1) for rate in (0.7, 1.2)]
    results = [
        {"zipf": zipf, "load": rate, "frontends": number, "policy": name}
        | simulate(policy, number, Load(zipf, rate, requests))
        for zipf, rate in (loads[:1] if options.quick else loads)
        for number in (1, 2, 4)
        for name, policy in POLICIES.items()
    ]
    setup = {"encoders": ENCODERS, "items": ITEMS, "items_cached": CACHED, "requests": requests, "hit_cost": HIT_COST}
    report({"setup": setup, "results": results}, options.output)


if __name__ == "__main__":
    main()
