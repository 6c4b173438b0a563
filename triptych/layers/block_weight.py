"""Weights in the blocks of GGUF files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from triptych.layers.grouped_weight import by_rows

SUPER = 256
"""Inputs of a super-block, whose factors its groups' scales and offsets are multiplied by."""


class BlockType(IntEnum):
    """How a block's bytes are its values, named as in ggml: ``Type`` in ``kernels/cpu/blocks.c``."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7

    @property
    def inputs(self) -> int:
        """Inputs of a block."""
        return SUPER if self >= BlockType.Q4_K else 32

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return (4, 4, 5, 5, 8, 4, 5, 6)[self]

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return (18, 20, 22, 24, 34, 144, 176, 210)[self]


@dataclass(frozen=True)
class Blocks:
    """What blocks of n rows say: W = (q - 2^(bits - 1)) * scale or, with offsets, q * scale + offset. ``scales`` and
    ``offsets`` [n, groups] are float16, or uint8 and int8 integers that ``factors``, float16, multiply: those of
    scales, and then those of minus the offsets."""

    levels: Tensor
    """q, uint8 [n, inputs]."""
    scales: Tensor
    offsets: Tensor | None
    factors: Tensor | None
    """[n, inputs / SUPER, 1 or 2]."""


@dataclass(frozen=True)
class BlockWeight:
    """A weight W [out, in] as a GGUF file stores it."""

    raw: Tensor
    """uint8 [out, bytes of a row], memory-mapped if the file's rows are in order."""
    type: BlockType
    inputs: int
    """A multiple of a block's."""
    part: slice | None = None
    """The inputs that the weight has of these, if they aren't whole blocks. Kernels don't take it then."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.raw), self.inputs if self.part is None else self.part.stop - self.part.start

    def rows(self, part: slice | Tensor) -> "BlockWeight":
        """Return a range of the outputs, or those with the given indices."""
        return replace(self, raw=self.raw[part])

    def columns(self, part: slice) -> "BlockWeight":
        """Return a range of the inputs, of a weight that has all."""
        if part == slice(0, self.inputs):
            return self
        if part.start % self.type.inputs or part.stop % self.type.inputs:
            return replace(self, part=part)
        first, end = (place // self.type.inputs * self.type.num_bytes for place in (part.start, part.stop))
        return BlockWeight(self.raw[:, first:end], self.type, part.stop - part.start)

    def dequantized(self) -> Tensor:
        """Return W in float32."""
        part = slice(None) if self.part is None else self.part
        return by_rows(self.shape, self.raw.device, lambda rows: _floats(self.rows(rows))[:, part])


def _floats(weight: BlockWeight) -> Tensor:
    found = unpacked_blocks(weight)
    rows, groups = found.scales.shape
    scales = found.scales.float()
    offsets = None if found.offsets is None else found.offsets.float()
    if found.factors is not None:
        factors = found.factors.float().repeat_interleave(groups * SUPER // weight.inputs, dim=1)
        scales = scales * factors[..., 0]
        offsets = None if offsets is None else -offsets * factors[..., 1]
    levels = found.levels.view(rows, groups, -1).float()
    if offsets is None:
        return ((levels - 2 ** (weight.type.bits - 1)) * scales.unsqueeze(2)).flatten(1)
    return (levels * scales.unsqueeze(2) + offsets.unsqueeze(2)).flatten(1)


def concatenate_blocks(weights: Sequence[BlockWeight]) -> BlockWeight:
    """Concatenate the outputs of weights of one type with the same inputs."""
    return weights[0] if len(weights) == 1 else replace(weights[0], raw=torch.cat([one.raw for one in weights]))


def unpacked_blocks(weight: BlockWeight) -> Blocks:
    """Return what a weight's bytes say."""
    kind = weight.type
    blocks = weight.raw.reshape(len(weight.raw), weight.inputs // kind.inputs, kind.num_bytes)
    if kind == BlockType.Q6_K:
        return _six_bits(blocks)
    if kind in (BlockType.Q4_K, BlockType.Q5_K):
        return _super_blocks(blocks, has_fifth=kind == BlockType.Q5_K)
    has_offsets = kind in (BlockType.Q4_1, BlockType.Q5_1)
    ends = 2 + 2 * has_offsets
    halves = blocks[..., :ends].contiguous().view(torch.float16)
    if kind == BlockType.Q8_0:
        levels = blocks[..., ends:] ^ 128
    else:
        pairs = blocks[..., -16:]
        levels = torch.cat((pairs & 15, pairs >> 4), dim=2)
        if kind.bits == 5:
            bits = blocks[..., ends : ends + 4].unsqueeze(3) >> torch.arange(8, dtype=torch.uint8)
            levels |= (bits & 1).flatten(2) << 4
    return Blocks(levels.flatten(1), halves[..., 0], halves[..., 1] if has_offsets else None, None)


def _super_blocks(blocks: Tensor, *, has_fifth: bool) -> Blocks:
    """``blocks`` is uint8 [rows, blocks, bytes of one]."""
    factors = blocks[..., :4].contiguous().view(torch.float16)
    low, middle, high = blocks[..., 4:16].unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=2)
    offsets = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=2)
    pairs = blocks[..., -128:].unflatten(2, (4, 1, 32))
    levels = torch.cat((pairs & 15, pairs >> 4), dim=3)
    if has_fifth:
        places = torch.arange(8, dtype=torch.uint8).view(4, 2, 1)
        levels |= (blocks[..., None, None, 16:48] >> places & 1) << 4
    return Blocks(levels.flatten(1), scales.flatten(1), offsets.flatten(1), factors)


def _six_bits(blocks: Tensor) -> Blocks:
    """``blocks`` is uint8 [rows, blocks, bytes of one]."""
    pairs, more = blocks[..., :128].unflatten(2, (2, 1, 64)), blocks[..., 128:192].unflatten(2, (2, 1, 32))
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    low = torch.cat((pairs & 15, pairs >> 4), dim=3).unflatten(4, (2, 32)).flatten(3, 4)
    levels = low | (more >> places & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return Blocks(levels.flatten(1), scales.flatten(1), None, blocks[..., 208:].contiguous().view(torch.float16))
