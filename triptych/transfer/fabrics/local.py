"""Fabric within one process: a write is a plain copy."""

import os
import secrets
from collections.abc import Sequence

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import CompletedWrite, Copy, check_bounds, copy_into
from triptych.transfer.memory import Bytes, Memory


class LocalFabric:
    """Moves bytes between the stages of one instance, which share this object."""

    name = "local"
    checksums = False

    def __init__(self) -> None:
        self.scope = f"{os.getpid()}:{secrets.token_hex(8)}"
        self._regions: dict[str, Bytes] = {}

    @property
    def num_regions(self) -> int:
        """How many regions are registered."""
        return len(self._regions)

    def register(self, memory: Memory) -> RegionHandle:
        location = secrets.token_hex(8)
        self._regions[location] = memory.bytes
        return RegionHandle(self.name, location, memory.bytes.nbytes)

    def deregister(self, region: RegionHandle) -> None:
        self._regions.pop(region.location, None)

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> CompletedWrite:
        target = self._regions.get(region.location)
        if region.fabric != self.name or target is None or target.nbytes != region.num_bytes:
            raise RegionError(f"not a region of this process: {region.fabric}:{region.location[:80]}")
        check_bounds(region, copies)
        copy_into(target, copies)
        return CompletedWrite()

    def release(self, region: RegionHandle) -> None:
        """Do nothing: no region is opened."""

    def close(self) -> None:
        self._regions.clear()
