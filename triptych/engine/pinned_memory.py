"""Receive buffers of instances on GPUs."""

import logging
from typing import Any

import torch

from triptych.transfer.memory import SharedMemory

log = logging.getLogger(__name__)


class PinnedSharedMemory(SharedMemory):
    """Shared memory from which a GPU copies by itself, without a detour through memory of the driver."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._is_pinned = int(self._cuda.cudaHostRegister(self.bytes.ctypes.data, num_bytes, 0)) == 0
        if not self._is_pinned:
            log.warning("CUDA can't pin the %d bytes of a receive buffer: copies from it are slower", num_bytes)

    def close(self) -> None:
        """Close the file, as ``SharedMemory`` does. The GPU must have copied what was to be copied."""
        if self._is_pinned:
            self._cuda.cudaHostUnregister(self.bytes.ctypes.data)
            self._is_pinned = False
        super().close()
