"""Products with 4-bit weights and activations quantized to int8 dynamically, with one scale per token: by the compiled
kernel if there is one, else with the weights in fp16.

Weights are quantized here, or come quantized from a checkpoint.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.float_product import half_product
from triptych.layers.int8 import MAX_INPUTS, SMALLEST
from triptych.layers.products import AT_ONCE, CompiledProduct, Product, WeightKind

DEFAULT_GROUP = 32
"""Inputs per group of weights that are quantized when they are loaded. Larger groups save little memory and lose
accuracy."""
PER_WORD = 8
"""4-bit numbers in an int32."""
MIDDLE = 8
"""Zero point of weights without zero points of their own."""
HIGHEST = 15
LARGEST_SCALE = 65280.0
"""The largest number that both fp16 and bfloat16 represent."""
STEPS_PER_EXTREME = (7.5, 8, 8.5, 9, 9.5)
"""Candidates for a group's scale: the value of largest magnitude is that many steps below zero. Over 8, it is clipped."""
SHRINKAGE = (1, 0.95, 0.9, 0.85, 0.8)
"""Candidates for the scale of a group with a zero point, relative to the one that clips nothing."""


@dataclass(frozen=True)
class GroupedWeight:
    """A 4-bit weight W [out, in]: W[o, i] = (q[o, i] - zeros[o, g]) * scales[o, g], where g is i // group.

    AWQ, GPTQ and compressed-tensors have such weights, too, and differ in the order of the numbers.
    """

    words: Tensor
    """int32 [out, ceil(in / 8)]: q, 0 to 15, of eight consecutive inputs each, the first in the lowest bits."""
    scales: Tensor
    """float16 [out, ceil(in / group)], of any sign."""
    zeros: Tensor | None
    """uint8 [out, ceil(in / group)], 0 to 15; None if all are 8."""
    inputs: int
    group: int
    """Inputs per group: a multiple of 32."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.words), self.inputs

    def rows(self, part: slice) -> "GroupedWeight":
        """Return a range of the outputs."""
        zeros = None if self.zeros is None else self.zeros[part]
        return GroupedWeight(self.words[part], self.scales[part], zeros, self.inputs, self.group)

    def columns(self, part: slice) -> "GroupedWeight":
        """Return the inputs from ``part.start`` to ``part.stop``. Raises ConfigError if they don't begin with a
        group."""
        if part.start % self.group or (part.stop % self.group and part.stop != self.inputs):
            raise ConfigError(
                f"inputs {part.start} to {part.stop} of {self.inputs} aren't whole groups of {self.group}: quantize with "
                "smaller groups, or use fewer ranks"
            )
        words = self.words[:, part.start // PER_WORD : -(-part.stop // PER_WORD)]
        groups = slice(part.start // self.group, -(-part.stop // self.group))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return GroupedWeight(words, self.scales[:, groups], zeros, part.stop - part.start, self.group)

    def dequantized(self) -> Tensor:
        """Return W in float32."""
        out, groups = self.scales.shape
        padded = F.pad(self.words, (0, groups * self.group // PER_WORD - self.words.shape[1])).contiguous()
        pairs = padded.view(torch.uint8)
        whole = torch.stack((pairs & HIGHEST, pairs >> 4), dim=2).view(out, groups, self.group).float()
        whole -= MIDDLE if self.zeros is None else self.zeros.float().unsqueeze(2)
        return (whole * self.scales.float().unsqueeze(2)).flatten(1)[:, : self.inputs]


def concatenate_grouped(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenate the outputs of weights with the same inputs and groups, all of them with zero points or none."""
    first = weights[0]
    if len(weights) == 1:
        return first
    zeros = [one.zeros for one in weights if one.zeros is not None]
    return GroupedWeight(
        torch.cat([one.words for one in weights]),
        torch.cat([one.scales for one in weights]),
        torch.cat(zeros) if zeros else None,
        first.inputs,
        first.group,
    )


def quantize_groups(weight: Tensor, group: int = DEFAULT_GROUP, *, has_zeros: bool = False) -> GroupedWeight:
    """Quantize ``weight`` [out, in] to 4 bits, with the scale of each group that has the smallest squared error of
    several. Scales are numbers of bfloat16 as well, so that they are exact in any checkpoint. NaN stays NaN."""
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // group)
    words = torch.empty((num_outputs, num_groups * group // PER_WORD), dtype=torch.int32)
    scales = torch.empty((num_outputs, num_groups), dtype=torch.float16)
    zeros = torch.empty((num_outputs, num_groups), dtype=torch.uint8) if has_zeros else None
    together = max(1, AT_ONCE // max(1, num_inputs))
    for first in range(0, num_outputs, together):
        rows = slice(first, first + together)
        some = F.pad(weight[rows].float(), (0, num_groups * group - num_inputs)).unflatten(1, (num_groups, group))
        scale, zero = _best(some, _with_zeros(some) if has_zeros else _around_middle(some))
        whole = _levels(some, scale, zero).nan_to_num_(MIDDLE).to(torch.uint8).flatten(1)
        words[rows] = (whole[:, ::2] | whole[:, 1::2] << 4).view(torch.int32)
        scales[rows] = scale.squeeze(2)
        if zeros is not None:
            zeros[rows] = zero.squeeze(2).nan_to_num(MIDDLE).to(torch.uint8)
    return GroupedWeight(words[:, : -(-num_inputs // PER_WORD)], scales, zeros, num_inputs, group)


Candidates = list[tuple[Tensor, Tensor]]
"""Scales and zero points of groups, float32 [rows, groups, 1] each."""


def _around_middle(weights: Tensor) -> Candidates:
    """``weights`` is float32 [rows, groups, group]."""
    extreme = weights.gather(2, weights.abs().argmax(2, keepdim=True))
    zero = torch.full_like(extreme, MIDDLE)
    return [(_rounded_scale(extreme / -steps), zero) for steps in STEPS_PER_EXTREME]


def _with_zeros(weights: Tensor) -> Candidates:
    """``weights`` is float32 [rows, groups, group]."""
    low, high = weights.amin(2, keepdim=True).clamp_(max=0), weights.amax(2, keepdim=True).clamp_(min=0)
    found = []
    for shrinkage in SHRINKAGE:
        scale = _rounded_scale((high - low) * (shrinkage / HIGHEST))
        found.append((scale, (low * -shrinkage / _divisor(scale)).round_().clamp_(0, HIGHEST)))
    return found


def _rounded_scale(scale: Tensor) -> Tensor:
    """Round to what float16 and bfloat16 represent."""
    return scale.clamp(-LARGEST_SCALE, LARGEST_SCALE).bfloat16().half().float()


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale)


def _levels(weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (weights / _divisor(scale)).add_(zero).round_().clamp_(0, HIGHEST)


def _best(weights: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point of each group with the smallest squared error."""
    best, scales, zeros = None, *candidates[0]
    for scale, zero in candidates:
        error = _levels(weights, scale, zero).sub_(zero).mul_(scale).sub_(weights).square_().sum(2, keepdim=True)
        if best is None:
            best = error
            continue
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    return scales, zeros


class DequantizedProduct:
    """The product without compiled kernels: weights are rounded to fp16 again, and tokens to int8 as in the kernel."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._product = half_product(weight.dequantized(), None)
        self._bias = None if bias is None else bias.float()

    def __call__(self, activations: Tensor) -> Tensor:
        highest = activations.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
        rounded = (activations * (127 / highest)).round_().nan_to_num_(0)
        scales = highest / 127 + (highest - highest)  # NaN for an infinity as well
        outputs = self._product(rounded).mul_(scales)
        return outputs if self._bias is None else outputs.add_(self._bias)


def int4_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] quantized by ``quantize_groups``. Raises ConfigError as ``grouped_product``
    does."""
    return grouped_product(quantize_groups(weight), bias)


def grouped_product(weight: GroupedWeight, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for a 4-bit weight.

    A token with a NaN or an infinity yields NaNs, and doesn't affect other tokens. Raises ConfigError for more inputs
    than int8 takes.
    """
    if weight.inputs > MAX_INPUTS:
        raise ConfigError(f"int4 is for layers of at most {MAX_INPUTS} inputs, not {weight.inputs}")
    if (library := native.library()) is None:
        return DequantizedProduct(weight, bias)
    panels = _in_panels(weight, ctypes.c_int.in_dll(library, "int4_outputs").value)
    shape, has_zeros = torch.Size(weight.shape), weight.zeros is not None
    return CompiledProduct(
        library, WeightKind.INT4, shape, panels, None, bias, group=weight.group, has_zeros=has_zeros
    )


def _in_panels(weight: GroupedWeight, outputs: int) -> Tensor:
    """Pack a weight for ``kernels/cpu/int4.c``, in panels of ``outputs`` rows, padded with zeros.

    Returns uint8 [ceil(out / outputs), groups, bytes of a group]: words, scales and zero points of the group.
    """
    num_outputs, groups = weight.scales.shape
    words = weight.group // PER_WORD
    ends = [4 * words * outputs]
    ends.append(ends[0] + 2 * outputs)
    size = ends[1] + (0 if weight.zeros is None else outputs)
    panels = torch.empty((-(-num_outputs // outputs), groups, size), dtype=torch.uint8)
    together = max(1, AT_ONCE // max(1, outputs * weight.inputs))
    for number, some in enumerate(panels.split(together)):
        rows = weight.rows(slice(number * together * outputs, (number + 1) * together * outputs))
        below = -len(rows.words) % outputs

        def arranged(values: Tensor, below: int = below) -> Tensor:
            """[rows, groups, n] → uint8 [panels, groups, bytes]."""
            full = F.pad(values, (0, 0, 0, 0, 0, below)).unflatten(0, (-1, outputs))
            return full.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)

        padded = F.pad(rows.words, (0, groups * words - rows.words.shape[1]))
        some[..., : ends[0]] = arranged(padded.unflatten(1, (groups, words)))
        some[..., ends[0] : ends[1]] = arranged(rows.scales.unsqueeze(2))
        if rows.zeros is not None:
            some[..., ends[1] :] = arranged(rows.zeros.unsqueeze(2))
    return panels
