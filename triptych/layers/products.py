"""Matrix products with packed weights by the compiled kernels."""

import ctypes
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers.rounding import saturating_cast

Product = Callable[[Tensor], Tensor]
"""``x W^T + b``: float32 activations [T, in] to [T, out]."""

AT_ONCE = 2**19
"""Number of weights that are rearranged at a time: small enough to stay in the CPU's cache."""


class WeightKind(IntEnum):
    """Format of packed weights: ``Kind`` in ``kernels/cpu/products.h``."""

    HALF = 0
    FLOAT = 1
    INT8 = 2
    BF16 = 3
    INT4 = 4


class LinearOperands(ctypes.Structure):
    """A layer's weights: ``Linear`` in ``kernels/cpu/products.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "kind", "group", "has_zeros")),
    )


class CompiledProduct:
    """A linear layer's packed weights and the kernel for them.

    A token's outputs are bit-identical in any batch.
    """

    def __init__(  # noqa: PLR0917 (a kernel's operands)
        self,
        library: ctypes.CDLL,
        kind: WeightKind,
        shape: torch.Size,
        panels: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        *,
        group: int = 0,
        has_zeros: bool = False,
    ) -> None:
        """``panels`` are the weights from ``in_panels``; ``shape`` is (out, in); only int8 has ``scales``, float32
        [out]. ``group`` and ``has_zeros`` are for 4-bit weights; see ``GroupedWeight``."""
        self.library = library
        self.outputs, self.inputs = shape
        self.panels = panels
        self.bias = None if bias is None else bias.float().contiguous()
        self.scales = scales
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (panels, scales, self.bias)]
        self.operands = LinearOperands(*pointers, self.inputs, self.outputs, kind, group, has_zeros)
        self._run = library.linear
        self._run.argtypes = [
            ctypes.POINTER(LinearOperands),
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
        ]
        self._run.restype = ctypes.c_int

    def __call__(self, activations: Tensor) -> Tensor:
        """Return float32 [T, out] for activations [T, in]. Raises ValueError for another width, and MemoryError."""
        num_tokens, inputs = activations.shape
        if inputs != self.inputs:
            raise ValueError(f"{inputs} inputs for a layer of {self.inputs}")
        if activations.dtype != torch.float32 or activations.stride(1) != 1:
            activations = activations.float().contiguous()
        output = activations.new_empty((num_tokens, self.outputs))
        where = activations.data_ptr(), activations.stride(0), output.data_ptr()
        if not self._run(self.operands, *where, num_tokens):
            raise MemoryError(f"no memory to multiply {num_tokens} tokens")
        return output


def in_panels(weight: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Pack ``weight`` [N, K] for the compiled kernels, in panels of ``outputs`` rows, padded with zeros.

    Returns [ceil(N / outputs), ceil(K / inputs), outputs, inputs], converted by ``saturating_cast`` to ``dtype``.
    """
    num_outputs, num_inputs = weight.shape
    panels = torch.empty((-(-num_outputs // outputs), -(-num_inputs // inputs), outputs, inputs), dtype=dtype)
    together = max(1, AT_ONCE // max(1, outputs * num_inputs))
    for some, rows in zip(panels.split(together), weight.split(together * outputs), strict=True):
        full = F.pad(saturating_cast(rows, dtype), (0, -num_inputs % inputs, 0, -len(rows) % outputs))
        some.copy_(full.unflatten(1, (-1, inputs)).unflatten(0, (-1, outputs)).transpose(1, 2))
    return panels
