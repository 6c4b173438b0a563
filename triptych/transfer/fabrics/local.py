"""The fabric inside one process: a write is a plain copy."""

import secrets
from collections.abc import Sequence

import numpy as np

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle
from triptych.transfer.fabrics.base import Copy, Finished, Region, put


class LocalFabric:
    """Moves bytes between two stages of one instance, which share this object."""

    name = "local"

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    def allocate(self, num_bytes: int) -> Region:
        location = secrets.token_hex(8)
        region = Region(RegionHandle(self.name, location, num_bytes), np.empty(num_bytes, dtype=np.uint8))
        self._regions[location] = region
        return region

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Finished:
        target = self._regions.get(region.location)
        if region.fabric != self.name or target is None:
            raise RegionError(f"no region of this process: {region.fabric}:{region.location}")
        put(target.memory, copies)
        return Finished()

    def release(self, region: RegionHandle) -> None:
        """Nothing is held for a region that wasn't allocated here."""

    def close(self) -> None:
        self._regions.clear()
