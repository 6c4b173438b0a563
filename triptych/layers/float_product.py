"""Float32 products with weights in fp16 or float32: by the compiled kernel if there is one, else by FBGEMM and
oneDNN."""

import ctypes
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers import native
from triptych.layers.products import CompiledProduct, Product, WeightKind, in_panels


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


def half_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] rounded to fp16: a relative error of at most 2**-11; saturates at ±65504."""
    if (library := native.library()) is not None:
        return _compiled(library, WeightKind.HALF, weight, bias, torch.float16)
    return FbgemmProduct(weight, bias)


def float_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] in float32."""
    if (library := native.library()) is not None:
        return _compiled(library, WeightKind.FLOAT, weight, bias, torch.float32)
    if torch.backends.mkldnn.is_available():
        return OneDnnFloatProduct(weight, bias)
    return partial(F.linear, weight=weight.float(), bias=None if bias is None else bias.float())


def _compiled(
    library: ctypes.CDLL, kind: WeightKind, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> CompiledProduct:
    """Return a product by ``kernels/cpu/floats.c``."""
    panels = in_panels(weight, ctypes.c_int.in_dll(library, "float_outputs").value, 1, dtype)
    return CompiledProduct(library, kind, weight.shape, panels, None, bias)
