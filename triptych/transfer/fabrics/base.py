"""What a fabric is: a way to move bytes into another process's registered memory. Bytes only; no rows, no protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle
from triptych.transfer.memory import Bytes, Memory


@dataclass(frozen=True)
class Copy:
    """Bytes to put at ``offset`` of a region. ``source`` is one-dimensional and contiguous."""

    source: Bytes
    offset: int


class Write(Protocol):
    """A write under way. Its sources must stay as they are until ``done`` returns True or raises."""

    def done(self) -> bool:
        """Whether every byte has landed. Never blocks. Raises TransferError when the write failed; then, too, the
        sources aren't read any more."""

    def cancel(self) -> None:
        """Nobody needs the bytes any more. A fabric that can stops early; ``done`` still says when it has let go."""


class Fabric(Protocol):
    """Moves bytes between regions. One per process; used by one thread."""

    name: str
    scope: str
    """Two ends reach each other when both name and scope are equal: a fabric of one machine names the machine here,
    one that crosses hosts leaves it empty."""
    checksums: bool
    """Whether bytes cross something that may garble them, so that each write is checked end to end by default."""

    def register(self, memory: Memory) -> RegionHandle:
        """Lets peers write to this memory. Raises RegionError when it is of a kind that this fabric can't share."""

    def deregister(self, region: RegionHandle) -> None:
        """Takes that back. Peers that had it open already may still write to the memory, but to no other."""

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Write:
        """Starts copying into a peer's region. Raises RegionError when the region can't be reached, or when a copy
        doesn't fit in it; then no byte has been written."""

    def release(self, region: RegionHandle) -> None:
        """Forgets what was opened for writing to a peer's region."""

    def close(self) -> None:
        """Gives up every region, registered here or opened. Nothing is written or received any more."""


class Finished:
    """The Write of a fabric whose copies are done when ``write`` returns."""

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        """Too late."""


def check_fit(region: RegionHandle, copies: Sequence[Copy]) -> None:
    """Raises RegionError unless every copy fits in the region."""
    for copy in copies:
        if copy.offset < 0 or copy.offset + copy.source.nbytes > region.num_bytes:
            raise RegionError(
                f"{copy.source.nbytes} bytes at {copy.offset} don't fit in a region of {region.num_bytes}"
            )


def put(memory: Bytes, copies: Sequence[Copy]) -> None:
    """Copies into memory that this process can address."""
    for copy in copies:
        memory[copy.offset : copy.offset + copy.source.nbytes] = copy.source
