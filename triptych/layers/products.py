"""Products with packed weights by the compiled kernels, of all kinds."""

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
"""Weights that are laid out together: few enough to stay in a processor's cache meanwhile."""


class WeightKind(IntEnum):
    """How weights are kept: ``kernels/products.h``."""

    HALF = 0
    FLOAT = 1
    INT8 = 2


class LinearOperands(ctypes.Structure):
    """A layer's weights, as ``kernels/products.h`` says."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "kind")),
    )


class CompiledProduct:
    """A layer's weights in ``panels`` as ``in_panels`` makes them, and the kernel that goes with their ``kind``. What a
    token comes to doesn't depend on its batch, to the bit.

    ``scales`` float32 [out] are int8's, one for each output; ``shape`` is (out, in).
    """

    def __init__(  # noqa: PLR0917 (a kernel's operands)
        self,
        library: ctypes.CDLL,
        kind: WeightKind,
        shape: torch.Size,
        panels: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self.library = library
        self.outputs, self.inputs = shape
        self.panels = panels
        self.bias = None if bias is None else bias.float().contiguous()
        self.scales = scales
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (panels, scales, self.bias)]
        self.operands = LinearOperands(*pointers, self.inputs, self.outputs, kind)
        self._run = library.linear
        self._run.argtypes = [
            ctypes.POINTER(LinearOperands),
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
        ]
        self._run.restype = ctypes.c_int

    def __call__(self, activations: Tensor) -> Tensor:
        """Raises ValueError for activations of another width, and MemoryError."""
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
    """``weight`` [N, K] as the compiled kernels read it, in panels of so many outputs:
    [ceil(N / outputs), ceil(K / inputs), outputs, inputs], ``rounded`` to ``dtype``; zeros fill it up."""
    num_outputs, num_inputs = weight.shape
    panels = torch.empty((-(-num_outputs // outputs), -(-num_inputs // inputs), outputs, inputs), dtype=dtype)
    together = max(1, AT_ONCE // max(1, outputs * num_inputs))
    for some, rows in zip(panels.split(together), weight.split(together * outputs), strict=True):
        full = F.pad(saturating_cast(rows, dtype), (0, -num_inputs % inputs, 0, -len(rows) % outputs))
        some.copy_(full.unflatten(1, (-1, inputs)).unflatten(0, (-1, outputs)).transpose(1, 2))
    return panels
