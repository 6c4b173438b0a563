"""Products with int8 weights and activations quantized dynamically, with one scale per token: by the compiled kernel if
there is one, else by oneDNN.

Weights that are quantized here are rotated in blocks of inputs first, and so are their activations, which leaves the
product as it is. Activations that are much larger than others would make the scale of all a coarse one; rotated, each
is spread over its block.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.grouped_weight import by_rows
from triptych.layers.products import AT_ONCE, CompiledProduct, Product, WeightKind, in_panels, panel_layout

SMALLEST = 1e-30
"""Lower bound of a token's largest activation, the same as in the kernel."""
MAX_INPUTS = 2**16
"""Number of 8-bit products whose sum fits 32 bits, offsets included."""
BLOCK = 64
"""Inputs that are rotated together: ``ROTATED`` in ``kernels/cpu/panels.h``. Its root is a power of two, so that
rotating numbers of few bits rounds nothing."""


@dataclass(frozen=True)
class Int8Weight:
    """A weight W [out, in]: W[o, i] = values[o, i] * scales[o]."""

    values: Tensor
    """int8 [out, in]."""
    scales: Tensor
    """float32 [out], of any sign."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    def rows(self, part: slice | Tensor) -> "Int8Weight":
        """Return a range of the outputs, or those with the given indices."""
        return Int8Weight(self.values[part], self.scales[part])

    def columns(self, part: slice) -> "Int8Weight":
        """Return a range of the inputs."""
        return Int8Weight(self.values[:, part], self.scales)

    def dequantized(self) -> Tensor:
        """Return W in float32."""
        return by_rows(self.shape, self.values.device, lambda rows: self.values[rows] * self.scales[rows, None])


def concatenate_int8(weights: Sequence[Int8Weight]) -> Int8Weight:
    """Concatenate the outputs of weights with the same inputs."""
    if len(weights) == 1:
        return weights[0]
    return Int8Weight(torch.cat([one.values for one in weights]), torch.cat([one.scales for one in weights]))


def rotated(values: Tensor) -> Tensor:
    """Return ``values`` [n, in], padded with zeros to whole blocks, with each block multiplied by ``_hadamard``, in
    float32."""
    wide = F.pad(values.float(), (0, -values.shape[1] % BLOCK))
    return (wide.unflatten(1, (-1, BLOCK)) @ _hadamard()).flatten(1)


@cache
def _hadamard() -> Tensor:
    """Return a rotation that is its own inverse, float32 [BLOCK, BLOCK]: Sylvester's Hadamard matrix over its root."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix / BLOCK**0.5


class OneDnnInt8Product:
    """oneDNN's kernels with 7-bit activations: without VNNI, pairs of products are added in 16 bits, which would
    overflow with 8."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, rotates: int | None = None) -> None:
        """``rotates``: how many inputs activations have before they are rotated, as the weight was; None: neither
        is."""
        self._inputs = weight.shape[1] if rotates is None else rotates
        self._rotates = rotates is not None
        self._packed = torch.ops.onednn.qlinear_prepack(weight.values.contiguous(), None)
        self._scales = weight.scales
        self._bias = torch.zeros(len(weight.scales)) if bias is None else bias.float()
        self._zeros = torch.zeros(len(weight.scales), dtype=torch.int64)

    def __call__(self, activations: Tensor) -> Tensor:
        """Return float32 [T, out] for activations [T, in]. Raises ValueError for another width."""
        if activations.shape[1] != self._inputs:
            raise ValueError(f"{activations.shape[1]} inputs for a layer of {self._inputs}")
        if self._rotates:
            activations = rotated(activations)
        highest = activations.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
        rounded = (activations * (63 / highest)).round_().add_(64).to(torch.uint8)
        weight, as_float = (self._packed, self._scales, self._zeros), (1.0, 0, torch.float32)
        sums = torch.ops.onednn.qlinear_pointwise(rounded, 1.0, 64, *weight, None, *as_float, "none", [], "")
        row_scales = highest / 63 + (highest - highest)  # NaN for an infinity as well
        return sums.mul_(row_scales).add_(self._bias)


def int8_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in], rotated and quantized to int8 with one scale per output, and x rotated.

    A token with a NaN or an infinity yields NaNs, and doesn't affect other tokens. Raises ConfigError for more inputs
    than can be summed exactly.
    """
    _check_inputs(weight.shape[1])
    quantized = Int8Weight(*_quantize_rotated(weight))
    if (library := native.library()) is None:
        return OneDnnInt8Product(quantized, bias, rotates=weight.shape[1])
    return _compiled(library, quantized, weight.shape, bias, is_rotated=True)


def stored_int8_product(weight: Int8Weight, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for a weight in int8, with x as it is; otherwise as ``int8_product``."""
    _check_inputs(weight.values.shape[1])
    if (library := native.library()) is None:
        return OneDnnInt8Product(weight, bias)
    return _compiled(library, weight, weight.values.shape, bias, is_rotated=False)


def _compiled(
    library: ctypes.CDLL, weight: Int8Weight, shape: torch.Size, bias: Tensor | None, *, is_rotated: bool
) -> CompiledProduct:
    panels = in_panels(weight.values, panel_layout(library, WeightKind.INT8))
    return CompiledProduct(library, WeightKind.INT8, shape, panels, weight.scales, bias, is_rotated=is_rotated)


def _check_inputs(inputs: int) -> None:
    if inputs > MAX_INPUTS:
        raise ConfigError(f"int8 is for layers of at most {MAX_INPUTS} inputs, not {inputs}")


def _quantize_rotated(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` of a rotated weight: so few rows at a time that what is made meanwhile is small."""
    some = weight.split(max(1, AT_ONCE // max(1, weight.shape[1])))
    parts = [quantize_rows(rotated(rows)) for rows in some]
    return torch.cat([whole for whole, _ in parts]), torch.cat([scales for _, scales in parts])


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [out, in] as int8, and the scales of its rows, float32 [out]."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round_().to(torch.int8), scales
