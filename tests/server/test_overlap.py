"""Prefill runs over the rows that have landed while later items are still being encoded."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import Running, running
from tests.support.image_cases import picture, png
from triptych.clock import SystemClock
from triptych.config import EncodeConfig
from triptych.encode.loop import EncodeLoop
from triptych.encode.store import EmbeddingRows
from triptych.engine.loop import EngineLoop
from triptych.messages.work import SamplingParams, Tokens
from triptych.models.base import EncoderInput
from triptych.observe.requests import RequestRecord
from triptych.observe.timeline import Interval
from triptych.server.instance import InstanceProcess
from triptych.types import Address

IMAGES = 4
ONE_AT_A_TIME = EncodeConfig(encode_batch_patches=1)


class SlowEncoder:
    def __init__(self, encode: Callable[[Sequence[EncoderInput]], list[EmbeddingRows]]) -> None:
        self._encode = encode

    def __call__(self, inputs: Sequence[EncoderInput]) -> list[EmbeddingRows]:
        time.sleep(0.1)
        return self._encode(inputs)


def slow_down(instance: InstanceProcess) -> None:
    for host in instance.loops:
        if isinstance(host, EncodeLoop):
            host.runner.encode = SlowEncoder(host.runner.encode)  # type: ignore[method-assign]


async def timeline(service: Running) -> list[Interval]:
    """Of one request with several pictures, as its client would receive them."""
    content = [{"type": "image", "data": png(picture(96, 96, seed))} for seed in range(IMAGES)]
    prompt = service.frontend.api.prompt_builder.build([{"role": "user", "content": content}])
    stream = service.frontend.api.router.lifecycle.submit(
        RequestRecord("id", "POST", SystemClock()), prompt, SamplingParams(max_tokens=2, ignore_eos=True), []
    )
    async for _ in stream:
        pass
    return stream.intervals


def test_prefill_of_what_has_landed_begins_before_the_next_item_is_encoded(tmp_path: Path) -> None:
    async def run() -> list[Interval]:
        async with running(make_checkpoint(tmp_path), "1E1PD", encode=ONE_AT_A_TIME, prepare=slow_down) as service:
            return await timeline(service)

    intervals = asyncio.run(run())
    encoded = sorted(interval.end for interval in intervals if interval.stage == "encode")
    landed = sorted(interval.end for interval in intervals if interval.stage == "transfer")
    prefills = [interval.start for interval in intervals if interval.stage == "prefill"]
    assert len(encoded) == len(landed) == IMAGES
    for here, next_encoded in zip(landed, encoded[1:], strict=False):
        assert any(here <= start < next_encoded for start in prefills)


@pytest.mark.parametrize("shares_cores", [False, True])
def test_a_steps_tokens_are_sent_while_the_next_step_runs_or_before_it(tmp_path: Path, *, shares_cores: bool) -> None:
    sent: list[tuple[bool, bool]] = []
    """For each token, whether it is the last one, and whether a step was running."""

    def watch(instance: InstanceProcess) -> None:
        [loop] = [host for host in instance.loops if isinstance(host, EngineLoop)]
        loop.runner.shares_cores = shares_cores
        send = instance.channel.send

        def watched_send(address: Address, message: Any) -> None:
            if isinstance(message, Tokens):
                sent.append((message.finish_reason is not None, loop.debug_state()["step_running"]))
            send(address, message)

        instance.channel.send = watched_send  # type: ignore[method-assign, assignment]

    async def run() -> list[int]:
        async with running(make_checkpoint(tmp_path), "1EPD", prepare=watch) as service:
            return await service.answer([{"role": "user", "content": "Hello"}], max_tokens=5)

    assert len(asyncio.run(run())) == 5
    assert sent == [(False, not shares_cores)] * 4 + [(True, False)]
