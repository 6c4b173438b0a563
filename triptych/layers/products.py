"""Matrix products with packed weights by the compiled kernels."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers.huge_pages import packed_weights
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
    SPLIT_HALF = 5
    """fp16 as ``kernels/cpu/halves.c`` takes it, where there is AMX."""
    BLOCKS = 6
    """Blocks of GGUF files."""


class Zeros(IntEnum):
    """Where groups of 4-bit weights have their zero: ``Zeros`` in ``kernels/cpu/products.h``."""

    MIDDLE = 0
    OWN = 1
    OFFSETS = 2


class LinearOperands(ctypes.Structure):
    """A layer's weights: ``Linear`` in ``kernels/cpu/products.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "kind", "group", "zeros", "is_rotated")),
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
        zeros: Zeros = Zeros.MIDDLE,
        is_rotated: bool = False,
        parts: Sequence[Tensor] = (),
    ) -> None:
        """``panels`` are the weights from ``in_panels``; ``shape`` is (out, in); only int8 has ``scales``, float32
        [out]. ``group`` and ``zeros`` are for 4-bit weights; see ``GroupedWeight``.
        ``is_rotated`` is for int8: the product rotates its inputs, as the weights have been; see ``int8.py``.
        ``parts`` are for blocks: the memory that ``panels`` point to."""
        self.library = library
        self.outputs, self.inputs = shape
        self.panels = panels
        self._parts = parts
        self.bias = None if bias is None else bias.float().contiguous()
        self.scales = scales
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (panels, scales, self.bias)]
        self.operands = LinearOperands(*pointers, self.inputs, self.outputs, kind, group, zeros, is_rotated)
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


@dataclass(frozen=True)
class PanelLayout:
    """How the compiled kernels take weights [N, K]: [ceil(N / outputs), depth / inputs, outputs, inputs], padded with
    zeros. The depth is K, rounded up to a multiple of ``multiple``."""

    outputs: int
    inputs: int
    multiple: int
    dtype: torch.dtype

    def empty(self, shape: torch.Size) -> Tensor:
        """Return panels for weights of this shape, zero at first."""
        num_outputs, num_inputs = shape
        depth = -(-num_inputs // self.multiple) * self.multiple
        num_panels = -(-num_outputs // self.outputs)
        return packed_weights.empty((num_panels, depth // self.inputs, self.outputs, self.inputs), self.dtype)


def in_panels(weight: Tensor, layout: PanelLayout) -> Tensor:
    """Pack ``weight`` [N, K], converted by ``saturating_cast``."""
    num_inputs, outputs = weight.shape[1], layout.outputs
    panels = layout.empty(weight.shape)
    together = max(1, AT_ONCE // max(1, outputs * num_inputs))
    for some, rows in zip(panels.split(together), weight.split(together * outputs), strict=True):
        full = F.pad(saturating_cast(rows, layout.dtype), (0, -num_inputs % layout.multiple, 0, -len(rows) % outputs))
        some.copy_(full.unflatten(1, (-1, layout.inputs)).unflatten(0, (-1, outputs)).transpose(1, 2))
    return panels


def panel_layout(library: ctypes.CDLL, kind: WeightKind) -> PanelLayout:
    """Return the layout that the kernels' build for this processor takes."""
    name, inputs, dtype = {
        WeightKind.HALF: ("float", 1, torch.float16),
        WeightKind.FLOAT: ("float", 1, torch.float32),
        WeightKind.INT8: ("int8", 4, torch.int8),
        WeightKind.BF16: ("bf16", 2, torch.bfloat16),
        WeightKind.SPLIT_HALF: ("bf16", 2, torch.float16),
    }[kind]
    outputs, multiple = (ctypes.c_int.in_dll(library, f"{name}_{field}").value for field in ("outputs", "multiple"))
    return PanelLayout(outputs, inputs, multiple, dtype)
