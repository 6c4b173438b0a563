"""Looks into the stage loops of a service's instances."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from tests.support.harness import FLOAT32, Messages, Running, running
from triptych.encode.loop import EncodeLoop
from triptych.encode.store import EmbeddingRows
from triptych.engine.active_request import ActiveChunk
from triptych.engine.loop import EngineLoop
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import CountReadyTokens, SchedulerOutput
from triptych.layers.decoder import ForwardBatch
from triptych.models.base import EncoderInput
from triptych.server.instance import InstanceProcess


def engine_loop(instance: InstanceProcess) -> EngineLoop:
    return next(host for host in instance.loops if isinstance(host, EngineLoop))


class Recording:
    """A decoder that keeps the logits it returns, of which none are left out."""

    def __init__(self, decoder: Callable[..., Tensor], recorded: list[Tensor]) -> None:
        self._decoder = decoder
        self._recorded = recorded

    def __call__(self, batch: ForwardBatch, *arguments: object) -> Tensor:
        logits: Tensor = self._decoder(replace(batch, num_largest=()), *arguments)
        self._recorded += list(torch.unbind(logits.clone()))
        return logits


def first_logits(folder: Path, conversations: Iterable[Messages], topology: str = "1E1PD") -> list[Tensor]:
    """The logits of each conversation's first token, in float32, asked one at a time."""
    recorded: list[Tensor] = []

    def record(instance: InstanceProcess) -> None:
        if instance.role.has_decoder:
            runner = engine_loop(instance).runner
            runner.decoder = Recording(runner.decoder, recorded)

    async def run() -> int:
        asked = 0
        async with running(folder, topology, prepare=record) as service:
            for messages in conversations:
                await service.answer(messages, max_tokens=1)
                asked += 1
        return asked

    assert asyncio.run(run()) == len(recorded)
    return recorded


def encode_loops(service: Running) -> list[EncodeLoop]:
    return [host for instance in service.instances for host in instance.loops if isinstance(host, EncodeLoop)]


def count_parts(instance: InstanceProcess, seen: list[int]) -> None:
    """Notes how many parts go through the tower."""
    for host in instance.loops:
        if isinstance(host, EncodeLoop):
            encode = host.runner.encode

            def counted(inputs: Sequence[EncoderInput], encode: Any = encode) -> list[EmbeddingRows]:
                seen.append(len(inputs))
                rows: list[EmbeddingRows] = encode(inputs)
                return rows

            host.runner.encode = counted  # type: ignore[method-assign]


def decode_loops(service: Running) -> list[EngineLoop]:
    return [host for host in service.engine_loops() if not host.prefills]


def kv_rows(service: Running) -> int:
    """Rows of KV that have landed so far."""
    hosts = decode_loops(service)
    assert hosts
    return sum(host.incoming.stats().counters.rows for host in hosts)


def _wake_when(event: Event, instance: InstanceProcess) -> None:
    event.wait()
    instance.channel.wake()


def hold_steps(instance: InstanceProcess, until: Event) -> None:
    """For ``prepare``: an instance with a decoder computes nothing until then."""
    for host in instance.loops:
        if not isinstance(host, EngineLoop):
            continue
        loop, schedule = host, host.scheduler.schedule
        Thread(target=_wake_when, args=(until, instance), daemon=True).start()  # nothing else would wake it

        def held(
            ready: CountReadyTokens, loop: EngineLoop = loop, schedule: Callable[..., SchedulerOutput] = schedule
        ) -> SchedulerOutput:
            if not until.is_set():
                return SchedulerOutput()
            loop.scheduler.schedule = schedule  # type: ignore[method-assign]
            return schedule(ready)

        loop.scheduler.schedule = held  # type: ignore[method-assign]


def answer_of_two_encoders(folder: Path, messages: Messages, rows: int) -> list[int]:
    """The answer about an item of ``rows`` embeddings; of two encode instances, the first is lost in its middle.

    Some rows have landed, and there is no room for more, because nothing is prefilled until the instance is lost. The
    other one encodes the item again and sends the rest.
    """
    is_lost = Event()
    engine = replace(FLOAT32, receive_blocks=1, receive_block_rows=min(8, rows // 2))

    async def run() -> list[int]:
        async with running(folder, "2E1PD", engine, prepare=partial(hold_steps, until=is_lost)) as service:
            asked = asyncio.create_task(service.answer(messages))
            [prefill] = service.engine_loops()
            async with asyncio.timeout(30):
                while not prefill.incoming.stats().counters.rows:
                    await asyncio.sleep(0.001)
            first, second = sorted(encode_loops(service), key=lambda loop: loop.num_requested, reverse=True)
            assert (first.num_requested, second.num_requested) == (1, 0)
            await service.end(next(one.name for one in service.instances if first in one.loops))
            assert 0 < prefill.incoming.stats().counters.rows < rows
            is_lost.set()
            answer = await asked
            assert (second.num_requested, second.num_encoded) == (1, 1)
            assert prefill.incoming.stats().counters.rows == rows
            return answer

    return asyncio.run(run())


def record_media(instance: InstanceProcess, recorded: list[Tensor]) -> None:
    """For ``prepare``: keeps the rows of media that steps get, in the order of the steps."""
    for host in instance.loops:
        source = host.embedding_source if isinstance(host, EngineLoop) else None
        if source is not None:
            gather = source.gather

            def kept(chunks: Sequence[ActiveChunk], gather: Any = gather) -> MediaEmbeddings:
                media: MediaEmbeddings = gather(chunks)
                recorded.append(media.rows.clone())
                return media

            source.gather = kept  # type: ignore[method-assign]
