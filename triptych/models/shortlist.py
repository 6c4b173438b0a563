"""The largest of a vocabulary's logits, exactly, without reading all of its weights.

Weights rounded to int8 come to bounds for every logit (``kernels/shortlist.c``), half as many bytes to read as fp16
has; only those that may be among the largest are computed in full. What is found has the same bits as in the full
product: the bounds are Cauchy-Schwarz's, with room for the rounding of every sum, not estimates.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.models import int8
from triptych.models.products import AT_ONCE, CompiledProduct, Kind, LinearOperands, Product, in_panels
from triptych.models.rounding import rounded

TOGETHER = 16
"""Tokens whose bounds are computed at a time: each has two for every output."""
SPARE = 32
"""Roundings besides those of a sum over the inputs, of which there is one for each."""


class ShortlistOperands(ctypes.Structure):
    """As ``kernels/shortlist.c`` says."""

    _fields_ = (
        *((name, LinearOperands) for name in ("exact", "rough")),
        *((name, ctypes.c_void_p) for name in ("per_length", "per_low")),
    )


class Shortlist:
    """Of the product ``exact``, which has no bias; ``weight`` [out, in] are its weights before they were packed, and
    none may be an infinity or a NaN."""

    def __init__(self, exact: CompiledProduct, weight: Tensor) -> None:
        library = exact.library
        self._exact = exact
        self._rough, self._per_length, self._per_low = _rough(exact, weight)
        self.most = ctypes.c_int.in_dll(library, "shortlist_most").value
        factors = self._per_length.data_ptr(), self._per_low.data_ptr()
        self._operands = ShortlistOperands(exact.operands, self._rough.operands, *factors)
        pointer, integer, operands = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ShortlistOperands)
        self._run = library.shortlist
        self._run.argtypes = [operands, pointer, integer, *[pointer] * 4, integer, pointer]
        self._run.restype = None
        self._room_for = library.shortlist_room
        self._room_for.argtypes, self._room_for.restype = [operands, integer], integer
        self._room = torch.empty(0, dtype=torch.uint8)

    def __call__(self, activations: Tensor, num_largest: Sequence[int]) -> Tensor:
        """float32 [T, in] to [T, out]. ``num_largest`` [T]: of a token for which it is at least 1, all outputs but so
        many of the largest (and what equals the smallest of them) may be minus infinity. Which they are depends on the
        token alone.

        Raises ValueError for activations of another width.
        """
        rows = [row for row, count in enumerate(num_largest) if 0 < count <= self.most]
        if not rows:
            return self._exact(activations)
        activations = activations.float().contiguous()
        if activations.shape[1] != self._exact.inputs:
            raise ValueError(f"{activations.shape[1]} inputs for a layer of {self._exact.inputs}")
        output = activations.new_empty((len(activations), self._exact.outputs))
        where = activations.data_ptr(), activations.stride(0), output.data_ptr()
        left = set(range(len(activations)))
        for first in range(0, len(rows), TOGETHER):
            some = rows[first : first + TOGETHER]
            numbers = ctypes.c_int64 * len(some)
            found = numbers()
            wanted = numbers(*(num_largest[row] for row in some))
            self._run(self._operands, *where, numbers(*some), wanted, found, len(some), self._working_room(len(some)))
            left.difference_update(row for row, done in zip(some, found, strict=True) if done)
        if left:
            others = sorted(left)
            output[others] = self._exact(activations[others])
        return output

    def _working_room(self, num_tokens: int) -> int:
        """Its address. It is kept, since new memory takes the system as long as the bounds take."""
        size = self._room_for(self._operands, num_tokens)
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room.data_ptr()


def shortlist_of(product: Product, weight: Tensor) -> Shortlist | None:
    """Where a shortlist is faster than ``product``, which has ``weight`` [out, in] and no bias, the shortlist."""
    if not isinstance(product, CompiledProduct):
        return None
    if not ctypes.c_int.in_dll(product.library, "shortlist_is_faster").value or not weight.isfinite().all():
        return None
    return Shortlist(product, weight)


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
        exact = rounded(weight[rows], product.panels.dtype).float()
        whole, steps = int8.rounded(exact)
        some.copy_(in_panels(whole, width, 4, torch.int8))
        kept, exact = whole.float(), exact / steps[:, None]
        scales[rows] = steps
        per_length[rows] = steps * ((exact - kept).norm(dim=1) + exact.norm(dim=1) * rounding) * (1 + 2**-10)
        per_low[rows] = steps * kept.norm(dim=1) * low_step * (1 + 2**-10)
    return CompiledProduct(library, Kind.INT8, weight.shape, panels, scales, None), per_length, per_low
