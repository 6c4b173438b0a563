"""Computes the largest of a vocabulary's logits, exactly, without reading all weights.

Weights quantized to int8, half the bytes of fp16, yield bounds for every logit (``kernels/cpu/pruned_head.c``). Only
panels with a logit that may be among the largest are computed in full, and are bit-identical to those of the full
product. The bounds are guaranteed, not estimated: Cauchy-Schwarz's, with a margin for the rounding of every sum.
"""

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.layers import int8
from triptych.layers.products import (
    AT_ONCE,
    CompiledProduct,
    LinearOperands,
    Product,
    WeightKind,
    in_panels,
    panel_layout,
)
from triptych.layers.rounding import saturating_cast

log = logging.getLogger(__name__)

TOGETHER = 16
"""Tokens processed at a time. Bounds the memory; the kernel takes at most 128."""
LARGEST = 1e15
"""Magnitude limit for weights and activations, far below where products or squared norms overflow float32."""
SPARE = 32
"""Rounding errors allowed for besides the one per input in a sum over the inputs."""


class PrunedHeadOperands(ctypes.Structure):
    """``PrunedHead`` in ``kernels/cpu/pruned_head.c``."""

    _fields_ = (
        *((name, LinearOperands) for name in ("exact", "rough")),
        *((name, ctypes.c_void_p) for name in ("per_length", "per_low")),
    )


class PrunedHead:
    """A projection to the vocabulary that computes only the largest logits. Not thread-safe: it reuses its working
    memory."""

    def __init__(self, exact: CompiledProduct, weight: Tensor) -> None:
        """``exact`` is the full product, without bias, and ``weight`` [out, in] its weights before packing.

        Raises ValueError for weights whose sums may not be finite, and for more inputs than int8 can sum exactly.
        """
        library = exact.library
        if weight.shape[1] > int8.MAX_INPUTS:
            raise ValueError(f"a pruned head is for at most {int8.MAX_INPUTS} inputs, not {weight.shape[1]}")
        self._exact = exact
        self._rough, self._per_length, self._per_low = _rough(exact, weight)
        if not (self._per_low < LARGEST).all():
            raise ValueError("a pruned head is for weights whose sums are finite")
        self.most = ctypes.c_int.in_dll(library, "pruned_head_most").value
        factors = self._per_length.data_ptr(), self._per_low.data_ptr()
        self._operands = PrunedHeadOperands(exact.operands, self._rough.operands, *factors)
        pointer, integer, operands = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(PrunedHeadOperands)
        self._run = library.pruned_head
        self._run.argtypes = [operands, pointer, integer, *[pointer] * 3, integer, pointer]
        self._run.restype = None
        self._room_for = library.pruned_head_room
        self._room_for.argtypes, self._room_for.restype = [operands, integer], integer
        self._room = torch.empty(0, dtype=torch.uint8)
        self.panel_outputs = panel_layout(library, WeightKind.INT8).outputs
        self.num_panels: list[int] = []
        """For each token of the last call, the number of panels of ``panel_outputs`` outputs computed in full; 0 if all
        outputs were."""

    def __call__(self, activations: Tensor, num_largest: Sequence[int]) -> Tensor:
        """Return float32 [T, out] for activations [T, in].

        ``num_largest`` [T] is the number of largest outputs needed per token, 0 for all. Outputs below the smallest of
        these may be minus infinity. Raises ValueError for activations of another width, and unless there is one number
        per token.
        """
        if len(num_largest) != len(activations):
            raise ValueError(f"{len(num_largest)} numbers for {len(activations)} tokens")
        self.num_panels = [0] * len(activations)
        if not all(0 < count <= self.most for count in num_largest):
            return self._exact(activations)  # one token that needs all weights makes the full product cheapest for all
        activations = activations.float().contiguous()
        if activations.shape[1] != self._exact.inputs:
            raise ValueError(f"{activations.shape[1]} inputs for a layer of {self._exact.inputs}")
        output = activations.new_empty((len(activations), self._exact.outputs))
        for first in range(0, len(activations), TOGETHER):
            some, to = activations[first : first + TOGETHER], output[first:]
            numbers = ctypes.c_int64 * len(some)
            wanted, found = numbers(*num_largest[first : first + TOGETHER]), numbers()
            where = some.data_ptr(), some.stride(0), to.data_ptr()
            self._run(self._operands, *where, wanted, found, len(some), self._working_room(len(some)))
            self.num_panels[first : first + len(some)] = found
        if others := [row for row, count in enumerate(self.num_panels) if not count]:
            output[others] = self._exact(activations[others])
        return output

    def _working_room(self, num_tokens: int) -> int:
        """Return the address of the working memory, which is kept, because allocating it takes long."""
        size = self._room_for(self._operands, num_tokens)
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room.data_ptr()


def is_faster(library: ctypes.CDLL) -> bool:
    """Return whether the kernel is faster than the full fp16 product: if it uses instructions that multiply bytes."""
    return bool(ctypes.c_int.in_dll(library, "pruned_head_is_faster").value)


def rounding_steps(library: ctypes.CDLL) -> int:
    """Return the number of steps of either sign to which the kernel rounds a token, and what that leaves of it."""
    return ctypes.c_int.in_dll(library, "pruned_head_steps").value


def pruned_head_of(product: Product, weight: Tensor) -> PrunedHead | None:
    """Return a pruned head for ``product``, which has ``weight`` [out, in] and no bias; None if it isn't faster or the
    weights don't allow it."""
    if not isinstance(product, CompiledProduct) or not is_faster(product.library):
        return None
    try:
        return PrunedHead(product, weight)
    except ValueError as error:
        log.warning("no pruned LM head, so all of the vocabulary's weights are read for each token: %s", error)
        return None


def _rough(product: CompiledProduct, weight: Tensor) -> tuple[CompiledProduct, Tensor, Tensor]:
    """Return the product in int8, and two float32 [out] that bound its error for each output.

    The bound is the first times the token's norm, plus the second times the largest remainder of the token after its
    quantization. Converts a block at a time, since a whole vocabulary's weights in float32 would need much memory.
    """
    num_outputs, num_inputs = weight.shape
    library = product.library
    layout = panel_layout(library, WeightKind.INT8)
    width, panels = layout.outputs, layout.empty(weight.shape)
    scales, per_length, per_low = torch.empty(3, num_outputs)
    together = max(1, AT_ONCE // (width * num_inputs))
    dtype = product.panels.dtype
    rounding = (num_inputs + SPARE) * torch.finfo(torch.float32).eps
    if product.operands.kind == WeightKind.SPLIT_HALF:
        rounding += 2**-15  # products that halves.c leaves out
        dtype = torch.float16
    low_step = num_inputs**0.5 / rounding_steps(library) / 2
    subnormal = num_inputs**0.5 * torch.finfo(torch.float32).tiny  # products in bfloat16 take these weights as zeros
    for first, some in enumerate(panels.split(together)):
        rows = slice(first * together * width, (first * together + len(some)) * width)
        exact = saturating_cast(weight[rows], dtype).float()
        whole, steps = int8.quantize_rows(exact)
        some.copy_(in_panels(whole, layout))
        kept, exact = whole.float(), exact / steps[:, None]
        scales[rows] = steps
        apart = (exact - kept).norm(dim=1) + exact.norm(dim=1) * rounding
        per_length[rows] = steps * apart * (1 + 2**-10) + subnormal
        per_low[rows] = steps * kept.norm(dim=1) * low_step * (1 + 2**-10)
    return CompiledProduct(library, WeightKind.INT8, weight.shape, panels, scales, None), per_length, per_low
