"""Products with int8 weights and activations quantized dynamically, with one scale per token: by the compiled kernel if
there is one, else by oneDNN."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.grouped_weight import by_rows
from triptych.layers.products import CompiledProduct, Product, WeightKind, in_panels, panel_layout

SMALLEST = 1e-30
"""Lower bound of a token's largest activation, the same as in the kernel."""
MAX_INPUTS = 2**16
"""Number of 8-bit products whose sum fits 32 bits, offsets included."""


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


class OneDnnInt8Product:
    """oneDNN's kernels with 7-bit activations: without VNNI, pairs of products are added in 16 bits, which would
    overflow with 8."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scales = scales
        self._bias = torch.zeros(len(scales)) if bias is None else bias.float()
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)

    def __call__(self, activations: Tensor) -> Tensor:
        highest = activations.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
        rounded = (activations * (63 / highest)).round_().add_(64).to(torch.uint8)
        weight, as_float = (self._packed, self._scales, self._zeros), (1.0, 0, torch.float32)
        sums = torch.ops.onednn.qlinear_pointwise(rounded, 1.0, 64, *weight, None, *as_float, "none", [], "")
        row_scales = highest / 63 + (highest - highest)  # NaN for an infinity as well
        return sums.mul_(row_scales).add_(self._bias)


def int8_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] quantized to int8 with one scale per output. Raises ConfigError as
    ``stored_int8_product`` does."""
    _check_inputs(weight.shape[1])
    return stored_int8_product(Int8Weight(*quantize_rows(weight)), bias)


def stored_int8_product(weight: Int8Weight, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for a weight in int8.

    A token with a NaN or an infinity yields NaNs, and doesn't affect other tokens. Raises ConfigError for more inputs
    than can be summed exactly.
    """
    _check_inputs(weight.values.shape[1])
    if (library := native.library()) is None:
        return OneDnnInt8Product(weight.values.contiguous(), weight.scales, bias)
    panels = in_panels(weight.values, panel_layout(library, WeightKind.INT8))
    return CompiledProduct(library, WeightKind.INT8, weight.values.shape, panels, weight.scales, bias)


def _check_inputs(inputs: int) -> None:
    if inputs > MAX_INPUTS:
        raise ConfigError(f"int8 is for layers of at most {MAX_INPUTS} inputs, not {inputs}")


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [out, in] as int8, and the scales of its rows, float32 [out]."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round_().to(torch.int8), scales
