"""Receive buffers of instances on GPUs."""

from contextlib import suppress
from typing import Any

import torch

from triptych.errors import RegionError
from triptych.transfer.memory import SharedMemory


class PinnedSharedMemory(SharedMemory):
    """Shared memory from which a GPU copies by itself, without a detour through memory of the driver."""

    def __init__(self, num_bytes: int) -> None:
        """Raises RegionError if CUDA can't pin the memory, which it does in the context of the current device."""
        super().__init__(num_bytes)
        self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._is_pinned = int(self._cuda.cudaHostRegister(self.bytes.ctypes.data, num_bytes, 0)) == 0
        if not self._is_pinned:
            self.close()
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA reports the error again to the next launch
            raise RegionError(f"CUDA can't pin the {num_bytes} bytes of a receive buffer")

    def close(self) -> None:
        """Close the file, as ``SharedMemory`` does. The GPU must have copied what was to be copied."""
        if self._is_pinned:
            self._cuda.cudaHostUnregister(self.bytes.ctypes.data)
            self._is_pinned = False
        super().close()
