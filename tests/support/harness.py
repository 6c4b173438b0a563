"""A whole service inside the test process: real sockets, real shared memory, real instances, each with its loop in a
thread. What differs from ``triptych serve`` is only that no program is started: sandboxed processes are forked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.forked_sandbox import forked_sandbox
from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.config import (
    EncodeConfig,
    EngineConfig,
    FrontendConfig,
    LeaseConfig,
    ObserveConfig,
    ServeConfig,
    TransferConfig,
)
from triptych.engine.loop import EngineLoop
from triptych.engine.scheduler import CountReadyTokens, Scheduler, SchedulerOutput
from triptych.messages.channel import Channel
from triptych.messages.work import SamplingParams
from triptych.observe.requests import RequestRecord
from triptych.server.build import build_instance
from triptych.server.frontend import Frontend
from triptych.server.instance import InstanceProcess
from triptych.server.model_bundle import ModelBundle
from triptych.topology import Role, Topology

Messages = list[dict[str, Any]]

FLOAT32 = EngineConfig(device="cpu", dtype="float32", threads=1, kv_cache_tokens=4096)


@dataclass
class Running:
    """A service that runs. ``instances`` can be looked into; their loops are in other threads."""

    frontend: Frontend
    config: ServeConfig
    instances: list[InstanceProcess] = field(default_factory=list)
    threads: dict[str, threading.Thread] = field(default_factory=dict)
    """The loops that haven't been ended, by their instances' names."""

    def start(self, instance: InstanceProcess) -> None:
        """Runs an instance, which joins soon."""
        self.instances.append(instance)
        self.threads[instance.name] = threading.Thread(target=run_instance, args=[instance], daemon=True)
        self.threads[instance.name].start()

    async def end(self, name: str) -> None:
        """Ends one instance, the latest of that name, whatever it works on."""
        next(instance for instance in reversed(self.instances) if instance.name == name).stop()
        thread = self.threads.pop(name)
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive(), "an instance didn't stop"

    async def answer(self, messages: Messages | str, cache_salt: str = "", **sampling: Any) -> list[int]:
        """The tokens of one answer, to a conversation or a text."""
        service = self.frontend.api
        builder = service.prompt_builder
        prompt = builder.build_text(messages) if isinstance(messages, str) else builder.build(messages)
        settings = SamplingParams(**({"max_tokens": 32, "ignore_eos": True} | sampling))
        stream = service.router.lifecycle.submit(
            RequestRecord("id", "POST", SystemClock()),
            prompt,
            settings,
            sorted(service.tokenizer.eos_token_ids),
            cache_salt,
        )
        return [token async for report in stream for token in report.tokens]

    async def answers(self, requests: Sequence[Messages | str], **sampling: Any) -> list[list[int]]:
        """The tokens of several answers, asked for all at once."""
        return list(await asyncio.gather(*(self.answer(messages, **sampling) for messages in requests)))

    def engine_loops(self) -> list[EngineLoop]:
        return [host for instance in self.instances for host in instance.loops if isinstance(host, EngineLoop)]


@asynccontextmanager
async def running(
    folder: Path,
    topology: str = "1EPD",
    engine: EngineConfig = FLOAT32,
    *,
    frontend: FrontendConfig | None = None,
    encode: EncodeConfig | None = None,
    transfer: TransferConfig | None = None,
    observe: ObserveConfig | None = None,
    prepare: Callable[[InstanceProcess], None] = lambda _: None,
) -> AsyncIterator[Running]:
    """Starts a service and stops it; on the way out every instance checks that blocks and pages are back.
    ``prepare`` may change an instance before it runs."""
    config = ServeConfig(
        model=folder,
        engine=engine,
        encode=encode or EncodeConfig(),
        transfer=transfer or TransferConfig(),
        frontend=frontend or FrontendConfig.of(port=0),
        lease=LeaseConfig(lease_expiry=60.0),
        observe=observe or ObserveConfig(),
    )
    roles = Topology.parse(topology, decodes=not config.frontend.engines.urls).roles
    async with AsyncExitStack() as stack:
        stack.enter_context(forked_sandbox())
        door = await stack.enter_async_context(Frontend(config, expects_encoders=any(role.encodes for role in roles)))
        service = Running(door, config)
        for number, role in enumerate(roles):
            instance = make_instance(config, role, f"{role.value.lower()}{number}", door.control)
            prepare(instance)
            service.start(instance)
        async with asyncio.timeout(30):
            while len(door.router.membership) < len(service.instances):
                await asyncio.sleep(0.005)
        yield service
        for name in list(service.threads):
            await service.end(name)
        for instance in service.instances:
            for host in instance.loops:
                host.check_idle()


def together(number: int, *, with_rows: bool = False) -> Callable[[InstanceProcess], None]:
    """For ``prepare``, where one instance decodes: it begins once ``number`` requests have come, however slowly, so
    that they compete for its pages. ``with_rows``: with all rows of those that it prefills, which its receive pool has
    to hold; otherwise a request may end before the next one's rows come."""

    def prepare(instance: InstanceProcess) -> None:
        for host in instance.loops:
            if isinstance(host, EngineLoop) and host.decodes:
                hold(host.scheduler)

    def hold(scheduler: Scheduler) -> None:
        schedule = scheduler.schedule

        def held(ready: CountReadyTokens) -> SchedulerOutput:
            waits = with_rows and any(one.prefilled_here and ready(one) < len(one.tokens) for one in scheduler)
            if len(scheduler) < number or waits:
                return SchedulerOutput()
            scheduler.schedule = schedule  # type: ignore[method-assign]
            return schedule(ready)

        scheduler.schedule = held  # type: ignore[method-assign]

    return prepare


def make_instance(config: ServeConfig, role: Role, name: str, control: str) -> InstanceProcess:
    """An instance that joins the frontend at ``control`` once it runs."""
    torch.set_num_threads(1)
    model = ModelBundle(Checkpoint(config.model), config.engine)
    clock = SystemClock()
    return build_instance(config.instance(role, name, control), model=model, channel=Channel(clock), clock=clock)


def run_instance(instance: InstanceProcess) -> None:
    """Until it is stopped, or the frontend refuses it: raises StartError."""
    try:
        instance.run()
    finally:
        instance.channel.close()


def at_stake(service: Running, victim: str) -> int:
    """How many answers the instance is in the middle of."""
    requests = service.frontend.router.debug_state().dispatched.values()
    decoding = [one for one in requests if one.decode is not None and one.decode.instance.name == victim]
    return sum(len(one.generated) > 2 for one in decoding)
