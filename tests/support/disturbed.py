"""Checks that answers stay those of transformers while a service preempts requests and loses instances."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, Messages, Running, at_stake, running, together
from tests.support.image_cases import Case
from triptych.config import EngineConfig

START = "The quick brown fox jumps over the lazy dog. " * 3
LONG_TEXTS = [
    Case("long", (START + "Pack my box with five dozen liquor jugs. What?",)),
    Case("with the same beginning", (START + "How vexingly quick daft zebras jump! Who?",)),
    Case("short", ("Why?",)),
]


def served(model: Model, topology: str, engine: EngineConfig, ask: Callable[[Running], Awaitable[object]]) -> None:
    """Serve a model, and call ``ask`` with the service."""

    async def run() -> None:
        async with running(model.folder, topology, engine) as service:
            await ask(service)

    asyncio.run(run())


def check_preemption(model: Model, topology: str, requests: Sequence[Messages]) -> None:
    """Preempted requests start again: there are pages for one of the first, which are the longest."""
    longest = len(model.prompts[0].tokens) + 32

    async def run() -> None:
        engine = replace(FLOAT32, kv_cache_tokens=longest + FLOAT32.page_size, max_num_batched_tokens=64)
        async with running(model.folder, topology, engine, prepare=together(4)) as service:
            asked = await service.answers([*requests, requests[1]])
            assert asked == [*model.answers, model.answers[1]]
            assert service.engine_loops()[-1].scheduler.num_preemptions

    asyncio.run(run())


def check_lost_instances(model: Model, requests: Sequence[Messages]) -> None:
    """Lost instances are replaced: one prefills when it is lost, another decodes."""

    async def ask(service: Running) -> None:
        asked = [asyncio.create_task(service.answer(messages)) for messages in 2 * list(requests)]
        loops = dict(zip((instance.name for instance in service.instances), service.engine_loops(), strict=True))
        async with asyncio.timeout(60):
            while not loops["p0"].num_computed_tokens:
                await asyncio.sleep(0)
            await service.end("p0")
            # one of them may have answered short prompts already
            while not (decoding := [name for name in ("d2", "d3") if at_stake(service, name)]):
                await asyncio.sleep(0)
            await service.end(decoding[-1])
        assert await asyncio.gather(*asked) == 2 * model.answers

    served(model, "2P2D", replace(FLOAT32, max_num_batched_tokens=16), ask)
