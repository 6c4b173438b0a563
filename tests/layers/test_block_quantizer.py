"""Weights that are rounded to the blocks of GGUF files."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from triptych.layers.block_quantizer import WRITTEN, quantized_blocks
from triptych.layers.block_weight import BlockType, BlockWeight


def random_weight() -> Tensor:
    """Rows of unlike widths; one of zeros, one of equal values and two of a single sign."""
    torch.manual_seed(0)
    weight = torch.randn(40, 512) * torch.rand(40, 1)
    weight[3], weight[4], weight[5], weight[6] = 0, 5, weight[5].abs(), -weight[6].abs()
    return weight


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_values_are_near(kind: BlockType) -> None:
    weight = random_weight()
    raw = quantized_blocks(weight, kind)
    found = BlockWeight(raw, kind, 512).dequantized()
    assert np.array_equal(dequantize(raw.numpy(), GGMLQuantizationType[kind.name]), found.numpy())
    steps = 2**kind.bits - 1
    spread = weight.unflatten(1, (-1, 32))
    ranges = spread.amax(2).clamp(min=0) - spread.amin(2).clamp(max=0)
    apart = (found - weight).unflatten(1, (-1, 32)).abs().amax(2)
    # six bits of a scale round it by an eightieth of the largest one
    assert (
        apart <= (0.7 if kind.inputs == 32 else 1) * ranges / steps + ranges.max(dim=1, keepdim=True).values / 60
    ).all()


@pytest.mark.parametrize("kind", [BlockType.Q4_1, BlockType.Q5_1], ids=lambda kind: kind.name)
def test_errors_are_smaller_than_without_a_search(kind: BlockType) -> None:
    weight, library = random_weight(), GGMLQuantizationType[kind.name]
    ours = BlockWeight(quantized_blocks(weight, kind), kind, 512).dequantized()
    theirs = torch.from_numpy(dequantize(quantize(weight.numpy(), library), library))
    assert (ours - weight).norm() < 0.95 * (theirs - weight).norm()
