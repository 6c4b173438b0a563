"""Contract tests that every fabric must pass, and tests of shared memory's own failure modes."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import msgspec
import numpy as np
import pytest

from tests.support.wire import ALL_FABRICS, fabric_pair, memory, open_fabric
from triptych.errors import RegionError, StartError, TransferError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import Copy, Write
from triptych.transfer.fabrics.mooncake import MooncakeFabric
from triptych.transfer.fabrics.nixl import NixlFabric
from triptych.transfer.fabrics.sealing import seal, unseal
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.memory import Bytes, PlainMemory, SharedMemory

OWNER = """
import hashlib, sys, msgspec
from tests.support.wire import memory, open_fabric
name, size = sys.argv[1], int(sys.argv[2])
fabric, owned = open_fabric(name), memory(name, size)
print(msgspec.json.encode(fabric.register(owned)).decode(), flush=True)
for _ in sys.stdin:
    print(hashlib.sha256(owned.bytes.tobytes()).hexdigest(), flush=True)
"""
"""A process that owns a region and prints its digest on request."""

MIB = 2**20

every_fabric = pytest.mark.parametrize("name", ALL_FABRICS)
between_processes = pytest.mark.parametrize("name", ["shm", "nixl", "mooncake"])
over_a_network = pytest.mark.parametrize("name", ["nixl", "mooncake"])


def data(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def land(write: Write, timeout: float = 30) -> None:
    """Poll until the write is done; raise what ``done`` raises."""
    deadline = time.monotonic() + timeout
    while not write.done():
        assert time.monotonic() < deadline, "the write neither lands nor fails"
        time.sleep(0.0001)


class Owner:
    """Another process that owns a region."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self.handle = msgspec.json.decode(process.stdout.readline(), type=RegionHandle)

    def digest(self) -> str:
        """The digest of the region's bytes, as the owner sees them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=30)


@contextmanager
def owner_of(name: str, size: int) -> Iterator[Owner]:
    command = [sys.executable, "-c", OWNER, name, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


@every_fabric
def test_bytes_land_at_their_offsets_and_nowhere_else(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 100)
        handle = consumer.register(target)
        target.bytes[:] = 7
        copies = [Copy(data(10, 1), 20), Copy(data(5, 2), 0), Copy(data(1, 3), 99)]
        land(producer.write(handle, copies))
        expected = np.full(100, 7, dtype=np.uint8)
        for copy in copies:
            expected[copy.offset : copy.offset + len(copy.source)] = copy.source
        np.testing.assert_array_equal(target.bytes, expected)


@every_fabric
def test_neighbouring_regions_are_not_touched(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        targets = [memory(name, 4096) for _ in range(3)]
        handles = [consumer.register(target) for target in targets]
        for target in targets:
            target.bytes[:] = 7
        land(producer.write(handles[1], [Copy(data(4096), 0)]))
        assert [bool((target.bytes == 7).all()) for target in targets] == [True, False, True]
        np.testing.assert_array_equal(targets[1].bytes, data(4096))


@every_fabric
def test_an_empty_write_is_done(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        handle = consumer.register(memory(name, 100))
        land(producer.write(handle, []))
        land(producer.write(handle, [Copy(data(0), 100)]))


@every_fabric
def test_a_write_stays_done(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 100)
        write = producer.write(consumer.register(target), [Copy(data(100), 0)])
        land(write)
        write.cancel()
        assert write.done()
        np.testing.assert_array_equal(target.bytes, data(100))


@every_fabric
def test_slices_of_one_array_are_written_at_once_by_several_writes(name: str) -> None:
    """The array may be dropped: a write keeps its sources alive."""
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 10_000)
        handle = consumer.register(target)
        source = data(10_000)
        writes = [producer.write(handle, [Copy(source[at : at + 500], at)]) for at in range(0, 10_000, 500)]
        del source
        for write in reversed(writes):
            land(write)
        np.testing.assert_array_equal(target.bytes, data(10_000))


@every_fabric
def test_a_thousand_small_writes_in_a_row(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 64_000)
        handle = consumer.register(target)
        source = data(64_000)
        for at in range(0, 64_000, 64):
            land(producer.write(handle, [Copy(source[at : at + 64], at)]))
        np.testing.assert_array_equal(target.bytes, source)


@every_fabric
def test_more_copies_than_a_library_queues(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 20_000)
        handle = consumer.register(target)
        source = data(20_000)
        order = random.Random(0).sample(range(0, 20_000, 4), 5_000)
        land(producer.write(handle, [Copy(source[at : at + 4], at) for at in order]))
        np.testing.assert_array_equal(target.bytes, source)


@every_fabric
def test_one_large_write_of_a_hundred_scattered_copies(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        size, step = 64 * MIB, 64 * MIB // 100
        target = memory(name, size)
        handle = consumer.register(target)
        source = data(step * 100)
        order = random.Random(0).sample(range(100), 100)
        land(producer.write(handle, [Copy(source[at * step : (at + 1) * step], order[at] * step) for at in range(100)]))
        for at in range(100):
            np.testing.assert_array_equal(target.bytes[order[at] * step :][:step], source[at * step :][:step])


@every_fabric
def test_a_copy_out_of_bounds_is_rejected_before_the_first_byte(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 100)
        handle = consumer.register(target)
        target.bytes[:] = 7
        for offset in (-1, 91, 100, 2**62):
            with pytest.raises(RegionError):
                producer.write(handle, [Copy(data(10), 0), Copy(data(10), offset)])
        assert (target.bytes == 7).all()


@every_fabric
def test_a_foreign_handle_is_rejected(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        handle = consumer.register(memory(name, 100))
        for foreign in (
            RegionHandle("another", handle.location, 100),
            RegionHandle(name, "", 100),
            RegionHandle(name, "../../etc/passwd", 100),
            RegionHandle(name, handle.location + "0", 100),
        ):
            with pytest.raises(RegionError):
                producer.write(foreign, [Copy(data(1), 0)])


@every_fabric
def test_a_corrupt_handle_is_rejected(name: str) -> None:
    """And the original one works afterwards."""
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 100)
        handle = consumer.register(target)
        location, order = handle.location, random.Random(0)
        corrupt = [location[: len(location) * tenth // 10] for tenth in range(10)]
        for _ in range(50):
            at = order.randrange(len(location))
            corrupt.append(
                location[:at] + chr((ord(location[at]) + order.randrange(1, 90)) % 0x250) + location[at + 1 :]
            )
        corrupt += [location * 2, location + "\0", "\ud800", "x" * 10**7, location * 10_000, ":" * 1000]
        for wrong in corrupt:
            with pytest.raises(RegionError):
                producer.write(RegionHandle(name, wrong, 100), [Copy(data(1), 0)])
        land(producer.write(handle, [Copy(data(100), 0)]))
        np.testing.assert_array_equal(target.bytes, data(100))


@every_fabric
def test_a_handle_that_claims_too_many_bytes_reaches_none_of_them(name: str) -> None:
    """Before and after the original handle was opened."""
    with fabric_pair(name) as (consumer, producer):
        handle = consumer.register(memory(name, 100))
        for claimed in (101, 116, 117, 10**6):
            with pytest.raises(RegionError):
                producer.write(RegionHandle(name, handle.location, claimed), [Copy(data(claimed), 0)])
        land(producer.write(handle, [Copy(data(100), 0)]))
        for claimed in (101, 116, 117, 10**6):
            with pytest.raises(RegionError):
                producer.write(RegionHandle(name, handle.location, claimed), [Copy(data(claimed), 0)])


@every_fabric
def test_a_released_region_can_be_written_to_again(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 10)
        handle = consumer.register(target)
        land(producer.write(handle, [Copy(data(10, 1), 0)]))
        producer.release(handle)
        producer.release(handle)
        land(producer.write(handle, [Copy(data(10, 2), 0)]))
        np.testing.assert_array_equal(target.bytes, data(10, 2))


@every_fabric
def test_a_region_is_gone_once_its_fabric_is_closed(name: str) -> None:
    """A network fabric notices at the latest when the write should have landed."""
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 10)
        handle = consumer.register(target)
        consumer.close()
        consumer.close()
        target.close()
        with pytest.raises(RegionError if name in ("local", "shm") else TransferError):
            land(producer.write(handle, [Copy(data(1), 0)]))


@every_fabric
def test_closing_leaves_no_descriptor_and_no_thread_behind(name: str) -> None:
    """Except what a library keeps once per process."""

    def use() -> None:
        with fabric_pair(name) as (consumer, producer):
            for _ in range(5):
                target = memory(name, 10)
                land(producer.write(consumer.register(target), [Copy(data(1), 0)]))
                target.close()

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    use()
    descriptors, threads = left()
    use()
    ends = time.monotonic() + 10
    # fewer if what an earlier test left ends meanwhile; a library closes some in the background
    while ((now := left())[0] > descriptors or now[1] > threads) and time.monotonic() < ends:
        time.sleep(0.05)
    assert now[0] <= descriptors, (now, descriptors)
    assert now[1] <= threads, (now, threads)


@over_a_network
def test_closing_while_a_write_is_under_way(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        handle = consumer.register(memory(name, 64 * MIB))
        land(producer.write(handle, [Copy(data(1), 0)]))
        write = producer.write(handle, [Copy(data(64 * MIB), 0)])
        producer.close()
        with pytest.raises(TransferError, match="closed"):
            write.done()
        with pytest.raises(RegionError, match="closed"):
            producer.write(handle, [Copy(data(1), 0)])


@over_a_network
def test_releasing_while_a_write_is_under_way(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        target = memory(name, 16 * MIB)
        handle = consumer.register(target)
        write = producer.write(handle, [Copy(data(16 * MIB), 0)])
        producer.release(handle)
        again = producer.write(handle, [Copy(data(16 * MIB)[:1], 0)])
        producer.release(handle)
        land(write)
        land(again)
        np.testing.assert_array_equal(target.bytes, data(16 * MIB))
        land(producer.write(handle, [Copy(data(16 * MIB, 1), 0)]))
        np.testing.assert_array_equal(target.bytes, data(16 * MIB, 1))


@over_a_network
def test_a_deregistered_region_is_unreachable(name: str) -> None:
    """For fabrics that had it open and for others. The region next to it stays reachable."""
    with fabric_pair(name) as (consumer, producer):
        target, other = memory(name, 100), memory(name, 100)
        handle, beside = consumer.register(target), consumer.register(other)
        unknown = consumer.register(third := memory(name, 100))
        land(producer.write(handle, [Copy(data(100), 0)]))
        consumer.deregister(handle)
        consumer.deregister(handle)
        consumer.deregister(unknown)
        for gone in (handle, unknown, handle):
            with pytest.raises(TransferError):
                land(producer.write(gone, [Copy(data(100, 1), 0)]))
        np.testing.assert_array_equal(target.bytes, data(100))
        assert not third.bytes.any()
        land(producer.write(beside, [Copy(data(100), 0)]))
        np.testing.assert_array_equal(other.bytes, data(100))


@over_a_network
def test_a_forged_size_reaches_nothing_behind_the_region(name: str) -> None:
    """Unlike a corrupt handle, its digest is right."""
    with fabric_pair(name) as (consumer, producer):
        whole = PlainMemory(200)
        region = PlainMemory(100)
        region.bytes = whole.bytes[:100]
        handle = consumer.register(region)
        forged = seal(name, unseal(name, handle, 2**17), 200)
        for offset in (99, 100, 150):
            with pytest.raises(TransferError):
                land(producer.write(forged, [Copy(data(50), offset)]))
        assert not whole.bytes.any()
        land(producer.write(handle, [Copy(data(100), 0)]))


@between_processes
def test_another_process_is_reached(name: str) -> None:
    with owner_of(name, 100_000) as owner:
        writer = open_fabric(name)
        try:
            for seed in range(3):
                source = data(100_000, seed)
                land(writer.write(owner.handle, [Copy(source[50_000:], 50_000), Copy(source[:50_000], 0)]))
                assert owner.digest() == hashlib.sha256(source.tobytes()).hexdigest()
        finally:
            writer.close()


@between_processes
def test_a_killed_owner_is_an_error_within_seconds(name: str) -> None:
    """For writes in progress, for a fabric that has written and for a new one. Mapped memory outlives its owner: a
    fabric that has it open can still write to it, without effect."""
    with owner_of(name, 64 * MIB) as owner:
        source = data(64 * MIB)
        writer, late = open_fabric(name), open_fabric(name)
        try:
            land(writer.write(owner.handle, [Copy(source, 0)]))
            begun = [writer.write(owner.handle, [Copy(source, 0)]) for _ in range(4)]
            owner.kill()
            since = time.monotonic()
            for write in begun:
                try:
                    land(write, timeout=10)
                except TransferError:
                    with pytest.raises(TransferError):
                        write.done()
            if name != "shm":
                for _ in range(3):
                    with pytest.raises(TransferError):
                        land(writer.write(owner.handle, [Copy(source, 0)]), timeout=10)
            with pytest.raises(TransferError):
                land(late.write(owner.handle, [Copy(source, 0)]), timeout=10)
            assert time.monotonic() - since < 10
        finally:
            writer.close()
            late.close()


@between_processes
def test_a_stopped_owner_blocks_no_writer(name: str) -> None:
    """Neither a first write nor a later one blocks; the bytes land when the owner continues."""
    with owner_of(name, MIB) as owner:
        source = data(MIB)
        known, stranger = open_fabric(name), open_fabric(name)
        try:
            land(known.write(owner.handle, [Copy(source, 0)]))
            owner.process.send_signal(signal.SIGSTOP)
            since = time.monotonic()
            writes = [fabric.write(owner.handle, [Copy(source, 0)]) for fabric in (known, stranger)]
            for write in writes:
                write.done()
            assert time.monotonic() - since < 10
            owner.process.send_signal(signal.SIGCONT)
            for write in writes:
                land(write)
            assert owner.digest() == hashlib.sha256(source.tobytes()).hexdigest()
        finally:
            known.close()
            stranger.close()


@over_a_network
def test_a_writer_outlives_one_owner_and_reaches_the_next(name: str) -> None:
    writer = open_fabric(name)
    try:
        for seed in range(3):
            with owner_of(name, 1000) as owner:
                land(writer.write(owner.handle, [Copy(data(1000, seed), 0)]))
                assert owner.digest() == hashlib.sha256(data(1000, seed).tobytes()).hexdigest()
                owner.kill()
                with pytest.raises(TransferError):
                    land(writer.write(owner.handle, [Copy(data(1000), 0)]))
                writer.release(owner.handle)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("fabric", "module", "command"),
    [
        (NixlFabric, "nixl_cu12", r"pip install '\.\[nixl\]'"),
        (MooncakeFabric, "mooncake", r"pip install '\.\[mooncake\]'"),
    ],
)
def test_a_missing_library_names_the_command_that_installs_it(
    fabric: type[NixlFabric] | type[MooncakeFabric], module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
            if name.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13", "mooncake"):
                raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(StartError, match=command):
        fabric()


def test_shm_rejects_memory_that_cannot_be_mapped() -> None:
    with fabric_pair("shm") as (consumer, _), pytest.raises(RegionError):
        consumer.register(PlainMemory(10))


def test_shm_rejects_a_wrong_token() -> None:
    with fabric_pair("shm") as (consumer, producer):
        target = SharedMemory(10)
        owner, token = consumer.register(target).location.rsplit(":", 1)
        wrong = f"{owner}:{int(token, 16) ^ 1:032x}"
        with pytest.raises(RegionError, match="gone"):
            producer.write(RegionHandle("shm", wrong, 10), [Copy(data(1), 0)])


def test_shm_rejects_a_file_that_is_no_region() -> None:
    with open("/dev/null") as file, fabric_pair("shm") as (_, producer):
        location = f"{os.getpid()}:{file.fileno()}:{'0' * 32}"
        with pytest.raises(RegionError):
            producer.write(RegionHandle("shm", location, 10), [Copy(data(1), 0)])


def test_shm_reaches_another_process_and_notices_its_death() -> None:
    with owner_of("shm", 100_000) as owner:
        source = data(owner.handle.num_bytes)
        writer, late = SharedMemoryFabric(), SharedMemoryFabric()
        try:
            half = owner.handle.num_bytes // 2
            assert writer.write(owner.handle, [Copy(source[half:], half), Copy(source[:half], 0)]).done()
            assert owner.digest() == hashlib.sha256(source.tobytes()).hexdigest()
            owner.kill()
            with pytest.raises(RegionError):
                late.write(owner.handle, [Copy(source, 0)])
        finally:
            writer.close()
            late.close()
