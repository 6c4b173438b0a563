"""A device that can be asked whether it still computes."""

import torch

SIZE = 16
"""Rows and columns of the matrices that are multiplied."""


class TorchDevice:
    """A CPU or a GPU, as the compute thread sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin_job(self) -> None:
        """Do nothing: a device is asked only after a failure."""

    def ask(self) -> None:
        """Multiply two tiny matrices, and wait for the product. Raises RuntimeError if it is wrong, and what PyTorch
        raises if there is none, as after CUDA errors that spoil the process's context."""
        ones = torch.ones(SIZE, SIZE, device=self._device)
        if (total := float((ones @ ones).sum())) != SIZE**3:
            raise RuntimeError(f"{self._device} computed {total:g} instead of {SIZE**3}")
