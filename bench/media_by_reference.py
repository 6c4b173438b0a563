"""Files of media on their way to an encode instance: bytes, time and how long event loops are held, for the first and
the second use of a file.

    python -m bench.media_by_reference [--quick] [--out bench/results/media-by-reference.json]

Router, channel and event loop of the frontend are the real ones, in this process; so are the instance and its encode
loop, in another. Nothing is decoded and no tower runs, so times are those of the files' way alone. Beside them stands
what one message with the whole file would cost.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measuring import report
from triptych.clock import SystemClock
from triptych.config import AdmissionConfig, LeaseConfig
from triptych.encode.loop import EncodeLoop
from triptych.encode.runner import EncoderRunner
from triptych.encode.store import MemoryStore
from triptych.executor import started_executor
from triptych.layers.encoder import PreprocessedPart
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import Abort, RowLayout, TransferSide
from triptych.messages.work import (
    Capacity,
    Encoded,
    EncodeNeeded,
    MissingItem,
    Prefilled,
    PromptLogprobs,
    Register,
    SamplingParams,
)
from triptych.models.base import VISION, EncoderInput, Parts, Positions, chosen
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.router import Router
from triptych.server.instance import InstanceProcess
from triptych.server.sender_loop import SenderLoop
from triptych.topology import Role
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.sender import Sender
from triptych.types import Address, ImageHeader, ItemPart, ItemPlan, Placement, Span, TransferId, VideoHeader

MB = 10**6
LAYOUT = RowLayout(ModelIdentity().digest, "float32", 4, 16)
CAPACITY = Capacity(64, 64)
LEASE = LeaseConfig(heartbeat=1.0, lease_expiry=60.0)
_PART = ItemPart(((0, 1),), 1, 1.0, VISION)
PICTURE = ItemPlan("image", ImageHeader("png", 1, 1), 1, 1, (1, 1, 1), 1, 1, 1.0, (_PART,))
_HALVES = tuple(ItemPart(((row, 1),), 64, 0.5, VISION) for row in range(2))
VIDEO = ItemPlan("video", VideoHeader("mp4", 1, 1, 128, 1.0), 1, 1, (128, 1, 1), 2, 128, 1.0, _HALVES)
"""Long: it is encoded in two parts."""


# ── the encode instance, a process of its own ──────────────────────────────────────────────────────────────


class CountingChannel(Channel):
    """Counts what arrives, and how long its loop is held between two calls of ``receive``."""

    num_bytes = 0
    longest = 0.0
    _returned = float("inf")

    def receive(self, timeout: float | None) -> list[Message]:
        self.longest = max(self.longest, time.perf_counter() - self._returned)
        messages = super().receive(timeout)
        self._returned = time.perf_counter()
        return messages

    def next_frames(self) -> list[bytes]:
        frames = super().next_frames()
        self.num_bytes += len(frames[-1]) if frames else 0
        return frames


class Preprocessors:
    """Takes the file, and decodes nothing."""

    number = 1
    pids: list[int] = []  # noqa: RUF012 - it has no processes

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        for number in chosen(plan, parts):
            patches = np.zeros((plan.parts[number].patches, 1), np.float32)
            yield EncoderInput(patches, plan.grid, f"{data[:16].hex()} {len(data)} {number}")

    def close(self) -> None:
        """It has nothing to close."""


class Tower:
    """An encoder that computes nothing."""

    embedding_width = LAYOUT.width

    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        return [torch.zeros((1, LAYOUT.width)) for _ in inputs]


def run_instance(frontend: Address, pipe: Connection) -> None:
    """Run an encode instance until the pipe is closed. Each message there is answered with the
    counters, which then start at 0 again."""
    channel = CountingChannel(SystemClock())
    instance = InstanceProcess(
        name="e",
        role=Role.E,
        model=ModelIdentity(),
        layouts=[LAYOUT],
        capacity=CAPACITY,
        channel=channel,
        join=[frontend.removeprefix("tcp://")],
        lease=LEASE,
        clock=SystemClock(),
        start_executor=started_executor,
    )
    fabric = LocalFabric()
    sender = Sender({fabric.name: fabric}, channel.address, instance.send, clock=SystemClock())
    loop = EncodeLoop(
        preprocessors=Preprocessors(),
        runner=EncoderRunner(Tower(), torch.float32, instance.compute),
        max_patches=CAPACITY.encode_batch_patches,
        store=MemoryStore(2**20),
        sender=sender,
        layout=LAYOUT,
        wake=channel.wake,
        address=channel.address,
        send=instance.send,
        clock=instance.clock,
        start_executor=instance.start_executor,
    )
    instance.add_loop(SenderLoop(sender), TransferSide.CONSUMER)
    instance.add_loop(loop)

    def answer() -> None:
        try:
            while True:
                pipe.recv()
                pipe.send((channel.num_bytes, channel.longest))
                channel.num_bytes, channel.longest = 0, 0.0
        except EOFError:
            instance.stop()

    threading.Thread(target=answer, daemon=True).start()
    instance.run()


# ── the frontend ───────────────────────────────────────────────────────────────────────────────────────────


class Frontend:
    """A router on an event loop, and an encode instance in another process."""

    def __init__(self) -> None:
        self.channel, self._language = Channel(SystemClock()), Channel(SystemClock())
        self.longest = 0.0
        """Longest time for which the event loop was held, in seconds."""
        self._encoded: dict[TransferId, asyncio.Future[bool]] = {}
        self.router = Router(
            address=self.channel.address,
            send=self.channel.send,
            disconnect=self.channel.disconnect,
            identity=ModelIdentity(),
            admission=AdmissionConfig(max_queue=10**4, request_timeout=600.0),
            lease=LEASE,
            clock=SystemClock(),
        )
        self._pipe, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=run_instance, args=(self.channel.address, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def start(self) -> None:
        asyncio.get_running_loop().add_reader(self.channel.fileno(), self._take)
        register = Register(
            "pd", Role.PD, self._language.address, [LAYOUT], os.getpid(), 1, CAPACITY, 2**20, model=ModelIdentity()
        )
        self.router.handle(register)
        while not self.router.availability.can_serve:
            await asyncio.sleep(0.01)
            self._take()

    def _take(self) -> None:
        began = time.perf_counter()
        for message in self.channel.drain():
            self.router.handle(message)
            if isinstance(message, Encoded):
                self._encoded.pop(message.transfer).set_result(message.cached)
        if self.channel.pending:
            asyncio.get_running_loop().call_soon(self._take)
        self.longest = max(self.longest, time.perf_counter() - began)

    async def encode(self, key: str, data: bytes, plan: ItemPlan) -> tuple[float, bool]:
        """Have an item encoded for a request. Returns the seconds until its rows exist, and if they were cached."""
        spans = Placement((Span(0, plan.rows),))
        item = PlannedItem(key, data, plan, spans, "messages[0]", 0)
        tokens = [0] * plan.rows + [1]
        prompt = PlannedPrompt(tokens, Positions(np.zeros((3, len(tokens))), len(tokens)), (item,))
        record = RequestRecord("id", "POST", SystemClock())
        stream = self.router.lifecycle.submit(record, prompt, SamplingParams(max_tokens=1), [])
        transfer = TransferId(stream.request)
        encoded = self._encoded[transfer] = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        missing = [MissingItem(0, transfer)]
        self.router.handle(EncodeNeeded(stream.request, self._language.address, missing))
        self.longest = max(self.longest, time.perf_counter() - began)
        cached = await encoded
        seconds = time.perf_counter() - began
        self.router.lifecycle.cancel(stream.request)
        (instance,) = self.router.membership.encode_instances()
        abort = Abort(transfer, TransferSide.CONSUMER, self._language.address, "measured")
        self._language.send(instance.address, abort)
        self._language.drain()
        return seconds, cached

    def counters(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        self._pipe.send(None)
        num_bytes, longest = self._pipe.recv()
        found = {
            "bytes": num_bytes,
            "frontend_hold_ms": round(1000 * self.longest, 3),
            "instance_hold_ms": round(1000 * longest, 3),
        }
        self.longest = 0.0
        return found

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.channel.fileno())
        self._pipe.close()
        self._process.join(10)
        self._language.close(linger=0)
        self.channel.close(linger=0)


async def measure(frontend: Frontend, files: dict[str, bytes], plan: ItemPlan, *, at_once: bool) -> dict[str, Any]:
    """Have the files encoded twice, one after another or all at once. Times are medians, holds are maxima."""
    found: dict[str, Any] = {"files": len(files), "file_mb": len(next(iter(files.values()))) / MB, "at_once": at_once}
    for use, expected in (("first", False), ("second", True)):
        frontend.counters()
        work = [frontend.encode(key, data, plan) for key, data in files.items()]
        results = await asyncio.gather(*work) if at_once else [await one for one in work]
        assert {cached for _, cached in results} == {expected}
        seconds = [one for one, _ in results]
        counters = frontend.counters()
        counters["bytes"] = round(counters["bytes"] / len(files))
        times = {"ms_p50": round(1000 * statistics.median(seconds), 3), "ms_max": round(1000 * max(seconds), 3)}
        found[use] = times | counters
    return found


def in_one_message(size: int, rounds: int) -> dict[str, float]:
    """Return for how long a message with all bytes of a file would hold the loops at both ends: medians, in ms."""
    sends, receives = [], []
    here, there = Channel(SystemClock()), Channel(SystemClock())
    for _ in range(rounds):
        whole = PromptLogprobs(0, os.urandom(size), b"", b"")
        message = Prefilled(TransferId("t"), 0, None, 0, [], 1, whole)
        began = time.perf_counter()
        here.send(there.address, message)
        sends.append(time.perf_counter() - began)
        while not there.pending:
            time.sleep(0.001)
        began = time.perf_counter()
        assert there.drain() == [message]
        receives.append(time.perf_counter() - began)
    here.close(linger=0)
    there.close(linger=0)
    return {
        "file_mb": size / MB,
        "frontend_hold_ms": round(1000 * statistics.median(sends), 3),
        "instance_hold_ms": round(1000 * statistics.median(receives), 3),
    }


async def run(pictures: int, videos: int) -> dict[str, Any]:
    frontend = Frontend()
    await frontend.start()
    try:
        rows = []
        for turn, (count, size, plan, at_once) in enumerate(
            ((1, MB, PICTURE, False),  # connections are made
             (pictures, 8 * MB, PICTURE, False),
             (pictures, 8 * MB, PICTURE, True),
             (videos, 100 * MB, VIDEO, False))
        ):  # fmt: skip
            files = {f"{turn} {number}": os.urandom(size) for number in range(count)}
            rows.append(await measure(frontend, files, plan, at_once=at_once))
        return {"by_reference": rows[1:]}
    finally:
        frontend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few files, to see that it runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pictures, videos = (4, 2) if arguments.quick else (40, 10)
    found = asyncio.run(run(pictures, videos))
    found["in_one_message"] = [in_one_message(size * MB, 3 if arguments.quick else 10) for size in (8, 100)]
    report(found, arguments.out)


if __name__ == "__main__":
    main()
