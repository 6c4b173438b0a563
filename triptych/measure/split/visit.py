"""One service under all loads of a round."""

import asyncio
import math
import os
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import httpx

from triptych.cluster.child import Print
from triptych.cluster.service import Service, unless_lost
from triptych.config import ServeConfig
from triptych.errors import StartError
from triptych.measure.load.client import Sample, ask, closed_loop, open_loop, poisson_times
from triptych.measure.load.processes import ProcessUsage, descendants, named_children, total, usage
from triptych.measure.split.figures import Results, Row
from triptych.measure.split.loads import (
    MAX_REQUESTS,
    Requests,
    ServiceLevel,
    answered,
    failure,
    goodput,
    latencies,
    stage_ms,
    throughput,
)
from triptych.measure.split.plan import ALONE, CLIENT, OTHERS, PICTURES, Mix, Setup, Size, SplitPlan
from triptych.measure.split.tables import NEW, OFF, ON, REPEATED, rows_of
from triptych.topology import Topology

MIB = 2**20
IMAGES, FIRST_USE, WARM_UP, ONE_BY_ONE, CLOSED, CACHED, OPEN = 0, 100, 110, 120, 130, 140, 150
"""Pieces of a round, which share no request. Of each there is one for every kind of request, or picture, or rate."""
LATER = 3
"""Requests after the first one, to compare it with."""
FEWEST_ARRIVALS = 8
SLOW = 4.0
"""Once a request with pictures takes this many times the seconds of a load, larger ones aren't sent."""
PATIENCE = 20.0
"""A measurement is given up after this many times the seconds of a load, and a minute."""


@dataclass(frozen=True)
class Basis:
    """What the first topology did before the first round: the loads of all topologies are in proportion to it."""

    rate: float
    """Requests per second in a closed loop."""
    level: ServiceLevel


@dataclass
class SplitBench:
    """What is measured, and with which settings."""

    config: ServeConfig
    model: str
    """The model's name in requests."""
    plan: SplitPlan
    results: Results
    show: Print = print
    """Called with each line that the processes of a service write."""
    bases: dict[str, Basis] = field(default_factory=dict)
    """By kind of request, once known."""


async def visit(bench: SplitBench, setup: Setup, number: int) -> None:
    """Start a service, measure it in round ``number``, and stop it. A measurement that fails is a reason in its rows.
    Raises StartError when the service can't be started, or is lost."""
    config = bench.config.having({"served_model_name": bench.model, **setup.settings})
    began = time.monotonic()
    async with Service(config, Topology.parse(setup.topology), bench.show, restart=False) as service:
        await service.wait_until_ready()
        ready = time.monotonic() - began
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None, limits=limits) as http:
            requests = Requests(bench.model, bench.plan.output_tokens, number)
            await unless_lost(service.lost, _Visit(bench, setup, requests, http).run(ready))


@dataclass
class _Visit:
    bench: SplitBench
    setup: Setup
    requests: Requests
    http: httpx.AsyncClient

    def __post_init__(self) -> None:
        self._plan, self._results, self._topology = self.bench.plan, self.bench.results, self.setup.topology
        self._too_large = math.inf
        """Pixels of a request that took too long."""

    async def run(self, ready: float) -> None:
        """Measure all that the setup's rows need. ``ready`` is after how many seconds the service was. Raises
        StartError when it doesn't answer."""
        if self._measures("first-use"):
            await self._within("first-use", self._first_use(ready))
        if not any(map(self._measures, ("closed", "cache", "images"))):
            return
        for mix in self._plan.mixes:
            await self._within("", self._warm_up(mix))
        if self._measures("closed"):
            for mix in self._plan.mixes:
                await self._within("alone", self._alone(mix))
                await self._within("closed", self._closed(mix))
                for number in range(len(self._plan.rates)):
                    await self._within("arrivals", self._arrivals(mix, number))
        if self._measures("cache"):
            await self._within("cache", self._cache())
        if self._measures("images"):
            await self._images()

    def _measures(self, name: str) -> bool:
        table = self._results.table(name)
        return table is not None and bool(rows_of(table, self.setup))

    async def _within(self, name: str, work: Awaitable[None], row: Row | None = None) -> None:
        """Do the work for a row of a table, or for all of this setup's, or record there that it took too long. Raises
        StartError where there is no table, since nothing else can be measured then."""
        limit = 60.0 + PATIENCE * self._plan.seconds
        try:
            async with asyncio.timeout(limit):
                await work
        except TimeoutError:
            table = self._results.table(name)
            if table is None:
                raise StartError(f"the service doesn't answer the first requests within {limit:g} s") from None
            self._results.fail(f"given up after {limit:g} s", name, [row] if row else rows_of(table, self.setup))

    def _piece(self, piece: int, mix: Mix) -> int:
        return piece + self._plan.mixes.index(mix)

    async def _one_by_one(self, bodies: Sequence[bytes]) -> list[Sample]:
        return [await ask(self.http, body) for body in bodies]

    def _record(self, table: str, row: Row, samples: Sequence[Sample], **values: float) -> None:
        """Add a row's values, and the first failure of its requests."""
        self._results.add(table, row, **values)
        if reason := failure(samples):
            self._results.fail(f"{len(samples) - len(answered(samples))} requests failed: {reason}", table, [row])

    async def _warm_up(self, mix: Mix) -> None:
        """Let all processes connect and use their memory for the first time. Measure the basis of the loads, if this is
        the first service."""
        concurrency = self._plan.concurrency
        bodies = self.requests.of(mix, self._piece(WARM_UP, mix), 3 * concurrency + ALONE)
        alone, warm, timed = bodies[:ALONE], bodies[ALONE : ALONE + concurrency], bodies[-2 * concurrency :]
        samples = await closed_loop(self.http, warm, concurrency)
        if mix.name not in self.bench.bases:
            lonely = await self._one_by_one(alone)
            began = time.perf_counter()
            last = await closed_loop(self.http, timed, concurrency)
            rate = len(last) / (time.perf_counter() - began)
            samples += lonely + last
            if not failure(samples):
                self.bench.bases[mix.name] = Basis(rate, ServiceLevel.of(self._plan, lonely))
        if reason := failure(samples):
            raise StartError(f"requests fail before anything is measured: {reason}")

    def _count(self, mix: Mix, least: int, rate: float = 1.0) -> int:
        """Return the requests of a load: what the first topology answers in its seconds, or that share of it."""
        return max(least, min(MAX_REQUESTS, round(rate * self.bench.bases[mix.name].rate * self._plan.seconds)))

    async def _first_use(self, ready: float) -> None:
        for mix in reversed(self._plan.mixes):  # text first
            bodies = self.requests.of(mix, self._piece(FIRST_USE, mix), 1 + LATER)
            samples = await self._one_by_one(bodies)
            times = {}
            if not failure(samples):
                first, later = samples[0].ttft, statistics.median(one.ttft for one in samples[1:])
                times = {"first": 1e3 * first, "later": 1e3 * later, "ratio": first / later}
            self._record("first-use", (mix.name, self._topology), samples, ready=ready, **times)

    async def _alone(self, mix: Mix) -> None:
        samples = await self._one_by_one(self.requests.of(mix, self._piece(ONE_BY_ONE, mix), ALONE))
        times = {}
        if good := answered(samples):
            found = latencies(good)
            stages = {stage: stage_ms(good, stage) for stage in ("encode", "transfer", "prefill")}
            times = {"ttft": found["ttft_p50"], "tpot": found["tpot_p50"], **stages}
        self._record("alone", (mix.name, self._topology), samples, **times)

    async def _closed(self, mix: Mix) -> None:
        count = self._count(mix, least=2 * self._plan.concurrency)
        bodies = self.requests.of(mix, self._piece(CLOSED, mix), count)
        before, began = self._usage(), time.perf_counter()
        samples = await closed_loop(self.http, bodies, self._plan.concurrency)
        seconds, after = time.perf_counter() - began, self._usage()
        cpu = {name: 1e3 * (after[name].cpu_seconds - before[name].cpu_seconds) / count for name in before}
        of_service = sum(ms for name, ms in cpu.items() if name != CLIENT)
        row = (mix.name, self._topology)
        self._record("closed", row, samples, **throughput(samples, seconds), cpu=of_service)
        for name, stages in self.setup.processes.items():
            used = after[name]
            memory = {"rss": used.resident_bytes / MIB, "pss": used.proportional_bytes / MIB}
            self._results.add("processes", (*row, name, stages), cpu=cpu[name], **memory)

    def _usage(self) -> dict[str, ProcessUsage]:
        pids = named_children(os.getpid())
        named = [name for name in self.setup.processes if name not in (CLIENT, OTHERS)]
        if gone := [name for name in named if name not in pids]:
            raise StartError(f"process {gone[0]} has ended")
        others = descendants(os.getpid(), without=pids.values())
        return {
            CLIENT: usage(os.getpid(), alone=True),
            OTHERS: total(usage(pid, alone=True) for pid in others),
            **{name: usage(pids[name]) for name in named},
        }

    async def _arrivals(self, mix: Mix, number: int) -> None:
        share, basis = self._plan.rates[number], self.bench.bases[mix.name]
        count = self._count(mix, FEWEST_ARRIVALS, share)
        bodies = self.requests.of(mix, self._piece(OPEN + 10 * number, mix), count)
        times = poisson_times(share * basis.rate, count, seed=self.requests.round)
        samples = await open_loop(self.http, bodies, times)
        self._record(
            "arrivals", (mix.name, f"{share:g}", self._topology), samples, **goodput(samples, times, basis.level)
        )

    async def _cache(self) -> None:
        count = self._count(PICTURES, least=2 * self._plan.concurrency)
        for number, pictures in enumerate((NEW, REPEATED)):
            bodies = self.requests.cached(PICTURES, CACHED + number, count, repeated=pictures == REPEATED)
            began = time.perf_counter()
            samples = await closed_loop(self.http, bodies, self._plan.concurrency)
            found = throughput(samples, time.perf_counter() - began)
            shown = {name: found[name] for name in ("requests_per_second", "ttft_p50", "ttft_p99") if name in found}
            row = (self._topology, OFF if self.setup.settings else ON, pictures)
            self._record("cache", row, samples, **shown)

    async def _images(self) -> None:
        """Measure from the smallest size and count to the largest, unless that would take too long."""
        sizes = [(size, count) for size in self._plan.image_sizes for count in self._plan.image_counts]
        for number, (size, count) in enumerate(sizes):
            row = (str(size), str(count), self._topology)
            await self._within("images", self._image(row, size, count, IMAGES + 2 * number), row)

    async def _image(self, row: Row, size: Size, count: int, piece: int) -> None:
        limit, pixels = SLOW * self._plan.seconds, size.width * size.height * count
        if pixels >= self._too_large:
            self._results.fail(f"not sent, since a smaller request took more than {limit:g} s", "images", [row])
            return
        for repeat in range(2):  # the first one is not counted: memory of this size is used for the first time
            sample = await ask(self.http, self.requests.images(size, count, piece + repeat))
            if sample.error or sample.total > limit:
                break
        if sample.total > limit:
            self._too_large = pixels
        times = {}
        if not sample.error:
            times = {"tokens": sample.prompt_tokens, "ttft": 1e3 * sample.ttft, "total": 1e3 * sample.total}
        self._record("images", row, [sample], **times)
