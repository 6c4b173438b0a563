"""Memory in huge pages, for packed weights and the KV cache: a token's step reads all of its memory once.

Before it reads memory, a processor looks up where its page is. It keeps that for few pages, so that memory in pages
of 4 KiB needs a look-up each time it is read, which takes longer in a virtual machine.
"""

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

CHUNK = 2**26
"""Bytes that are mapped at a time. A tensor that fits nowhere else takes a chunk of its own."""
LINE = 64
"""Alignment of tensors in bytes."""


class HugePages:
    """Allocates tensors next to each other, since each of them would leave part of a huge page empty. A chunk's memory
    is taken as it is written, and returned when none of its tensors is left."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._size = chunk
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is zero at first. Raises OSError if there is no memory."""
        size = math.prod(shape) * dtype.itemsize
        return self._take(size).view(dtype).view(shape)

    def _take(self, size: int) -> Tensor:
        with self._lock:
            if size > self._size:
                return _mapped(size)
            if self._used + size > len(self._chunk):
                self._chunk, self._used = _mapped(self._size), 0
            first = self._used
            self._used = -(-(first + size) // LINE) * LINE
            return self._chunk[first : first + size]


def _mapped(size: int) -> Tensor:
    """Return ``size`` bytes, in huge pages if the system has them."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size)


packed_weights = HugePages()
"""The packed weights of this process."""
