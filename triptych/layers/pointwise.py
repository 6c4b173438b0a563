"""What goes on between a model's products: in one pass by the compiled kernels where there are any, else by PyTorch.

The kernels are for float32 on CPUs, where a pass over a prompt's activations costs as much as reading them, and for a
single token a call of PyTorch's costs more than the work.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.layers import native

_OPERANDS = {
    "rms_norm": (3, 4, 1),
    "rotate": (3, 4, 0),
    "silu_and_mul": (2, 2, 0),
    "gelu_tanh": (1, 1, 0),
    "argmax_rows": (2, 3, 0),
}
"""Pointers, integers and floats that each kernel of ``kernels/pointwise.c`` takes."""


def rms_norm(activations: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation (arXiv:1910.07467) of [T, D] or, a head at a time, [T, heads, D] by a ``weight``
    of a token's shape.

    The mean square is taken in fp32 and the result rounded before it is scaled, as transformers' Qwen3-VL does.
    """
    kernels = _kernels(activations, weight)
    if kernels is None or activations.stride()[1:] != weight.stride():
        wide = activations.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(activations.dtype)
    output = activations.new_empty(activations.shape)
    pointers = activations.data_ptr(), weight.data_ptr(), output.data_ptr()
    heads = weight.shape[0] if weight.dim() == 2 else 1
    kernels.rms_norm(*pointers, len(activations), heads, weight.shape[-1], activations.stride(0), eps)
    return output


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``heads`` [T, heads, head_dim] turned by the angles whose ``cos`` and ``sin`` [T, 1, head_dim] are given. The
    kernel turns them where they are: don't use them afterwards.

    The pairs that turn together are values i and i + head_dim / 2 (the "rotate half" convention of GPT-NeoX).
    """
    kernels = _kernels(heads, cos, sin)
    num_tokens, num_heads, dim = heads.shape
    if kernels is None or heads.stride()[1:] != (dim, 1):
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin
    cos, sin = cos.contiguous(), sin.contiguous()
    pointers = (tensor.data_ptr() for tensor in (heads, cos, sin))
    kernels.rotate(*pointers, num_tokens, num_heads, dim, heads.stride(0))
    return heads


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for [T, 2 n], the gates of which are the first half; [T, n]."""
    kernels = _kernels(gate_up)
    if kernels is None or not gate_up.is_contiguous():
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_tokens, width))
    kernels.silu_and_mul(gate_up.data_ptr(), output.data_ptr(), num_tokens, width)
    return output


def argmax_rows(logits: Tensor) -> Tensor:
    """The first of each row's highest: [rows, vocabulary] → int64 [rows]. A NaN counts as higher than any number. On
    CPUs PyTorch's own search takes several times as long as NumPy's (``bench/linears.py``)."""
    kernels = _kernels(logits)
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if kernels is None or logits.stride(1) != 1:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    found = torch.empty(len(logits), dtype=torch.int64)
    kernels.argmax_rows(logits.data_ptr(), found.data_ptr(), *logits.shape, logits.stride(0))
    return found


class GeluTanh(nn.Module):
    """GELU by its approximation with tanh (arXiv:1606.08415, section 2), of any shape. The kernel puts it where the
    activations are: don't use those afterwards."""

    def forward(self, activations: Tensor) -> Tensor:
        kernels = _kernels(activations)
        if kernels is None or not activations.is_contiguous():
            return F.gelu(activations, approximate="tanh")
        kernels.gelu_tanh(activations.data_ptr(), activations.numel())
        return activations


def _kernels(*tensors: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels, if there are any and they are made for these tensors."""
    ours = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    return _library() if ours else None


@cache
def _library() -> ctypes.CDLL | None:
    return None if (library := native.library()) is None else declared(library)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, knowing what its kernels take."""
    for name, (pointers, integers, floats) in _OPERANDS.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers + [ctypes.c_float] * floats
        function.restype = None
    return library
