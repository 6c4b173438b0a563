"""The largest of a vocabulary's logits, exactly, without reading all of its weights.

Weights rounded to int8 come to bounds for every logit (``kernels/pruned_head.c``), half as many bytes to read as fp16
has; only those that may be among the largest are computed in full. What is found has the same bits as in the full
product: the bounds are Cauchy-Schwarz's, with room for the rounding of every sum, not estimates.
"""

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.layers import int8
from triptych.layers.products import AT_ONCE, CompiledProduct, LinearOperands, Product, WeightKind, in_panels
from triptych.layers.rounding import saturating_cast

log = logging.getLogger(__name__)

TOGETHER = 16
"""Tokens whose bounds are computed at a time: each has two for every output."""
LARGEST = 1e15
"""By far: of weights, and of tokens that squares tell the length of, whose products are finite."""
SPARE = 32
"""Roundings besides those of a sum over the inputs, of which there is one for each."""


class PrunedHeadOperands(ctypes.Structure):
    """As ``kernels/pruned_head.c`` says."""

    _fields_ = (
        *((name, LinearOperands) for name in ("exact", "rough")),
        *((name, ctypes.c_void_p) for name in ("per_length", "per_low")),
    )


class PrunedHead:
    """Of the product ``exact``, which has no bias; ``weight`` [out, in] are its weights before they were packed. For
    one thread: it works in memory of its own.

    Raises ValueError for weights whose sums may not be finite, and for more inputs than int8 adds up exactly.
    """

    def __init__(self, exact: CompiledProduct, weight: Tensor) -> None:
        library = exact.library
        if weight.shape[1] > int8.MAX_INPUTS:
            raise ValueError(f"a pruned_head is for at most {int8.MAX_INPUTS} inputs, not {weight.shape[1]}")
        self._exact = exact
        self._rough, self._per_length, self._per_low = _rough(exact, weight)
        if not (self._per_low < LARGEST).all():
            raise ValueError("a pruned_head is for weights whose sums are finite")
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

    def __call__(self, activations: Tensor, num_largest: Sequence[int]) -> Tensor:
        """float32 [T, in] to [T, out]. ``num_largest`` [T] says of each token how many of its largest outputs are
        wanted, 0 for all. The others may be minus infinity, but for what equals the smallest of them.

        Raises ValueError for activations of another width, and unless there is a number for each token.
        """
        if len(num_largest) != len(activations):
            raise ValueError(f"{len(num_largest)} numbers for {len(activations)} tokens")
        if not all(0 < count <= self.most for count in num_largest):
            return self._exact(activations)  # what one token needs is read for all of them
        activations = activations.float().contiguous()
        if activations.shape[1] != self._exact.inputs:
            raise ValueError(f"{activations.shape[1]} inputs for a layer of {self._exact.inputs}")
        output = activations.new_empty((len(activations), self._exact.outputs))
        others: list[int] = []
        for first in range(0, len(activations), TOGETHER):
            some, to = activations[first : first + TOGETHER], output[first:]
            numbers = ctypes.c_int64 * len(some)
            wanted, found = numbers(*num_largest[first : first + TOGETHER]), numbers()
            where = some.data_ptr(), some.stride(0), to.data_ptr()
            self._run(self._operands, *where, wanted, found, len(some), self._working_room(len(some)))
            others += [first + row for row, done in enumerate(found) if not done]
        if others:
            output[others] = self._exact(activations[others])
        return output

    def _working_room(self, num_tokens: int) -> int:
        """Its address. It is kept, since new memory takes the system as long as the bounds take."""
        size = self._room_for(self._operands, num_tokens)
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room.data_ptr()


def is_faster(library: ctypes.CDLL) -> bool:
    """Whether these kernels' pruned_head takes less time than to read fp16: where the processor has VNNI."""
    return bool(ctypes.c_int.in_dll(library, "pruned_head_is_faster").value)


def pruned_head_of(product: Product, weight: Tensor) -> PrunedHead | None:
    """Where there can be one and it is faster than ``product``, which has ``weight`` [out, in] and no bias."""
    if not isinstance(product, CompiledProduct) or not is_faster(product.library):
        return None
    try:
        return PrunedHead(product, weight)
    except ValueError as error:
        log.warning("all of the vocabulary's weights are read for each token: %s", error)
        return None


def _rough(product: CompiledProduct, weight: Tensor) -> tuple[CompiledProduct, Tensor, Tensor]:
    """The same product in int8, and for each output how far what it comes to may be from the exact sum: float32 [out],
    times the length of a token, and times the largest value that int8 leaves of it. A block at a time, since a whole
    vocabulary's weights in float32 are many."""
    num_outputs, num_inputs = weight.shape
    library = product.library
    width = ctypes.c_int.in_dll(library, "int8_outputs").value
    panels = torch.empty((-(-num_outputs // width), -(-num_inputs // 4), width, 4), dtype=torch.int8)
    scales, per_length, per_low = torch.empty(3, num_outputs)
    together = max(1, AT_ONCE // (width * num_inputs))
    rounding = (num_inputs + SPARE) * torch.finfo(torch.float32).eps
    low_step = num_inputs**0.5 / 127 / 2
    for first, some in enumerate(panels.split(together)):
        rows = slice(first * together * width, (first * together + len(some)) * width)
        exact = saturating_cast(weight[rows], product.panels.dtype).float()
        whole, steps = int8.quantize_rows(exact)
        some.copy_(in_panels(whole, width, 4, torch.int8))
        kept, exact = whole.float(), exact / steps[:, None]
        scales[rows] = steps
        per_length[rows] = steps * ((exact - kept).norm(dim=1) + exact.norm(dim=1) * rounding) * (1 + 2**-10)
        per_low[rows] = steps * kept.norm(dim=1) * low_step * (1 + 2**-10)
    return CompiledProduct(library, WeightKind.INT8, weight.shape, panels, scales, None), per_length, per_low
