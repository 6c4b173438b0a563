"""Many transfers between two processes, over shared memory and sockets, with faults in one write of twenty."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.transfer_producer import LAYOUT, left, left_soon, rows_of
from triptych.clock import SystemClock
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.rows import Abort, Done, Offer, Wrote
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.memory import SharedMemory
from triptych.transfer.receiver import Receiver
from triptych.types import Address, TransferId

FAULTS = "drop=0.009,delay=0.009,duplicate=0.008,reorder=0.008,corrupt=0.009,half=0.007,seconds=0.005"
SLOWEST = 5.0
"""Seconds that one transfer may take, with whatever faults."""


class Consumer:
    """Accepts every offer, reads its rows as they land and compares them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.fabric = SharedMemoryFabric()
        self.buffer = RowBuffer(LAYOUT, 24, 4, [self.fabric], SharedMemory)
        self.receiver = Receiver(self.buffer, channel.address, channel.send, check_always=True, clock=SystemClock())
        self.began: dict[TransferId, float] = {}
        self.open: dict[TransferId, int] = {}
        self.failed: list[str] = []
        self.slowest = 0.0
        self.producers: set[Address] = set()

    @property
    def ended(self) -> int:
        return len(self.began) - len(self.open)

    def turn(self) -> None:
        for message in self.channel.receive(0.1):
            self._handle(message)
        for failure in self.receiver.take_failures():
            self.failed.append(failure.reason)
            self.receiver.close(failure.transfer, failure.reason)
            self._end(failure.transfer)
        self.receiver.check_deadlines()
        for transfer in list(self.open):
            self._read(transfer)
        self.receiver.grant()

    def close(self) -> None:
        self.buffer.close()
        self.fabric.close()

    def _handle(self, message: Message) -> None:
        match message:
            case Offer():
                self.receiver.expect(message.transfer, message.rows, (int(message.transfer),))
                self.receiver.on_offer(message)
                self.producers.add(message.producer)
                self.began[message.transfer] = time.monotonic()
                self.open[message.transfer] = 0
            case Wrote():
                self.receiver.on_wrote(message)
            case Abort():
                self.receiver.on_abort(message)
            case Done():
                self.receiver.on_done(message)
            case _:
                raise AssertionError(f"{message} is not for the consumer")

    def _read(self, transfer: TransferId) -> None:
        first, landed = self.open[transfer], self.receiver.landed(transfer)
        if landed == first:
            return
        rows = np.concatenate(self.receiver.read(transfer, first, landed - first))
        source = rows_of(int(transfer))
        np.testing.assert_array_equal(rows, source[first:landed])
        self.receiver.consume(transfer, landed)
        self.open[transfer] = landed
        if landed == len(source):
            self._end(transfer)

    def _end(self, transfer: TransferId) -> None:
        del self.open[transfer]
        self.slowest = max(self.slowest, time.monotonic() - self.began[transfer])


@contextmanager
def producer(channel: Channel, count: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.support.transfer_producer", channel.address, str(count), FAULTS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_transfers_between_processes_survive_faults(count: int) -> None:
    channel = Channel(SystemClock())
    before, named = left(), sorted(os.listdir("/dev/shm"))
    consumer = Consumer(channel)
    with producer(channel, count) as process:
        deadline = time.monotonic() + 30 + count / 100
        began = 0.0
        while consumer.ended < count or not consumer.receiver.idle:
            consumer.turn()
            began = began or (time.monotonic() if consumer.began else 0.0)
            assert time.monotonic() < deadline, f"{count - consumer.ended} transfers hang"
            assert consumer.receiver.idle or process.poll() is None or consumer.ended == count, "the producer died"
        rate, failed = count / (time.monotonic() - began), len(consumer.failed)
        print(f"{rate:.0f} transfers/s, the slowest {consumer.slowest:.3f} s, {failed} failed")
        for peer in consumer.producers:
            channel.disconnect(peer)
        report = json.loads(process.communicate("\n", timeout=10)[0])
    assert consumer.slowest < SLOWEST
    assert len(consumer.failed) == report["aborted"] <= count // 2000, consumer.failed
    assert all(report["injected"].values()), "each fault was injected"
    assert consumer.receiver.counters.resent >= report["injected"]["corrupt"] + report["injected"]["drop"] > 0
    assert report["retries"] + 2 * report["aborted"] >= report["injected"]["half"] - report["aborted"] > 0
    consumer.buffer.pool.check_all_free()
    assert report["after"] == report["before"]
    consumer.close()
    del consumer
    assert left_soon(before) == before
    assert sorted(os.listdir("/dev/shm")) == named
    channel.close()
