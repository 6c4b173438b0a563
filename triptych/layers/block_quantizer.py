"""Rounds weights to the blocks of GGUF files: the inverse of ``block_weight``."""

import torch
from torch import Tensor

from triptych.layers.block_weight import SUPER, BlockType
from triptych.layers.grouped_weight import best_line, levels_on
from triptych.layers.products import AT_ONCE

GROUP = 32
HIGHEST_SCALE = 63
"""The largest number that a super-block's factors are multiplied by."""
WRITTEN = (BlockType.Q4_1, BlockType.Q5_1, BlockType.Q8_0, BlockType.Q4_K, BlockType.Q5_K)
"""Types that weights are rounded to."""


def quantized_blocks(weight: Tensor, kind: BlockType) -> Tensor:
    """Return finite weights [out, in], of whole blocks, as bytes of one of ``WRITTEN``, uint8 [out, bytes of a row].
    Levels are those of each group's line that has the smallest squared error of several."""
    rows = torch.empty((len(weight), weight.shape[1] // kind.inputs * kind.num_bytes), dtype=torch.uint8)
    together = max(1, AT_ONCE // 4 // max(1, weight.shape[1]))
    for first in range(0, len(weight), together):
        some = weight[first : first + together].float().unflatten(1, (-1, GROUP))
        rows[first : first + together] = _packed(some, kind).flatten(1)
    return rows


def _packed(groups: Tensor, kind: BlockType) -> Tensor:
    """``groups`` is float32 [rows, groups, GROUP]; returns uint8 [rows, blocks, bytes of one]."""
    if kind == BlockType.Q8_0:
        scale = (groups.abs().amax(2, keepdim=True) / 127).half()
        levels = (groups / scale.float()).nan_to_num_(0).round_().clamp_(-128, 127).to(torch.int8)
        return torch.cat((scale.view(torch.uint8), levels.view(torch.uint8)), dim=2)
    highest = 2**kind.bits - 1
    scale, offset = best_line(groups, highest, begins_below=kind.inputs == SUPER)
    if kind.inputs == SUPER:
        return _super_blocks(groups, scale, offset, highest)
    levels = levels_on(groups, scale, offset, highest).to(torch.uint8)
    head = torch.cat((scale.half(), offset.half()), dim=2).view(torch.uint8)
    return torch.cat((head, *_fifth_bits(levels, kind), _pairs(levels)), dim=2)


def _fifth_bits(levels: Tensor, kind: BlockType) -> list[Tensor]:
    """Bit i of four bytes is that of value i; no bytes for four bits."""
    if kind.bits == 4:
        return []
    return [((levels >> 4).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)).sum(3, dtype=torch.uint8)]


def _pairs(levels: Tensor) -> Tensor:
    """The lowest four bits of the first half beside those of the second one."""
    first, second = (levels & 15).chunk(2, dim=2)
    return first | second << 4


def _super_blocks(groups: Tensor, scale: Tensor, offset: Tensor, highest: int) -> Tensor:
    """Scales and minus the offsets become integers of 6 bits, and levels those of the lines that these make."""
    lines = torch.stack((scale, -offset)).clamp_(min=0).unflatten(2, (-1, SUPER // GROUP)).squeeze(4)
    factors = (lines.amax(3, keepdim=True) / HIGHEST_SCALE).half()
    whole = (lines / factors.float()).nan_to_num_(0, 0, 0).round_().clamp_(0, HIGHEST_SCALE)
    scale, minimum = (whole * factors.float()).flatten(2).unsqueeze(3)
    levels = levels_on(groups, scale, -minimum, highest).to(torch.uint8).unflatten(1, (-1, 4, 2))
    (low, high), (low_minus, high_minus) = (part.chunk(2, dim=2) for part in whole.to(torch.uint8))
    head = [one.contiguous().view(torch.uint8) for one in factors]
    head += [low | high >> 4 << 6, low_minus | high_minus >> 4 << 6, high & 15 | (high_minus & 15) << 4]
    if highest > 15:
        places = torch.arange(8, dtype=torch.uint8).view(4, 2, 1)
        head.append(((levels >> 4) << places).sum((2, 3), dtype=torch.uint8))
    pairs = levels[..., 0, :] & 15 | levels[..., 1, :] << 4
    return torch.cat((*head, pairs.flatten(2)), dim=2)
