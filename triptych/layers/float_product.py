"""Products with weights in fp16, bfloat16 or float32, and sums in float32: by the compiled kernels if there are any,
else by FBGEMM and oneDNN."""

import ctypes
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers import native
from triptych.layers.products import CompiledProduct, Product, WeightKind, in_panels, panel_layout
from triptych.layers.rounding import saturating_cast


class FbgemmProduct:
    """FBGEMM's kernel for fp16 weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        bias = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def __call__(self, activations: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(activations, self._packed)


class OneDnnFloatProduct:
    """oneDNN's kernels for float32 weights in oneDNN's own layout, faster than ``F.linear``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous())
        self._bias = None if bias is None else bias.float()

    def __call__(self, activations: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(activations, self._packed, self._bias, "none", [], "")


class OneDnnBf16Product:
    """oneDNN's kernels for weights and activations in bfloat16, whose outputs are rounded, too."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.bfloat16().contiguous()
        self._bias = None if bias is None else bias.bfloat16()

    def __call__(self, activations: Tensor) -> Tensor:
        return F.linear(activations.bfloat16(), self._weight, self._bias).float()


def half_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] rounded to fp16: a relative error of at most 2**-11; saturates at ±65504."""
    if (library := native.library()) is not None:
        return _split_half(library, weight, bias) or _compiled(library, WeightKind.HALF, weight, bias)
    return FbgemmProduct(weight, bias)


def float_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] in float32."""
    if (library := native.library()) is not None:
        return _compiled(library, WeightKind.FLOAT, weight, bias)
    if torch.backends.mkldnn.is_available():
        return OneDnnFloatProduct(weight, bias)
    return partial(F.linear, weight=weight.float(), bias=None if bias is None else bias.float())


def bf16_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] and x rounded to bfloat16: a relative error of at most 2**-8 of each."""
    if (library := native.library()) is not None:
        return _compiled(library, WeightKind.BF16, weight, bias)
    return OneDnnBf16Product(weight, bias)


def has_bf16() -> bool:
    """Return whether the kernels multiply in bfloat16 by instructions for it, which is then faster than in float32."""
    library = native.library()
    return library is not None and bool(ctypes.c_int.in_dll(library, "bf16_is_native").value)


def _split_half(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> CompiledProduct | None:
    """Return a product by ``kernels/cpu/halves.c``; None without AMX, and for weights that are too large for it."""
    if not library.halves_are_tiled() or not _largest_half(weight) < ctypes.c_int.in_dll(library, "halves_limit").value:
        return None
    panels = in_panels(weight, panel_layout(library, WeightKind.SPLIT_HALF))
    encode = library.encode_halves
    encode.argtypes, encode.restype = [ctypes.c_void_p, ctypes.c_int64], None
    encode(panels.data_ptr(), panels.numel())
    return CompiledProduct(library, WeightKind.SPLIT_HALF, weight.shape, panels.view(torch.int16), None, bias)


def _largest_half(weight: Tensor) -> float:
    """Return the largest magnitude of weights rounded to fp16; NaN if one of them is NaN."""
    if not weight.numel():
        return 0
    lowest, highest = weight.aminmax()
    return saturating_cast(torch.maximum(-lowest, highest), torch.float16).item()


def _compiled(library: ctypes.CDLL, kind: WeightKind, weight: Tensor, bias: Tensor | None) -> CompiledProduct:
    """Return a product by ``kernels/cpu/floats.c`` or ``bf16.c``."""
    panels = in_panels(weight, panel_layout(library, kind))
    return CompiledProduct(library, kind, weight.shape, panels, None, bias)
