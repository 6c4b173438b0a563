"""Products with int8 weights and activations quantized dynamically, with one scale per token: by the compiled kernel if
there is one, else by oneDNN."""

import torch
from torch import Tensor

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.products import CompiledProduct, Product, WeightKind, in_panels, panel_layout

SMALLEST = 1e-30
"""Lower bound of a token's largest activation, the same as in the kernel."""
MAX_INPUTS = 2**16
"""Number of 8-bit products whose sum fits 32 bits, offsets included."""


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
    """Return ``x W^T + b`` for W [out, in] quantized to int8 with one scale per output.

    A token with a NaN or an infinity yields NaNs, and doesn't affect other tokens. Raises ConfigError for more inputs
    than can be summed exactly.
    """
    if weight.shape[1] > MAX_INPUTS:
        raise ConfigError(f"int8 is for layers of at most {MAX_INPUTS} inputs, not {weight.shape[1]}")
    whole, scales = quantize_rows(weight)
    if (library := native.library()) is None:
        return OneDnnInt8Product(whole, scales, bias)
    panels = in_panels(whole, panel_layout(library, WeightKind.INT8))
    return CompiledProduct(library, WeightKind.INT8, weight.shape, panels, scales, bias)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [out, in] as int8, and the scales of its rows, float32 [out]."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round_().to(torch.int8), scales
