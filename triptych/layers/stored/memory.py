"""What quantized weights take in memory when they are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.layers.block_weight import BlockWeight
from triptych.layers.grouped_weight import DEFAULT_GROUP, GroupedWeight
from triptych.layers.int8 import Int8Weight
from triptych.layers.linear import Linear, LMHead, PackedFormat, PlainLinear, WeightFormat

BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "int8": 8.0, "int4": 4 + 32 / DEFAULT_GROUP}
"""Bits of a weight that is quantized when it is loaded, or isn't, by the names of formats."""


@dataclass
class MeasuringFormat:
    """A ``WeightFormat`` of layers without values (``checkpoint.outline``), which adds up what those of ``measured``
    would take."""

    measured: WeightFormat
    num_bytes: float = 0.0
    """Bytes of the layers that were made."""

    @property
    def activations(self) -> torch.dtype:
        return self.measured.activations

    @property
    def linear_dtype(self) -> str:
        return self.measured.linear_dtype

    @property
    def high_precision_dtype(self) -> str:
        return self.measured.high_precision_dtype

    @property
    def bf16_attention(self) -> bool:
        return self.measured.bf16_attention

    @property
    def keeps_blocks(self) -> bool:
        return self.measured.keeps_blocks

    def linear(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        kept = isinstance(self.measured, PackedFormat) and self.measured.other_dtype
        return self._in_bits(BITS.get(kept or self.linear_dtype, 16.0), weight, device)

    def sensitive(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        named = isinstance(self.measured, PackedFormat) and self.measured.sensitive_dtype
        return self._in_bits(BITS[named], weight, device) if named else self.linear(weight, bias, device)

    def high_precision(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
        return self._in_bits(BITS[self.high_precision_dtype], weight, device)

    def grouped(self, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> Linear:
        if not isinstance(self.measured, PackedFormat):
            return self.linear(weight.dequantized(), bias, device)
        tensors = (weight.words, weight.scales, weight.zeros, weight.offsets)
        return self._made(weight.shape, sum(one.nbytes for one in tensors if one is not None), device)

    def int8(self, weight: Int8Weight, bias: Tensor | None, device: torch.device) -> Linear:
        if not isinstance(self.measured, PackedFormat):
            return self.linear(weight.dequantized(), bias, device)
        return self._made(weight.shape, weight.values.nbytes + weight.scales.nbytes, device)

    def blocks(self, parts: Sequence[BlockWeight], bias: Tensor | None, device: torch.device) -> Linear:
        shape = sum(one.shape[0] for one in parts), parts[0].inputs
        return self._made(shape, sum(one.raw.nbytes for one in parts), device)

    def head(self, weight: Tensor, device: torch.device) -> LMHead:
        return LMHead(self.high_precision(weight, None, device))

    def _in_bits(self, bits: float, weight: Tensor, device: torch.device) -> Linear:
        return self._made(weight.shape, bits / 8 * weight.numel(), device)

    def _made(self, shape: tuple[int, ...], num_bytes: float, device: torch.device) -> Linear:
        self.num_bytes += num_bytes
        return PlainLinear(torch.empty(shape, device=device), None)
