"""Copies between host and device, through pinned memory: many tensors in one copy that needn't be waited for."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Kernels read tensors that begin at multiples of it in wider loads."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors of any dtypes on the device, in one copy, which later work there waits for by itself but the host
    doesn't. On the CPU they are returned as they are."""
    if device.type == "cpu" or not tensors:
        return list(tensors)
    buffer = packed(tensors, pin_memory=True).to(device, non_blocking=True)
    return unpacked(buffer, tensors)


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device in host memory, after one wait for all of them, which lets other threads run; those on the
    CPU are returned as they are. Ones from a GPU lie in pinned memory: keep them no longer than needed."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def packed(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """The tensors' bytes, uint8, each from an aligned place on. PyTorch keeps pinned memory that is let go of until
    copies out of it are done, and hands it out again: after the first steps nothing is allocated."""
    places = _places(tensors)
    buffer = torch.empty(places[-1], dtype=torch.uint8, pin_memory=pin_memory)
    for view, tensor in zip(unpacked(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def unpacked(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``buffer``, laid out as ``packed`` does, with the tensors' dtypes and shapes."""
    return [
        buffer[place : place + prod(tensor.shape) * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
        for place, tensor in zip(_places(tensors), tensors, strict=False)
    ]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor's bytes begin, and at last the size of it all."""
    sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    return [0, *accumulate(sizes)]
