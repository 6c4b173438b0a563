"""Linear layers in several weight formats, and the norm. Weights come in from a checkpoint; nothing trains here."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import ConfigError


class Linear(nn.Module):
    """``y = x W^T + b``: activations [T, in] to [T, out]. Subclasses differ in how they keep W."""

    def forward(self, activations: Tensor) -> Tensor:
        raise NotImplementedError


class PlainLinear(Linear):
    """W [out, in] and b [out] as ordinary tensors in the activations' dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, activations: Tensor) -> Tensor:
        return F.linear(activations, self.weight, self.bias)


class PackedHalfLinear(Linear):
    """W rounded to fp16 and laid out for FBGEMM's kernel, which widens it in registers; activations and sums in fp32.

    A single token's step is bound by reading W, so half the bytes is about twice the speed; the error is W's rounding,
    2**-11. Values beyond ±65504 saturate. Only the packed copy of the weight is kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        bias = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def forward(self, activations: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(activations, self._packed)


class WeightFormat(Protocol):
    """How a decoder keeps the weights of its linear layers, and in which dtype it computes."""

    @property
    def activations(self) -> torch.dtype:
        """The dtype of activations, norms and (unless told otherwise) the KV cache."""

    def linear(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        """A layer from a checkpoint's weight [out, in] and bias [out]. Raises ConfigError for a device it can't use."""


@dataclass(frozen=True)
class PlainFormat:
    """Weights and activations in one dtype. A weight that has it already stays where it is: memory-mapped."""

    activations: torch.dtype

    def linear(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        bias = None if bias is None else bias.to(device, self.activations)
        return PlainLinear(weight.to(device, self.activations), bias)


@dataclass(frozen=True)
class PackedHalfFormat:
    """fp16-packed weights and fp32 activations; CPUs only."""

    activations: torch.dtype = torch.float32

    def linear(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        if device.type != "cpu":
            raise ConfigError(f"packed fp16 weights are for CPUs only, not for {device}")
        return PackedHalfLinear(weight, bias)


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "auto": PackedHalfFormat(),
    "float32": PlainFormat(torch.float32),
    "float16": PackedHalfFormat(),
    "bfloat16": PlainFormat(torch.bfloat16),
}
"""What each of ``triptych.config.DTYPES`` means on a CPU."""


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv:1910.07467) over the last dimension, which ``weight`` [..., D] scales.

    The mean square is taken in fp32 and the result rounded before it is scaled, as transformers' Qwen3-VL does.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self.eps = eps

    def forward(self, activations: Tensor) -> Tensor:
        wide = activations.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(activations.dtype)


def frozen(tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter that takes no gradient; shares its memory."""
    return nn.Parameter(tensor, requires_grad=False)
