"""Operations between a model's matrix products: in one pass by compiled kernels if they exist, else by PyTorch.

They are in C for float32 on CPUs, and in Triton on GPUs (``pointwise_gpu``). Each additional pass reads all activations
of a prompt again. For a single token, the overhead of a PyTorch call exceeds the work.
"""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers import native

_OPERANDS = {
    "rms_norm": (3, 4, 1),
    "gated_norms": (4, 4, 1),
    "layer_norms": (4, 2, 1),
    "rotate": (3, 4, 0),
    "activations": (2, 4, 0),
    "argmax_rows": (2, 3, 0),
}
"""Number of pointers, integers and floats that each kernel of ``kernels/cpu/pointwise.c`` takes."""


def rms_norm(activations: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root mean square normalisation (arXiv:1910.07467) of [T, D] or, per head, of [T, heads, D].

    ``weight`` has the shape of one token. The mean square is computed in fp32, and the result is rounded before it is
    scaled, as in transformers' Qwen3-VL.
    """
    kernels, is_dense = _kernels(activations, weight), activations.stride()[1:] == weight.stride()
    if is_dense and (on_gpu := _gpu_kernels(activations, weight)):
        return on_gpu.rms_norm(activations, weight, eps)
    if kernels is None or not is_dense:
        wide = activations.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(activations.dtype)
    output = activations.new_empty(activations.shape)
    pointers = activations.data_ptr(), weight.data_ptr(), output.data_ptr()
    heads = weight.shape[0] if weight.dim() == 2 else 1
    kernels.rms_norm(*pointers, len(activations), heads, weight.shape[-1], activations.stride(0), eps)
    return output


def gated_norm(heads: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``rms_norm`` of each head's values, times SiLU of ``gates``: [T, heads, D] → [T, heads * D].

    ``gates`` [T, heads * D]; between tokens there may be gaps. ``weight`` [D] is that of all heads. As in transformers'
    Qwen3.5.
    """
    kernels = _kernels(heads, gates, weight)
    num_tokens, num_heads, dim = heads.shape
    if kernels is None or not heads.is_contiguous() or gates.stride(1) != 1:
        normed = rms_norm(heads, weight.expand(num_heads, dim), eps)
        gated = normed.float() * F.silu(gates.unflatten(1, (num_heads, dim)).float())
        return gated.to(heads.dtype).flatten(1)
    output = heads.new_empty((num_tokens, num_heads * dim))
    pointers = (tensor.data_ptr() for tensor in (heads, gates, weight, output))
    kernels.gated_norms(*pointers, num_tokens, num_heads, dim, gates.stride(0), eps)
    return output


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``heads`` [T, heads, head_dim] by angles given as ``cos`` and ``sin`` [T, 1, head_dim].

    Values i and i + head_dim / 2 are rotated as a pair (the "rotate half" convention of GPT-NeoX). The kernel works in
    place: don't use ``heads`` afterwards.
    """
    kernels = _kernels(heads, cos, sin)
    num_tokens, num_heads, dim = heads.shape
    is_dense = heads.stride()[1:] == (dim, 1)
    if is_dense and cos.dtype == sin.dtype and (on_gpu := _gpu_kernels(heads)):
        return on_gpu.rotate(heads, cos.contiguous(), sin.contiguous())
    if kernels is None or not is_dense:
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin
    cos, sin = cos.contiguous(), sin.contiguous()
    pointers = (tensor.data_ptr() for tensor in (heads, cos, sin))
    kernels.rotate(*pointers, num_tokens, num_heads, dim, heads.stride(0))
    return heads


def layer_norm(activations: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer normalisation (arXiv:1607.06450) of [..., D]; ``weight`` and ``bias`` are [D]."""
    kernels = _kernels(activations, weight, bias)
    if kernels is None or not activations.is_contiguous():
        return F.layer_norm(activations, weight.shape, weight, bias, eps)
    output = torch.empty_like(activations)
    pointers = (tensor.data_ptr() for tensor in (activations, weight, bias, output))
    width = len(weight)
    kernels.layer_norms(*pointers, activations.numel() // width, width, eps)
    return output


class Activation(IntEnum):
    """What an MLP applies to its first product: kinds of ``Activation`` in ``kernels/cpu/pointwise.h``."""

    SILU = 0
    GELU_TANH = 1
    """GELU in its tanh approximation (arXiv:1606.08415, section 2)."""
    QUICK_GELU = 2
    """GELU as ``x * sigmoid(1.702 * x)``."""
    GELU = 3
    """GELU as it is defined, with the error function."""

    def __call__(self, activations: Tensor) -> Tensor:
        """Return the function of each value, of any shape. The kernel works in place: don't use ``activations``
        afterwards."""
        kernels = _kernels(activations)
        if kernels is None or not activations.is_contiguous():
            return _BY_PYTORCH[self](activations)
        where, width = activations.data_ptr(), activations.shape[-1]
        kernels.activations(where, where, activations.numel() // max(1, width), width, width, self)
        return activations


_BY_PYTORCH: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.QUICK_GELU: lambda activations: activations * torch.sigmoid(1.702 * activations),
    Activation.GELU: F.gelu,
}


def gate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return ``activation(gate) * up``, [T, n], for [T, 2 n], whose first half are the gates."""
    kernels = _kernels(gate_up)
    if gate_up.is_contiguous() and (on_gpu := _gpu_kernels(gate_up)):
        return on_gpu.gate_and_mul(gate_up, activation)
    if kernels is None or not gate_up.is_contiguous():
        gate, up = gate_up.chunk(2, dim=-1)
        return _BY_PYTORCH[activation](gate) * up
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_tokens, width))
    kernels.activations(gate_up.data_ptr(), output.data_ptr(), num_tokens, width, 2 * width, activation)
    return output


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the index of each row's first maximum: [rows, vocabulary] → int64 [rows]. A NaN exceeds any number.

    On CPUs NumPy is faster than PyTorch (``bench/linears.py``).
    """
    kernels = _kernels(logits)
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if kernels is None or logits.stride(1) != 1:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    found = torch.empty(len(logits), dtype=torch.int64)
    kernels.argmax_rows(logits.data_ptr(), found.data_ptr(), *logits.shape, logits.stride(0))
    return found


def _kernels(*tensors: Tensor) -> ctypes.CDLL | None:
    """Return the compiled kernels if they exist and support these tensors."""
    supported = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    return compiled_kernels() if supported else None


class GpuKernels(Protocol):
    """The kernels for GPUs, ``pointwise_gpu.triton_backend``."""

    def rms_norm(self, activations: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def gate_and_mul(self, gate_up: Tensor, activation: int) -> Tensor: ...


def _gpu_kernels(first: Tensor, *others: Tensor) -> GpuKernels | None:
    """Return the kernels for GPUs if Triton is there and they support these tensors; the first must not be empty."""
    supported = first.device.type == "cuda" and all(one.dtype == first.dtype for one in others) and first.numel() > 0
    return triton_kernels() if supported else None


@cache
def triton_kernels() -> GpuKernels | None:
    try:
        from triptych.layers.pointwise_gpu import triton_backend
    except ImportError:
        return None
    return triton_backend


@cache
def compiled_kernels() -> ctypes.CDLL | None:
    return None if (library := native.library()) is None else declared(library)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the library's kernels, and return it."""
    for name, (pointers, integers, floats) in _OPERANDS.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers + [ctypes.c_float] * floats
        function.restype = None
    return library
