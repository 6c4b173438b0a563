"""Weights of 4 or 8 bits whose groups of inputs have a scale and a zero point, from words of any format."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.layers.grouped_weight import GroupedWeight, unpacked
from triptych.layers.int8 import Int8Weight
from triptych.layers.stored.format import LayerTensors, kernel_group
from triptych.layers.stored.linears import ScaledWeight, StoredLinear, finite


@dataclass(frozen=True)
class IntegerWeight:
    """W[o, i] = (q[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i: i // group, unless ``order``
    says it."""

    words: Tensor
    """int32 [out, ceil(in * bits / 32)]: the unsigned q of consecutive inputs, the first in the lowest bits."""
    bits: int
    scales: Tensor
    """Floats [out, groups]."""
    zeros: Tensor | None
    """Integers [out, groups]; None: all are in the middle."""
    inputs: int
    group: int
    order: Tensor | None = None
    """int64 [in]."""

    def stored(self, tensors: LayerTensors, kind: str) -> StoredLinear:
        """Return the weight as the kernels take it if it has the same values then, else one to dequantize. Raises
        CheckpointError for scales, the tensor ``kind``, that aren't finite."""
        scales, middle = finite(self.scales, tensors, kind), 1 << (self.bits - 1)
        zeros = self.zeros
        if zeros is not None and not zeros.is_meta and bool((zeros == middle).all()):
            zeros = None
        fits = zeros is None or zeros.is_meta or int(zeros.max()) < 1 << self.bits
        if self.bits == 4 and self.order is None and fits and (step := kernel_group(self.group, self.inputs)):
            halves, repeats, groups = scales.half(), -(-self.group // step), -(-self.inputs // step)
            if halves.is_meta or halves.float().equal(scales):
                halves = halves.repeat_interleave(repeats, dim=1)[:, :groups]
                if zeros is not None:
                    zeros = zeros.to(torch.uint8).repeat_interleave(repeats, dim=1)[:, :groups].contiguous()
                return GroupedWeight(self.words, halves, zeros, self.inputs, step)
        levels = of_bits(self.words, self.bits)[:, : self.inputs]
        if self.bits == 8 and zeros is None and scales.shape[1] == 1:
            return Int8Weight((levels ^ middle).view(torch.int8), scales[:, 0].contiguous())
        all_zeros = torch.full_like(scales, middle, dtype=torch.uint8) if zeros is None else zeros
        columns = torch.arange(self.inputs) // self.group if self.order is None else self.order
        return ScaledWeight(levels, scales, all_zeros, torch.arange(len(levels)), columns)


def scaled_int8(
    values: Tensor, scales: Tensor, zeros: Tensor | None, layer: tuple[LayerTensors, str, int]
) -> StoredLinear:
    """Return the weight of ``values``, int8 [out, in], whose groups of inputs have ``scales``, floats [out, groups],
    and ``zeros``, integers [out, groups]; ``layer`` has its tensors, the scales' kind, and the inputs per group. Raises
    CheckpointError for scales that aren't finite."""
    tensors, kind, group = layer
    wide = finite(scales, tensors, kind)
    if zeros is not None and not zeros.is_meta and not zeros.any():
        zeros = None
    if zeros is None and wide.shape[1] == 1:
        return Int8Weight(values, wide[:, 0].contiguous().to(values.device))  # outlines have single scales' values
    return ScaledWeight(values, wide, zeros, torch.arange(len(values)), torch.arange(values.shape[1]) // group)


def group_order(tensors: LayerTensors, kind: str, inputs: int, group: int) -> Tensor | None:
    """Return each input's group, the tensor ``kind``, int64 [in]; None if groups are of consecutive inputs. Raises
    CheckpointError for a group that doesn't exist."""
    order = tensors.read(kind, (inputs,), ("int32", "int64")).long()
    if order.is_meta or order.equal(torch.arange(inputs) // group):
        return None
    if int(order.min()) < 0 or int(order.max()) >= -(-inputs // group):
        raise tensors.wrong(f"{kind} has groups from {int(order.min())} to {int(order.max())}")
    return order


def of_bits(words: Tensor, bits: int) -> Tensor:
    """int32 [n, k] → uint8 [n, 32 / bits * k], unsigned numbers, the first in the lowest bits."""
    if bits == 8:
        return words.contiguous().view(torch.uint8)
    return unpacked(words)
