"""Linear layers in several weight formats, and RMSNorm. For inference only: weights come from a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import ConfigError
from triptych.layers.block_product import blocks_product
from triptych.layers.block_weight import BlockWeight
from triptych.layers.float_product import bf16_product, float_product, half_product
from triptych.layers.grouped_weight import GroupedWeight
from triptych.layers.int4 import grouped_product, int4_product
from triptych.layers.int8 import Int8Weight, int8_product, stored_int8_product
from triptych.layers.pointwise import layer_norm, rms_norm
from triptych.layers.products import Product
from triptych.layers.pruned_head import PrunedHead, pruned_head_of

Pack = Callable[[Tensor, Tensor | None], Product]
"""Packs a weight [out, in] and an optional bias [out] for a kernel."""


class Linear(nn.Module):
    """``y = x W^T + b``: activations [T, in] to [T, out]. Subclasses differ in how they store W."""

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


class PackedLinear(Linear):
    """W packed for its kernel, and fp32 activations [..., in]. Keeps only the packed copy."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, activations: Tensor) -> Tensor:
        if activations.dim() == 2:
            return self.product(activations)
        return self.product(activations.flatten(0, -2)).unflatten(0, activations.shape[:-1])


class ConcatenatedLinear(Linear):
    """Layers over the same inputs, whose outputs are concatenated. Their weights are of kinds that no kernel takes
    together."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, activations: Tensor) -> Tensor:
        return torch.cat([linear(activations) for linear in self.linears], dim=-1)


class LMHead(nn.Module):
    """The projection to the vocabulary: activations [T, in] to logits, float32 [T, out]."""

    def __init__(self, linear: nn.Module, pruned_head: PrunedHead | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.pruned_head = pruned_head

    def forward(self, activations: Tensor, num_largest: Sequence[int] = ()) -> Tensor:
        """``num_largest`` is as in ``PrunedHead``, or empty if all logits are needed."""
        if self.pruned_head is None or not num_largest:
            logits: Tensor = self.linear(activations)
            return logits.float()
        return self.pruned_head(activations, num_largest)


class WeightFormat(Protocol):
    """How a decoder, or a model's towers, store the weights of their linear layers, and in which dtype they compute.
    Each of the two has a format of its own: see ``devices.weight_format`` and ``devices.tower_format``."""

    @property
    def activations(self) -> torch.dtype:
        """The dtype of activations and norms."""

    @property
    def linear_dtype(self) -> str:
        """Name of the format that ``linear`` stores weights in."""

    @property
    def high_precision_dtype(self) -> str:
        """Name of the format that ``high_precision`` stores weights in."""

    @property
    def bf16_attention(self) -> bool:
        """Whether attention on CPUs may multiply in bfloat16 what comes in float32."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether ``blocks`` takes weights of GGUF files; otherwise they are dequantized."""

    def linear(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        """Make a layer from a checkpoint's weight [out, in] and bias [out]. Raises ConfigError for an unsupported
        device."""

    def sensitive(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        """Make a layer as ``linear`` does, in more bits if that format has few: errors in its weights change tokens
        more than those in as many weights of other layers."""

    def high_precision(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        """Make a layer that is never quantized: the projection to the vocabulary, where small differences decide which
        token is chosen, and a tower's projection of patches."""

    def grouped(self, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> Linear:
        """Make a layer from a checkpoint's 4-bit weight and bias [out]."""

    def int8(self, weight: Int8Weight, bias: Tensor | None, device: torch.device) -> Linear:
        """Make a layer from a checkpoint's 8-bit weight and bias [out]."""

    def blocks(self, parts: Sequence[BlockWeight], bias: Tensor | None, device: torch.device) -> Linear:
        """Make the layer that concatenates the outputs of ``parts``, of the same inputs and of any types, with a bias
        [out]."""

    def head(self, weight: Tensor, device: torch.device) -> LMHead:
        """Make the whole projection to the vocabulary from a checkpoint's weight [vocab, hidden]."""


@dataclass(frozen=True)
class PlainFormat:
    """Weights and activations in one dtype. Weights that have it already stay memory-mapped."""

    activations: torch.dtype

    @property
    def linear_dtype(self) -> str:
        return str(self.activations).removeprefix("torch.")

    @property
    def high_precision_dtype(self) -> str:
        return self.linear_dtype

    @property
    def bf16_attention(self) -> bool:
        return False

    @property
    def keeps_blocks(self) -> bool:
        return False

    def linear(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        bias = None if bias is None else bias.to(device, self.activations)
        return PlainLinear(weight.to(device, self.activations), bias)

    def sensitive(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        return self.linear(weight, bias, device)

    def high_precision(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        return self.linear(weight, bias, device)

    def grouped(self, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> Linear:
        return self.linear(weight.dequantized(), bias, device)

    def int8(self, weight: Int8Weight, bias: Tensor | None, device: torch.device) -> Linear:
        return self.linear(weight.dequantized(), bias, device)

    def blocks(self, parts: Sequence[BlockWeight], bias: Tensor | None, device: torch.device) -> Linear:
        return self.linear(torch.cat([one.dequantized() for one in parts]), bias, device)

    def head(self, weight: Tensor, device: torch.device) -> LMHead:
        return LMHead(self.high_precision(weight, None, device))


@dataclass(frozen=True)
class PackedFormat:
    """Weights packed for their kernels, and fp32 activations; CPUs only."""

    pack_linear: Pack
    """Packs the weights of ``linear``."""
    pack_high_precision: Pack
    """Packs the weights of ``high_precision`` and ``head``."""
    linear_dtype: str
    high_precision_dtype: str
    activations: torch.dtype = torch.float32
    bf16_attention: bool = False
    other_dtype: str = ""
    """Name of the format of layers that don't stay as they are stored, if some do."""
    pack_sensitive: Pack | None = None
    """Packs the weights of ``sensitive``; None: ``pack_linear`` does."""
    sensitive_dtype: str = ""
    """Name of the format of ``pack_sensitive``."""
    keeps_blocks: bool = False

    def keeping(self, stored: str) -> "PackedFormat":
        """Return this format for a checkpoint with quantized layers that stay as they are, in the format ``stored``;
        others are stored in this one."""
        return replace(self, linear_dtype=stored, other_dtype=self.linear_dtype)

    def keeping_blocks(self, types: Sequence[str]) -> "PackedFormat":
        """Return this format for GGUF files, of which weights of ``types`` stay as they are."""
        return replace(self.keeping(" and ".join(types)), keeps_blocks=True)

    def beside(self, plain: "PackedFormat") -> "PackedFormat":
        """Return this format with attention, and layers that it doesn't quantize, as in ``plain``."""
        return replace(
            self,
            pack_high_precision=plain.pack_high_precision,
            high_precision_dtype=plain.high_precision_dtype,
            bf16_attention=plain.bf16_attention,
        )

    def linear(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        _check_cpu(device)
        return PackedLinear(self.pack_linear(weight, bias))

    def sensitive(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        _check_cpu(device)
        return PackedLinear((self.pack_sensitive or self.pack_linear)(weight, bias))

    def high_precision(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        _check_cpu(device)
        return PackedLinear(self.pack_high_precision(weight, bias))

    def grouped(self, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> Linear:
        _check_cpu(device)
        return PackedLinear(grouped_product(weight, bias))

    def int8(self, weight: Int8Weight, bias: Tensor | None, device: torch.device) -> Linear:
        _check_cpu(device)
        return PackedLinear(stored_int8_product(weight, bias))

    def blocks(self, parts: Sequence[BlockWeight], bias: Tensor | None, device: torch.device) -> Linear:
        _check_cpu(device)
        if (product := blocks_product(parts, bias)) is not None:
            return PackedLinear(product)
        biases = [None] * len(parts) if bias is None else bias.split([one.shape[0] for one in parts])
        return ConcatenatedLinear(
            [self.blocks([one], vector, device) for one, vector in zip(parts, biases, strict=True)]
        )

    def head(self, weight: Tensor, device: torch.device) -> LMHead:
        _check_cpu(device)
        product = self.pack_high_precision(weight, None)
        return LMHead(PackedLinear(product), pruned_head_of(product, weight))


def _check_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(f"packed weights are for CPUs only, not for {device}")


WEIGHT_FORMATS: dict[str, PackedFormat] = {
    "float32": PackedFormat(float_product, float_product, "float32", "float32"),
    "float16": PackedFormat(half_product, half_product, "float16", "float16"),
    "bfloat16": PackedFormat(bf16_product, bf16_product, "bfloat16", "bfloat16", bf16_attention=True),
}
"""Format of each of ``triptych.config.DTYPES`` on CPUs, except "auto": see ``devices.weight_format``."""
QUANTIZED_FORMATS: dict[str, PackedFormat] = {
    "int8": PackedFormat(int8_product, half_product, "int8", "float16"),
    "int4": PackedFormat(
        int4_product, half_product, "int4", "float16", pack_sensitive=int8_product, sensitive_dtype="int8"
    ),
}
"""Format of each of ``triptych.config.QUANTIZATIONS`` and ``ENCODER_QUANTIZATIONS`` on CPUs, except "none". Instances
use it ``beside`` the format of their dtype."""
CUDA_FORMATS: dict[str, WeightFormat] = {
    name: PlainFormat(getattr(torch, name)) for name in ("float32", "float16", "bfloat16")
}
"""Format of each of ``triptych.config.DTYPES`` on GPUs, except "auto", which means the checkpoint's dtype."""


class RMSNorm(nn.Module):
    """``pointwise.rms_norm`` with a ``weight`` [D] or, for heads [T, heads, D], [heads, D]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self.eps = eps

    def forward(self, activations: Tensor) -> Tensor:
        return rms_norm(activations, self.weight, self.eps)


class LayerNorm(nn.Module):
    """``pointwise.layer_norm`` with a ``weight`` and a ``bias`` [D]."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self.bias = frozen(bias)
        self.eps = eps

    def forward(self, activations: Tensor) -> Tensor:
        return layer_norm(activations, self.weight, self.bias, self.eps)


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return the tensor as a parameter without gradient, sharing its memory."""
    return nn.Parameter(tensor, requires_grad=False)
