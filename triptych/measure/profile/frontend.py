"""What a frontend spends on requests: the processor time of its processes while a real service answers loads."""

import itertools
import os
from dataclasses import dataclass

import httpx

from triptych.cluster.service import Service, unless_lost
from triptych.config import ServeConfig
from triptych.costs.fitting import quartiles
from triptych.costs.profile import Point
from triptych.errors import StartError
from triptych.measure.load.client import Sample, closed_loop
from triptych.measure.load.pictures import picture
from triptych.measure.load.processes import cpu_seconds, descendants, named_children
from triptych.measure.load.questions import chat_body, content, words
from triptych.measure.profile.plan import ProfilePlan
from triptych.topology import Topology

FRONTEND = "frontend"
CONCURRENCY = 8
SHORT, LONG = 32, 1024
"""Characters of texts."""
PATIENCE = 300.0
"""Seconds that one load may take."""


@dataclass(frozen=True)
class FrontendLoad:
    """Requests of one kind."""

    characters: int
    output_tokens: int
    size: tuple[int, int] | None = None
    """Size of the picture in each request, in pixels."""

    def body(self, model: str, seed: int) -> tuple[bytes, int]:
        """Return a request, and the bytes of its media."""
        pictures = [picture(seed, *self.size)] if self.size else []
        body = chat_body(model, content(pictures, words(seed, self.characters)), self.output_tokens)
        return body, sum(map(len, pictures))


@dataclass(frozen=True)
class FrontendCosts:
    """What was measured."""

    points: list[Point]
    item_tokens: dict[tuple[int, int], int]
    """Prompt tokens of an image of each size, markers included."""


async def measure_frontend(config: ServeConfig, model: str, topology: str, plan: ProfilePlan) -> FrontendCosts:
    """Start a service and measure its frontend. Raises StartError when it can't be started, or its requests fail."""
    config = config.having({"served_model_name": model})
    async with Service(config, Topology.parse(topology), lambda _: None, restart=False) as service:
        await service.wait_until_ready()
        async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=PATIENCE) as http:
            pid = named_children(os.getpid()).get(FRONTEND)
            if pid is None:
                raise StartError("the service has no frontend process")
            loads = _Loads(http, model, plan, pid)
            return await unless_lost(service.lost, loads.measured(takes_media="E" in topology))


@dataclass
class _Loads:
    """Loads of one service."""

    http: httpx.AsyncClient
    model: str
    plan: ProfilePlan
    pid: int
    """The frontend's process."""

    def __post_init__(self) -> None:
        self._seeds = itertools.count(1)

    async def measured(self, *, takes_media: bool) -> FrontendCosts:
        loads = [FrontendLoad(*kind) for kind in ((SHORT, 1), (SHORT, 32), (LONG, 1), (LONG, 16))]
        if takes_media:
            small, large = self.plan.sizes[0], self.plan.sizes[-2]
            loads += [FrontendLoad(SHORT, tokens, size) for tokens, size in ((1, small), (16, small), (1, large))]
        points = [await self._point(load) for load in loads]
        return FrontendCosts(points, await self._item_tokens() if takes_media else {})

    async def _point(self, load: FrontendLoad) -> Point:
        """Return what a request costs, on average over each of several loads."""
        await self._answers(self._made(load, CONCURRENCY))  # not counted
        seconds, samples, sizes = list[float](), list[Sample](), list[int]()
        for _ in range(self.plan.loads):
            made = self._made(load, self.plan.requests)
            before = self._spent()
            samples += await self._answers(made)
            seconds.append((self._spent() - before) / len(made))
            sizes += [size for _, size in made]
        values = {
            "requests": 1.0,
            "prompt_tokens": sum(sample.prompt_tokens for sample in samples) / len(samples),
            "items": float(load.size is not None),
            "media_bytes": sum(sizes) / len(sizes),
            "output_tokens": float(load.output_tokens),
        }
        return Point(values, quartiles(seconds))

    def _spent(self) -> float:
        """Return the processor time of the frontend, and of the processes that read files for it."""
        return sum(map(cpu_seconds, (self.pid, *descendants(self.pid))))

    async def _item_tokens(self) -> dict[tuple[int, int], int]:
        seed, found = next(self._seeds), {}
        (text,) = await self._answers([FrontendLoad(SHORT, 1).body(self.model, seed)])
        for size in self.plan.sizes:
            (sample,) = await self._answers([FrontendLoad(SHORT, 1, size).body(self.model, seed)])
            found[size] = sample.prompt_tokens - text.prompt_tokens
        return found

    def _made(self, load: FrontendLoad, count: int) -> list[tuple[bytes, int]]:
        return [load.body(self.model, next(self._seeds)) for _ in range(count)]

    async def _answers(self, made: list[tuple[bytes, int]]) -> list[Sample]:
        samples = await closed_loop(self.http, [body for body, _ in made], CONCURRENCY)
        if failed := [sample.error for sample in samples if sample.error]:
            raise StartError(f"requests fail: {failed[0]}")
        return samples
