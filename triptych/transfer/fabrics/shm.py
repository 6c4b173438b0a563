"""The fabric of one machine: the producer maps the consumer's region and writes straight into it, one copy.

A region is an anonymous memory file (memfd) that peers open through ``/proc/<pid>/fd/<fd>``. Nothing has a name in a
file system, so a killed process leaves nothing behind, and the size limit of /dev/shm in containers doesn't apply.
Why not a named segment: docs/decisions/0004-shared-memory.md.
"""

import mmap
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import Bytes, Copy, Finished, Region, put

_NAME = "triptych-rows"
_LOCATION = re.compile(r"(\d{1,10}):(\d{1,10}):([0-9a-f]{32})")
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class _Mapping:
    file: int
    pages: mmap.mmap

    def memory(self, num_bytes: int) -> Bytes:
        """The region proper; the token that tells it from a stranger's memory stands behind it."""
        return np.frombuffer(self.pages, dtype=np.uint8, count=num_bytes)


class SharedMemoryFabric:
    """Moves bytes between processes of one machine and one user."""

    name = "shm"

    def __init__(self) -> None:
        self._allocated: list[_Mapping] = []
        self._opened: dict[RegionHandle, _Mapping] = {}  # by the whole handle: its size is checked on opening

    def allocate(self, num_bytes: int) -> Region:
        token = secrets.token_bytes(_TOKEN_BYTES)
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes + _TOKEN_BYTES)
        mapping = _Mapping(file, mmap.mmap(file, num_bytes + _TOKEN_BYTES))
        mapping.pages[num_bytes:] = token
        self._allocated.append(mapping)
        location = f"{os.getpid()}:{file}:{token.hex()}"
        return Region(RegionHandle(self.name, location, num_bytes), mapping.memory(num_bytes))

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Finished:
        if region not in self._opened:
            self._opened[region] = self._open(region)
        put(self._opened[region].memory(region.num_bytes), copies)
        return Finished()

    def release(self, region: RegionHandle) -> None:
        if mapping := self._opened.pop(region, None):
            os.close(mapping.file)

    def close(self) -> None:
        for mapping in [*self._allocated, *self._opened.values()]:
            os.close(mapping.file)
        self._allocated.clear()
        self._opened.clear()

    def _open(self, region: RegionHandle) -> _Mapping:
        """Maps a peer's region, after making sure that it is one: a process id may have been used again."""
        parts = _LOCATION.fullmatch(region.location)
        if region.fabric != self.name or parts is None:
            raise RegionError(f"not a shared memory region: {region.fabric}:{region.location[:80]}")
        path = f"/proc/{parts[1]}/fd/{parts[2]}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                raise RegionError("the region's owner is gone")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegionError(f"can't open the region: {error.strerror}") from None
        try:
            return self._mapped(file, region, parts[3])
        except BaseException:
            os.close(file)
            raise

    @staticmethod
    def _mapped(file: int, region: RegionHandle, token: str) -> _Mapping:
        size = region.num_bytes + _TOKEN_BYTES
        if os.fstat(file).st_size != size:
            raise RegionError(f"the region isn't of {region.num_bytes} bytes")
        mapping = _Mapping(file, mmap.mmap(file, size))
        if not secrets.compare_digest(mapping.pages[region.num_bytes :], bytes.fromhex(token)):
            raise RegionError("the region's owner is gone")
        return mapping
