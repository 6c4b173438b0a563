"""Fabric within one machine: the producer maps the consumer's memory and copies directly into it."""

import mmap
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import CompletedWrite, Copy, check_bounds, copy_into
from triptych.transfer.memory import SHARED_MAPPING, SHARED_NAME, TOKEN_BYTES, Bytes, Memory, SharedMemory

_LOCATION = re.compile(r"(\d{1,10}):(\d{1,10}):([0-9a-f]{32})")


class SharedMemoryFabric:
    """Moves bytes between processes of the same machine, user and process namespace."""

    name = "shm"
    checksums = False

    def __init__(self) -> None:
        self.scope = _machine()
        self._owned: dict[RegionHandle, Memory] = {}
        self._opened: dict[RegionHandle, Bytes] = {}  # by the whole handle, because opening checks the size

    def register(self, memory: Memory) -> RegionHandle:
        if not isinstance(memory, SharedMemory):
            raise RegionError(f"{type(memory).__name__} can't be mapped by other processes")
        region = RegionHandle(self.name, f"{os.getpid()}:{memory.file}:{memory.token.hex()}", memory.bytes.nbytes)
        self._owned[region] = memory
        return region

    def deregister(self, region: RegionHandle) -> None:
        """Drop the region. Its memory can be opened until ``SharedMemory.close``."""
        self._owned.pop(region, None)

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> CompletedWrite:
        if region not in self._opened:
            self._opened[region] = _open(region)
        check_bounds(region, copies)
        copy_into(self._opened[region], copies)
        return CompletedWrite()

    def release(self, region: RegionHandle) -> None:
        self._opened.pop(region, None)

    def close(self) -> None:
        self._owned.clear()
        self._opened.clear()


def _machine() -> str:
    """Identify this boot of this machine, the process namespace and the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}:{os.getuid()}"


def _open(region: RegionHandle) -> Bytes:
    """Map a peer's memory, and verify its token, because a process id may have been reused."""
    parts = _LOCATION.fullmatch(region.location)
    if region.fabric != SharedMemoryFabric.name or parts is None:
        raise RegionError(f"not a shared memory region: {region.fabric}:{region.location[:80]}")
    path = f"/proc/{parts[1]}/fd/{parts[2]}"
    size = region.num_bytes + TOKEN_BYTES
    try:
        if not os.readlink(path).startswith(f"/memfd:{SHARED_NAME}"):
            raise RegionError("the region's owner is gone")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size != size:
                raise RegionError(f"the region doesn't have {region.num_bytes} bytes")
            pages = mmap.mmap(file, size, flags=SHARED_MAPPING)
        finally:
            os.close(file)  # the mapping stays valid
    except OSError as error:
        raise RegionError(f"can't open the region: {error.strerror}") from None
    if not secrets.compare_digest(pages[region.num_bytes :], bytes.fromhex(parts[3])):
        raise RegionError("the region's owner is gone")
    return np.frombuffer(pages, dtype=np.uint8, count=region.num_bytes)
