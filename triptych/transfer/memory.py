"""Kinds of memory that a fabric can write to. The buffer's constructor chooses the kind, not the fabric."""

import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

SHARED_NAME = "triptych-rows"
TOKEN_BYTES = 16
SHARED_MAPPING = mmap.MAP_SHARED | mmap.MAP_POPULATE
"""Populated in advance, because the page fault of a first write costs far more than the copy."""


class Memory(Protocol):
    """A block of memory."""

    @property
    def bytes(self) -> Bytes:
        """One-dimensional contiguous uint8, valid until ``close``."""

    def close(self) -> None: ...


Allocate = Callable[[int], Memory]
"""Allocates a number of bytes."""


class PlainMemory:
    """Memory private to this process, sufficient for fabrics that write through a network stack."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes: Bytes = np.zeros(num_bytes, dtype=np.uint8)

    def close(self) -> None:
        """Do nothing: only the array holds memory."""


class SharedMemory:
    """Anonymous memory file (memfd), which processes of the same user map through ``/proc/<pid>/fd/<fd>``.

    It has no name in a file system: a killed process leaves nothing behind, and the size limit of /dev/shm in
    containers doesn't apply. See docs/decisions/0004-shared-memory.md for why it isn't a named segment. A random
    ``token`` follows the bytes. It detects that another file has since been given the same process id and descriptor.
    """

    def __init__(self, num_bytes: int) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.file = os.memfd_create(SHARED_NAME, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.file)  # runs once: in close, or on garbage collection
        try:
            os.ftruncate(self.file, num_bytes + TOKEN_BYTES)
            pages = mmap.mmap(self.file, num_bytes + TOKEN_BYTES, flags=SHARED_MAPPING)
        except BaseException:
            self._close()
            raise
        pages[num_bytes:] = self.token
        # the array keeps the mapping alive: it is unmapped with the last view of it
        self.bytes: Bytes = np.frombuffer(pages, dtype=np.uint8, count=num_bytes)

    def close(self) -> None:
        """Close the file, so that peers can't open it any more. Existing mappings stay valid."""
        self._close()
