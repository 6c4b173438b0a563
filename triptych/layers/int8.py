"""Products with int8 weights, activations rounded as they come, each token by a scale of its own: by the compiled
kernel where there is one, else by oneDNN."""

import ctypes

import torch
from torch import Tensor

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.products import CompiledProduct, Product, WeightKind, in_panels

SMALLEST = 1e-30
"""What a token's largest activation is taken for, at least; in the kernel, too."""
MAX_INPUTS = 2**16
"""So many products of 8 bits fit in 32, offsets included."""


class OneDnnInt8Product:
    """oneDNN's kernels, and activations of 7 bits: where the processor has no VNNI, products of pairs are added up in
    16 bits, which don't hold more."""

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
    """``x W^T + b`` by W [out, in] rounded to int8, a scale for each output. A token with a NaN or an infinity comes to
    NaNs; no token has a part in what others come to. Raises ConfigError for more inputs than add up exactly."""
    if weight.shape[1] > MAX_INPUTS:
        raise ConfigError(f"int8 is for layers of at most {MAX_INPUTS} inputs, not {weight.shape[1]}")
    whole, scales = quantize_rows(weight)
    if (library := native.library()) is None:
        return OneDnnInt8Product(whole, scales, bias)
    panels = in_panels(whole, ctypes.c_int.in_dll(library, "int8_outputs").value, 4, torch.int8)
    return CompiledProduct(library, WeightKind.INT8, weight.shape, panels, scales, bias)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [out, in] as int8, and what its rows are to be multiplied by, float32 [out]."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round_().to(torch.int8), scales
