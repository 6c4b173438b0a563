"""Copies between CPU and GPU through pinned memory: many tensors in one asynchronous copy."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment of packed tensors in bytes, which allows kernels to use wide loads."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy CPU tensors of any dtypes to the device in one copy, without waiting for it; later work on the device does.

    For a CPU device, returns the tensors themselves.
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    buffer = packed(tensors, pin_memory=True).to(device, non_blocking=True)
    return unpacked(buffer, tensors)


def concatenated(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return CPU tensors [rows, values], concatenated, on the device and in ``dtype``. For a GPU each is read once, and
    one copy in ``dtype`` is launched; later work on the device waits for it."""
    if device.type == "cpu":
        return torch.cat(list(tensors)).to(dtype)
    lengths = [len(tensor) for tensor in tensors]
    on_host = torch.empty((sum(lengths), *tensors[0].shape[1:]), dtype=dtype, pin_memory=True)
    for part, tensor in zip(on_host.split(lengths), tensors, strict=True):
        part.copy_(tensor)
    return on_host.to(device, non_blocking=True)


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to the CPU and wait once for all of them, while other threads may run.

    CPU tensors are returned themselves. Copies from a GPU are in pinned memory: don't keep them longer than needed.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def packed(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Return the tensors' bytes in one uint8 tensor, each at an aligned offset.

    PyTorch caches pinned memory, and reuses it only when copies from it are done: after the first steps nothing is
    allocated.
    """
    places = _places(tensors)
    buffer = torch.empty(places[-1], dtype=torch.uint8, pin_memory=pin_memory)
    for view, tensor in zip(unpacked(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def unpacked(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a ``buffer`` made by ``packed``, with the dtypes and shapes of ``tensors``."""
    return [
        buffer[place : place + prod(tensor.shape) * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
        for place, tensor in zip(_places(tensors), tensors, strict=False)
    ]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return the offset of each tensor's bytes, and finally the total size."""
    sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    return [0, *accumulate(sizes)]
