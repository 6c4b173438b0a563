"""What a fabric is: a way to move bytes into another process's registered memory. Bytes only; no rows, no protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Region:
    """Registered memory of this process. ``memory`` is one-dimensional uint8; ``handle`` is what peers write to."""

    handle: RegionHandle
    memory: Bytes


@dataclass(frozen=True)
class Copy:
    """Bytes to put at ``offset`` of a region. ``source`` is one-dimensional and contiguous."""

    source: Bytes
    offset: int


class Write(Protocol):
    """A write under way."""

    def done(self) -> bool:
        """Whether every byte has landed. Raises TransferError when the write failed."""


class Fabric(Protocol):
    """Moves bytes between regions. One per process; used by one thread."""

    name: str

    def allocate(self, num_bytes: int) -> Region:
        """Memory that peers can write to until ``close``."""

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Write:
        """Starts copying into a peer's region. Sources must stay untouched until the write is done.
        Raises RegionError when the region can't be reached or a copy doesn't fit in it."""

    def release(self, region: RegionHandle) -> None:
        """Forgets what was opened for writing to a peer's region."""

    def close(self) -> None:
        """Gives up every region, allocated here or opened."""


class Finished:
    """The Write of a fabric whose copies are done when ``write`` returns."""

    def done(self) -> bool:
        return True


def put(memory: Bytes, copies: Sequence[Copy]) -> None:
    """Copies into memory this process can address. Raises RegionError before the first byte if any doesn't fit."""
    for copy in copies:
        if copy.offset < 0 or copy.offset + copy.source.nbytes > memory.nbytes:
            raise RegionError(f"{copy.source.nbytes} bytes at {copy.offset} don't fit in a region of {memory.nbytes}")
    for copy in copies:
        memory[copy.offset : copy.offset + copy.source.nbytes] = copy.source
