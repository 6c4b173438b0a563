"""Memory that a fabric can write to, by kind: a constructor argument of the buffer, not a fabric's own choice."""

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
"""With its pages in place: the first write to a page that isn't costs about ten times what copying it does."""


class Memory(Protocol):
    """``bytes`` is one-dimensional, contiguous uint8; valid until ``close``."""

    @property
    def bytes(self) -> Bytes: ...

    def close(self) -> None: ...


Allocate = Callable[[int], Memory]
"""Makes memory of that many bytes."""


class PlainMemory:
    """Memory of this process alone: enough for fabrics that write through a network stack."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes: Bytes = np.zeros(num_bytes, dtype=np.uint8)

    def close(self) -> None:
        """Nothing is held beyond the array."""


class SharedMemory:
    """An anonymous memory file (memfd), which processes of the same user map through ``/proc/<pid>/fd/<fd>``.

    Nothing has a name in a file system, so a killed process leaves nothing behind, and the size limit of /dev/shm in
    containers doesn't apply. Why not a named segment: docs/decisions/0004-shared-memory.md. A random ``token`` stands
    behind the bytes, and tells the memory from a stranger's that came to have the same process id and descriptor.
    """

    def __init__(self, num_bytes: int) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.file = os.memfd_create(SHARED_NAME, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.file)  # once: here, or when nobody has this any more
        try:
            os.ftruncate(self.file, num_bytes + TOKEN_BYTES)
            pages = mmap.mmap(self.file, num_bytes + TOKEN_BYTES, flags=SHARED_MAPPING)
        except BaseException:
            self._close()
            raise
        pages[num_bytes:] = self.token
        # the array keeps the mapping alive: it is unmapped when the last view of it is gone
        self.bytes: Bytes = np.frombuffer(pages, dtype=np.uint8, count=num_bytes)

    def close(self) -> None:
        """Peers can't open it any more. Those that have mapped it keep what they mapped."""
        self._close()
