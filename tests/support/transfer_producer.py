"""A process that offers many transfers to one consumer, over a faulty fabric. Not a test.

Run as ``python -m tests.support.transfer_producer CONSUMER COUNT FAULTS``. Prints, as JSON,
the injected faults and the resources that are held.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from triptych.clock import SystemClock
from triptych.config.injected_faults import InjectedFaults
from triptych.messages.channel import Channel
from triptych.messages.rows import Abort, Done, Grant, RowLayout
from triptych.transfer.fabrics.faulty import FaultyFabric
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.memory import SHARED_NAME, Bytes
from triptych.transfer.sender import Sender
from triptych.types import Address, TransferId

LAYOUT = RowLayout(model="m", dtype="uint8", width=64, row_bytes=64)
MAX_ROWS = 24
UNDER_WAY = 32
"""Transfers that are in progress at a time."""


def rows_of(number: int) -> Bytes:
    """The rows of one transfer, the same in every process."""
    random = np.random.default_rng(number)
    return random.integers(0, 256, (int(random.integers(1, MAX_ROWS + 1)), LAYOUT.row_bytes), dtype=np.uint8)


def left() -> dict[str, int]:
    """Resources of this process that a leak would add to."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count(SHARED_NAME)
    return {"maps": maps, "files": len(os.listdir("/proc/self/fd"))}


def left_soon(before: dict[str, int]) -> dict[str, int]:
    """The resources once they are as ``before``, or after a second."""
    deadline = time.monotonic() + 1.0
    while (now := left()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


def produce(consumer: Address, count: int, faults: InjectedFaults) -> None:
    channel, fabric = Channel(SystemClock()), FaultyFabric(SharedMemoryFabric(), faults, SystemClock())
    before = left()
    sender = Sender({fabric.name: fabric}, channel.address, channel.send, clock=SystemClock())
    handlers: dict[type, Callable[[Any], None]] = {Grant: sender.on_grant, Done: sender.on_done, Abort: sender.on_abort}
    begun: list[TransferId] = []
    waiting: list[int] = []  # offered, and provided a turn later
    while len(begun) < count or not sender.idle:
        for number in waiting:
            sender.provide(begun[number], rows_of(number))
        waiting.clear()
        begun_now = [t for t in begun[-2 * UNDER_WAY :] if t in sender]
        while len(begun) < count and len(begun_now) < UNDER_WAY:
            begun.append(TransferId(str(len(begun))))
            begun_now.append(begun[-1])
            waiting.append(len(begun) - 1)
            sender.offer(begun[-1], consumer, len(rows_of(waiting[-1])), LAYOUT)
        for message in channel.receive(0 if waiting else min(0.1, sender.next_poll)):
            handlers[type(message)](message)
        sender.poll()
        sender.check_deadlines()
    sender.consumer_lost(consumer)
    channel.disconnect(consumer)
    sys.stdin.readline()  # the consumer has closed its end, too
    counters = {"retries": sender.counters.retries, "aborted": sender.counters.aborted}
    print(
        json.dumps({"injected": fabric.injected, "before": before, "after": left_soon(before)} | counters), flush=True
    )
    channel.close()


if __name__ == "__main__":
    produce(Address(sys.argv[1]), int(sys.argv[2]), InjectedFaults.parse(sys.argv[3]))
