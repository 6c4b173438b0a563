"""What every fabric must do, in one body; and what only memory shared between processes can get wrong."""

import hashlib
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from tests.transfer.wire import FABRICS, fabric_pair
from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import Bytes, Copy
from triptych.transfer.fabrics.shm import SharedMemoryFabric

OWNER = """
import hashlib, sys, msgspec
from triptych.transfer.fabrics.shm import SharedMemoryFabric
region = SharedMemoryFabric().allocate(100_000)
print(msgspec.json.encode(region.handle).decode(), flush=True)
sys.stdin.readline()
print(hashlib.sha256(region.memory.tobytes()).hexdigest(), flush=True)
"""
"""A process that owns a region, and reads it when told that it was written to."""


def data(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


every_fabric = pytest.mark.parametrize("name", FABRICS)


@every_fabric
def test_bytes_land_where_they_are_put_and_nowhere_else(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        region = consumer.allocate(100)
        region.memory[:] = 7
        copies = [Copy(data(10, 1), 20), Copy(data(5, 2), 0), Copy(data(1, 3), 99)]
        assert producer.write(region.handle, copies).done()
        expected = np.full(100, 7, dtype=np.uint8)
        for copy in copies:
            expected[copy.offset : copy.offset + len(copy.source)] = copy.source
        np.testing.assert_array_equal(region.memory, expected)


@every_fabric
def test_neighbouring_regions_are_not_touched(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        regions = [consumer.allocate(4096) for _ in range(3)]
        for region in regions:
            region.memory[:] = 7
        producer.write(regions[1].handle, [Copy(data(4096), 0)])
        assert [bool((region.memory == 7).all()) for region in regions] == [True, False, True]
        np.testing.assert_array_equal(regions[1].memory, data(4096))


@every_fabric
@pytest.mark.parametrize("offset", [-1, 91, 100, 2**62])
def test_a_copy_out_of_bounds_is_refused_before_the_first_byte(name: str, offset: int) -> None:
    with fabric_pair(name) as (consumer, producer):
        region = consumer.allocate(100)
        region.memory[:] = 7
        with pytest.raises(RegionError):
            producer.write(region.handle, [Copy(data(10), 0), Copy(data(10), offset)])
        assert (region.memory == 7).all()


@every_fabric
def test_a_foreign_handle_is_refused(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        handle = consumer.allocate(100).handle
        for foreign in (
            RegionHandle("another", handle.location, 100),
            RegionHandle(name, "", 100),
            RegionHandle(name, "../../etc/passwd", 100),
            RegionHandle(name, handle.location + "0", 100),
        ):
            with pytest.raises(RegionError):
                producer.write(foreign, [Copy(data(1), 0)])


@every_fabric
def test_a_handle_that_claims_more_bytes_than_there_are_reaches_none_of_them(name: str) -> None:
    """Before and after the true handle was opened."""
    with fabric_pair(name) as (consumer, producer):
        handle = consumer.allocate(100).handle
        for claimed in (101, 116, 117, 10**6):
            with pytest.raises(RegionError):
                producer.write(RegionHandle(name, handle.location, claimed), [Copy(data(claimed), 0)])
        producer.write(handle, [Copy(data(100), 0)])
        for claimed in (101, 116, 117, 10**6):
            with pytest.raises(RegionError):
                producer.write(RegionHandle(name, handle.location, claimed), [Copy(data(claimed), 0)])


@every_fabric
def test_a_released_region_can_be_written_to_again(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        region = consumer.allocate(10)
        producer.write(region.handle, [Copy(data(10, 1), 0)])
        producer.release(region.handle)
        producer.release(region.handle)
        producer.write(region.handle, [Copy(data(10, 2), 0)])
        np.testing.assert_array_equal(region.memory, data(10, 2))


@every_fabric
def test_a_region_is_gone_once_its_fabric_is_closed(name: str) -> None:
    with fabric_pair(name) as (consumer, producer):
        handle = consumer.allocate(10).handle
        consumer.close()
        with pytest.raises(RegionError):
            producer.write(handle, [Copy(data(1), 0)])


@every_fabric
def test_closing_leaves_no_descriptor_behind(name: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with fabric_pair(name) as (consumer, producer):
        for _ in range(5):
            producer.write(consumer.allocate(10).handle, [Copy(data(1), 0)])
    del consumer, producer
    assert len(os.listdir("/proc/self/fd")) == before


def test_shm_refuses_a_wrong_token() -> None:
    with fabric_pair("shm") as (consumer, producer):
        handle = consumer.allocate(10).handle
        place, token = handle.location.rsplit(":", 1)
        wrong = f"{place}:{int(token, 16) ^ 1:032x}"
        with pytest.raises(RegionError, match="gone"):
            producer.write(RegionHandle("shm", wrong, 10), [Copy(data(1), 0)])


def test_shm_refuses_a_file_that_is_no_region() -> None:
    with open("/dev/null") as file, fabric_pair("shm") as (_, producer):
        location = f"{os.getpid()}:{file.fileno()}:{'0' * 32}"
        with pytest.raises(RegionError):
            producer.write(RegionHandle("shm", location, 10), [Copy(data(1), 0)])


def test_shm_reaches_another_process_and_knows_when_it_is_dead() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        handle = msgspec.json.decode(owner.stdout.readline(), type=RegionHandle)
        source = data(handle.num_bytes)
        writer, late = SharedMemoryFabric(), SharedMemoryFabric()
        try:
            half = handle.num_bytes // 2
            assert writer.write(handle, [Copy(source[half:], half), Copy(source[:half], 0)]).done()
            seen, _ = owner.communicate("written\n", timeout=30)
            assert seen.strip() == hashlib.sha256(source.tobytes()).hexdigest()
            with pytest.raises(RegionError):
                late.write(handle, [Copy(source, 0)])
        finally:
            writer.close()
            late.close()
