"""4-bit weights in groups, and their quantization."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import ConfigError
from triptych.layers.products import AT_ONCE

DEFAULT_GROUP = 32
"""Inputs per group of weights that are quantized when they are loaded. Larger groups save little memory and lose
accuracy."""
PER_WORD = 8
"""4-bit numbers in an int32."""
GROUPS = (128, 64, 32)
"""Inputs per group that the kernels take."""
MIDDLE = 8
"""Zero point of weights without zero points of their own."""
HIGHEST = 15
LARGEST_SCALE = 65280.0
"""The largest number that both fp16 and bfloat16 represent."""
STEPS_PER_EXTREME = (7.5, 8, 8.5, 9, 9.5)
"""Candidates for a group's scale: the value of largest magnitude is that many steps from zero, or clipped to 8."""
SHRINKAGE = (1, 0.95, 0.9, 0.85, 0.8)
"""Candidates for the scale of a group with a zero point, relative to the one that clips nothing."""
STEPS_PER_RANGE = (15, 14.2, 14.6, 15.4, 15.8)
"""Candidates for the first levels of a group with an offset: as many steps are between its extremes, or clipped to
15."""


@dataclass(frozen=True)
class GroupedWeight:
    """A 4-bit weight W [out, in]: W[o, i] = (q[o, i] - zeros[o, g]) * scales[o, g] or, with offsets,
    q[o, i] * scales[o, g] + offsets[o, g], where g is i // group.

    AWQ, GPTQ and compressed-tensors have such weights, too, and differ in the order of the numbers.
    """

    words: Tensor
    """int32 [out, ceil(in / 8)]: q, 0 to 15, of eight consecutive inputs each, the first in the lowest bits."""
    scales: Tensor
    """float16 [out, ceil(in / group)], of any sign."""
    zeros: Tensor | None
    """uint8 [out, ceil(in / group)], 0 to 15; None if all are 8, or there are offsets."""
    inputs: int
    group: int
    """Inputs per group: 32, 64 or 128."""
    offsets: Tensor | None = None
    """float16 [out, ceil(in / group)]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.words), self.inputs

    def rows(self, part: slice | Tensor) -> "GroupedWeight":
        """Return a range of the outputs, or those with the given indices."""
        zeros = None if self.zeros is None else self.zeros[part]
        offsets = None if self.offsets is None else self.offsets[part]
        return GroupedWeight(self.words[part], self.scales[part], zeros, self.inputs, self.group, offsets)

    def columns(self, part: slice) -> "GroupedWeight":
        """Return the inputs from ``part.start`` to ``part.stop``, in smaller groups if they aren't whole ones. Raises
        ConfigError if they aren't whole groups of any size that the kernels take."""
        ends = part.start, 0 if part.stop == self.inputs else part.stop
        step = next((one for one in GROUPS if self.group % one == 0 and not any(end % one for end in ends)), self.group)
        if step < self.group:
            return self._in_groups_of(step).columns(part)
        if part.start % self.group or (part.stop % self.group and part.stop != self.inputs):
            raise ConfigError(
                f"a rank's inputs, {part.start} to {part.stop} of {self.inputs}, aren't whole groups of {self.group} "
                "weights: quantize the checkpoint in smaller groups, or set a smaller --tensor-parallel-size"
            )
        words = self.words[:, part.start // PER_WORD : -(-part.stop // PER_WORD)]
        groups = slice(part.start // self.group, -(-part.stop // self.group))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return GroupedWeight(words, self.scales[:, groups], zeros, part.stop - part.start, self.group, offsets)

    def _in_groups_of(self, size: int) -> "GroupedWeight":
        """Return the same weight in groups of ``size``, which divides the present one."""
        groups = -(-self.inputs // size)

        def repeated(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.group // size, dim=1)[:, :groups]

        zeros = None if self.zeros is None else repeated(self.zeros)
        offsets = None if self.offsets is None else repeated(self.offsets)
        return replace(self, scales=repeated(self.scales), zeros=zeros, group=size, offsets=offsets)

    def dequantized(self) -> Tensor:
        """Return W in float32."""
        return by_rows(self.shape, self.words.device, lambda rows: self.rows(rows)._floats())

    def _floats(self) -> Tensor:
        out, groups = self.scales.shape
        padded = F.pad(self.words, (0, groups * self.group // PER_WORD - self.words.shape[1]))
        whole = unpacked(padded).view(out, groups, self.group).float()
        scales = self.scales.float().unsqueeze(2)
        if self.offsets is not None:
            whole = whole * scales + self.offsets.float().unsqueeze(2)
        else:
            whole = (whole - (MIDDLE if self.zeros is None else self.zeros.float().unsqueeze(2))) * scales
        return whole.flatten(1)[:, : self.inputs]


def by_rows(shape: tuple[int, int], device: torch.device, decode: Callable[[slice], Tensor]) -> Tensor:
    """Return a weight, float32 [out, in], whose rows ``decode`` returns: so few at a time that what it makes meanwhile
    is small."""
    weight = torch.empty(shape, device=device)
    together = max(1, AT_ONCE // max(1, shape[1]))
    for first in range(0, shape[0], together):
        rows = slice(first, min(first + together, shape[0]))
        weight[rows] = decode(rows)
    return weight


def packed(levels: Tensor) -> Tensor:
    """uint8 [n, 8 k], 0 to 15 → int32 [n, k], the first in the lowest bits."""
    pairs = levels[:, ::2] | levels[:, 1::2] << 4
    return pairs.flatten().view(torch.int32).view(len(levels), levels.shape[1] // PER_WORD)


def unpacked(words: Tensor) -> Tensor:
    """int32 [n, k] → uint8 [n, 8 k], 0 to 15."""
    pairs = words.flatten().view(torch.uint8)
    return torch.stack((pairs & HIGHEST, pairs >> 4), dim=1).view(len(words), words.shape[1] * PER_WORD)


def concatenate_grouped(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenate the outputs of weights with the same inputs and groups. If some have zero points, all get them.
    Raises ValueError unless all or none have offsets."""
    first = weights[0]
    if len(weights) == 1:
        return first
    offsets = [one.offsets for one in weights if one.offsets is not None]
    if offsets and len(offsets) < len(weights):
        raise ValueError("weights with offsets can't be concatenated with others")
    zeros = None
    if any(one.zeros is not None for one in weights):
        middle = torch.tensor(MIDDLE, dtype=torch.uint8, device=first.scales.device)
        zeros = torch.cat([middle.expand(one.scales.shape) if one.zeros is None else one.zeros for one in weights])
    words, scales = torch.cat([one.words for one in weights]), torch.cat([one.scales for one in weights])
    return GroupedWeight(words, scales, zeros, first.inputs, first.group, torch.cat(offsets) if offsets else None)


def quantize_with_offsets(weight: Tensor) -> GroupedWeight:
    """Quantize ``weight`` [out, in] to 4 bits in groups of DEFAULT_GROUP, with the scale and offset of each group that
    have the smallest squared error of several. NaN stays NaN."""
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // DEFAULT_GROUP)
    words = torch.empty((num_outputs, num_groups * DEFAULT_GROUP // PER_WORD), dtype=torch.int32)
    scales, offsets = torch.empty((2, num_outputs, num_groups), dtype=torch.float16)
    for first in range(0, num_outputs, together := max(1, AT_ONCE // 4 // max(1, num_inputs))):
        rows = slice(first, first + together)
        some = F.pad(weight[rows].float(), (0, -num_inputs % DEFAULT_GROUP)).unflatten(1, (num_groups, DEFAULT_GROUP))
        scale, offset = best_line(some)
        whole = levels_on(some, scale, offset).nan_to_num_(0).to(torch.uint8)
        words[rows], scales[rows], offsets[rows] = packed(whole.flatten(1)), scale.squeeze(2), offset.squeeze(2)
    words = words[:, : -(-num_inputs // PER_WORD)]
    return GroupedWeight(words, scales, None, num_inputs, DEFAULT_GROUP, offsets)


def best_line(weights: Tensor, highest: int = HIGHEST, *, begins_below: bool = False) -> tuple[Tensor, Tensor]:
    """Return scale and offset, float32 [rows, groups, 1], of each group of ``weights``, float32 [rows, groups, group]:
    of the candidates' levels from 0 to ``highest``, the line with the smallest squared error, rounded to float16.
    ``begins_below``: offsets are at most zero."""
    low, high = weights.amin(2, keepdim=True), weights.amax(2, keepdim=True)
    if begins_below:
        low = low.clamp_(max=0)
    count, sum_of_weights = weights.shape[2], weights.sum(2, keepdim=True)
    best = None
    for steps in STEPS_PER_RANGE:
        levels = ((weights - low) * (steps * highest / HIGHEST / _divisor(high - low))).round_().clamp_(0, highest)
        total = levels.sum(2, keepdim=True)
        spread = count * levels.square().sum(2, keepdim=True) - total.square()
        scale = (count * (levels * weights).sum(2, keepdim=True) - total * sum_of_weights) / _divisor(spread)
        flat = (sum_of_weights / total).nan_to_num_(0, 0, 0) if begins_below else 0 * sum_of_weights
        scale = _rounded_half(torch.where(spread == 0, flat, scale))
        offset = _rounded_half((sum_of_weights - scale * total) / count)
        if begins_below:
            offset = offset.clamp_(max=0)
        apart = levels_on(weights, scale, offset, highest) * scale + offset - weights
        error = apart.square().sum(2, keepdim=True)
        if best is None:
            best, scales, offsets = error, scale, offset
            continue
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales, offsets = torch.where(is_better, scale, scales), torch.where(is_better, offset, offsets)
    return scales, offsets


def _rounded_half(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST_SCALE, LARGEST_SCALE).half().float()


def levels_on(weights: Tensor, scale: Tensor, offset: Tensor, highest: int = HIGHEST) -> Tensor:
    """Return the nearest levels of ``weights``, from 0 to ``highest``."""
    return ((weights - offset) / _divisor(scale)).round_().clamp_(0, highest)


def quantize_groups(weight: Tensor, group: int = DEFAULT_GROUP, *, has_zeros: bool = False) -> GroupedWeight:
    """Quantize ``weight`` [out, in] to 4 bits, with the scale of each group that has the smallest squared error of
    several. Scales are numbers of bfloat16 as well, so that they are exact in any checkpoint. NaN stays NaN."""
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // group)
    words = torch.empty((num_outputs, num_groups * group // PER_WORD), dtype=torch.int32)
    scales = torch.empty((num_outputs, num_groups), dtype=torch.float16)
    zeros = torch.empty((num_outputs, num_groups), dtype=torch.uint8) if has_zeros else None
    together = max(1, AT_ONCE // 4 // max(1, num_inputs))  # several tensors of them stay in the cache
    # reused, because new memory takes longer than the arithmetic
    buffers = torch.zeros((2, min(together, num_outputs), num_groups, group))
    for first in range(0, num_outputs, together):
        rows = slice(first, first + together)
        some, levels = buffers[:, : len(weight[rows])]
        some.flatten(1)[:, :num_inputs] = weight[rows]
        scale, zero = _best(some, _with_zeros(some) if has_zeros else _around_middle(some), levels)
        whole = _levels(some, scale, zero, levels).nan_to_num_(MIDDLE).to(torch.uint8)
        words[rows] = packed(whole.flatten(1))
        scales[rows] = scale.squeeze(2)
        if zeros is not None:
            zeros[rows] = zero.squeeze(2).nan_to_num(MIDDLE).to(torch.uint8)
    return GroupedWeight(words[:, : -(-num_inputs // PER_WORD)], scales, zeros, num_inputs, group)


Candidates = list[tuple[Tensor, Tensor]]
"""Scales and zero points of groups, float32 [rows, groups, 1] each."""


def _around_middle(weights: Tensor) -> Candidates:
    """``weights`` is float32 [rows, groups, group]."""
    low, high = weights.amin(2, keepdim=True), weights.amax(2, keepdim=True)
    extreme = torch.where(high > -low, high, low)
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


def _best(weights: Tensor, candidates: Candidates, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point of each group with the smallest squared error."""
    best, scales, zeros = None, *candidates[0]
    for scale, zero in candidates:
        apart = _levels(weights, scale, zero, scratch).sub_(zero).mul_(scale).sub_(weights)
        error = apart.square_().sum(2, keepdim=True)
        if best is None:
            best = error
            continue
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    return scales, zeros


def _levels(weights: Tensor, scale: Tensor, zero: Tensor, out: Tensor) -> Tensor:
    """Write the nearest levels to ``out``, and return it."""
    return torch.mul(weights, _divisor(scale).reciprocal(), out=out).add_(zero).round_().clamp_(0, HIGHEST)
