"""Products with weights in fp16 or float32, in float32: by the compiled kernel where there is one, else by FBGEMM and
oneDNN."""

import ctypes
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.models import native
from triptych.models.products import Product, in_panels


class Step(ctypes.Structure):
    """The kernel's operands, as ``kernels/floats.c`` says."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "input", "output")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "stride", "tokens")),
    )


class CompiledProduct:
    """The kernel in ``kernels/floats.c`` with a layer's weights in its panels. What a token comes to doesn't depend on
    its batch, to the bit."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._run = library.half_linear if dtype == torch.float16 else library.float_linear
        self._run.argtypes, self._run.restype = [ctypes.POINTER(Step)], None
        self.outputs, self.inputs = weight.shape
        self._panels = in_panels(weight, ctypes.c_int.in_dll(library, "float_outputs").value, 1, dtype)
        self._bias = None if bias is None else bias.float().contiguous()
        self._weights = self._panels.data_ptr(), None if self._bias is None else self._bias.data_ptr()

    def __call__(self, activations: Tensor) -> Tensor:
        """Raises ValueError for activations of another width."""
        num_tokens, inputs = activations.shape
        if inputs != self.inputs:
            raise ValueError(f"{inputs} inputs for a layer of {self.inputs}")
        if activations.dtype != torch.float32 or activations.stride(1) != 1:
            activations = activations.float().contiguous()
        output = activations.new_empty((num_tokens, self.outputs))
        pointers = *self._weights, activations.data_ptr(), output.data_ptr()
        self._run(Step(*pointers, inputs, self.outputs, activations.stride(0), num_tokens))
        return output


class FbgemmProduct:
    """FBGEMM's kernel for fp16 weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        bias = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def __call__(self, activations: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(activations, self._packed)


class OneDnnProduct:
    """oneDNN's kernels for float32, which read weights in their own layout faster than ``F.linear`` does."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous())
        self._bias = None if bias is None else bias.float()

    def __call__(self, activations: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(activations, self._packed, self._bias, "none", [], "")


def half_product(weight: Tensor, bias: Tensor | None) -> Product:
    """``x W^T + b`` by W [out, in] rounded to fp16, which is an error of 2**-11 at most; beyond ±65504 it saturates."""
    library = native.library()
    return FbgemmProduct(weight, bias) if library is None else CompiledProduct(library, weight, bias, torch.float16)


def float_product(weight: Tensor, bias: Tensor | None) -> Product:
    """``x W^T + b`` by W [out, in] in float32."""
    if (library := native.library()) is not None:
        return CompiledProduct(library, weight, bias, torch.float32)
    if torch.backends.mkldnn.is_available():
        return OneDnnProduct(weight, bias)
    return partial(F.linear, weight=weight.float(), bias=None if bias is None else bias.float())
