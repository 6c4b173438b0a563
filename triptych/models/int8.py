"""Products with int8 weights, activations rounded as they come, each token by a scale of its own: by the compiled
kernel where there is one, else by oneDNN."""

import ctypes

import torch
from torch import Tensor

from triptych.errors import ConfigError
from triptych.models import native
from triptych.models.products import Product, in_panels

LINE = 64
"""Bytes between rows, so that equal places of several don't push each other out of the processor's first cache."""
SMALLEST = 1e-30
"""What a token's largest activation is taken for, at least; in the kernel, too."""
MAX_INPUTS = 2**16
"""So many products of 8 bits fit in 32, offsets included."""


class Step(ctypes.Structure):
    """The kernel's operands, as ``kernels/int8.c`` says."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "panels", "scales", "bias", "output")),
        *((name, ctypes.c_void_p) for name in ("rows", "row_scales", "row_starts")),
        *((name, ctypes.c_int64) for name in ("tokens", "inputs", "outputs", "depth", "stride")),
    )


class CompiledProduct:
    """The kernel in ``kernels/int8.c`` with a layer's weights in its panels."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, scales: Tensor, bias: Tensor) -> None:
        self._run = library.int8_linear
        self._run.argtypes, self._run.restype = [ctypes.POINTER(Step)], None
        self.outputs, self.inputs = weight.shape
        panel, self._room = (ctypes.c_int.in_dll(library, name).value for name in ("int8_outputs", "int8_tokens"))
        self._panels = in_panels(weight, panel, 4, torch.int8)
        self._depth = 4 * self._panels.shape[1]
        self._scales, self._bias = scales.contiguous(), bias.contiguous()

    def __call__(self, activations: Tensor) -> Tensor:
        """Raises ValueError for activations of another width."""
        num_tokens, inputs = activations.shape
        if inputs != self.inputs:
            raise ValueError(f"{inputs} inputs for a layer of {self.inputs}")
        activations = activations.float().contiguous()
        output = activations.new_empty((num_tokens, self.outputs))
        stride = self._depth + LINE
        rows = torch.empty((num_tokens + self._room) * stride, dtype=torch.int8)
        of_rows = torch.empty((2, num_tokens), dtype=torch.int32)
        tensors = (activations, self._panels, self._scales, self._bias, output, rows, *of_rows)
        pointers = (tensor.data_ptr() for tensor in tensors)
        self._run(Step(*pointers, num_tokens, inputs, self.outputs, self._depth, stride))
        return output


class OneDnnProduct:
    """oneDNN's kernels, and activations of 7 bits: where the processor has no VNNI, products of pairs are added up in
    16 bits, which don't hold more."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scales, self._bias = scales, bias
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
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    rounded = (wide / scales[:, None]).round_().to(torch.int8)
    bias = torch.zeros(len(scales)) if bias is None else bias.float()
    library = native.library()
    return OneDnnProduct(rounded, scales, bias) if library is None else CompiledProduct(library, rounded, scales, bias)
