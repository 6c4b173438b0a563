"""Interface of a fabric, which moves bytes into another process's registered memory. Independent of rows and of the
transfer protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.errors import RegionError
from triptych.messages.rows import RegionHandle
from triptych.transfer.memory import Bytes, Memory


@dataclass(frozen=True)
class Copy:
    """Bytes to write at ``offset`` of a region."""

    source: Bytes
    """One-dimensional and contiguous."""
    offset: int


class Write(Protocol):
    """A write in progress. Its sources must not change until ``done`` returns True or raises."""

    def done(self) -> bool:
        """Return whether every byte has landed. Never blocks. Raises TransferError when the write has failed and its
        sources aren't read any more."""

    def cancel(self) -> None:
        """Stop early if the fabric can. ``done`` still reports when the sources aren't read any more."""


class Fabric(Protocol):
    """Moves bytes between regions. One per process; not thread-safe."""

    name: str
    scope: str
    """Two ends can reach each other if both name and scope are equal. A fabric within one machine names the machine; a
    fabric that crosses hosts leaves it empty."""
    checksums: bool
    """Whether bytes may be corrupted on their way, so that each write is checked end to end by default."""

    def register(self, memory: Memory) -> RegionHandle:
        """Let peers write to this memory. Raises RegionError for a kind of memory that the fabric can't share."""

    def deregister(self, region: RegionHandle) -> None:
        """Revoke ``register``. Peers that have the region open may still write to its memory, but to no other."""

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Write:
        """Start writing to a peer's region. Raises RegionError, without writing anything, when the region can't be
        reached or a copy exceeds it."""

    def release(self, region: RegionHandle) -> None:
        """Close a peer's region that ``write`` has opened."""

    def close(self) -> None:
        """Close all regions, registered or opened. Nothing is written or received any more."""


class CompletedWrite:
    """A write that was done when ``write`` returned."""

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        """Do nothing: the write is done."""


def check_bounds(region: RegionHandle, copies: Sequence[Copy]) -> None:
    """Raise RegionError unless every copy is within the region."""
    for copy in copies:
        if copy.offset < 0 or copy.offset + copy.source.nbytes > region.num_bytes:
            raise RegionError(
                f"{copy.source.nbytes} bytes at offset {copy.offset} exceed a region of {region.num_bytes} bytes"
            )


def copy_into(memory: Bytes, copies: Sequence[Copy]) -> None:
    """Copy into memory that this process can address."""
    for copy in copies:
        memory[copy.offset : copy.offset + copy.source.nbytes] = copy.source
