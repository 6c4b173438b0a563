"""Products with weights in the blocks of GGUF files, and activations quantized to int8 dynamically, in blocks of 32
inputs with a scale each: by the compiled kernel if there is one, else with the weights in fp16."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers import native
from triptych.layers.block_weight import SUPER, BlockWeight, unpacked_blocks
from triptych.layers.float_product import half_product
from triptych.layers.grouped_weight import PER_WORD, packed
from triptych.layers.huge_pages import packed_weights
from triptych.layers.products import AT_ONCE, CompiledProduct, Product, WeightKind


def blocks_product(parts: Sequence[BlockWeight], bias: Tensor | None) -> Product | None:
    """Return ``x W^T + b`` for the weight that concatenates the outputs of ``parts``, of the same inputs and of any
    types; None if the kernel doesn't take them together.

    A token with a NaN or an infinity yields NaNs, and doesn't affect other tokens.
    """
    if (library := native.library()) is None:
        return half_product(torch.cat([one.dequantized() for one in parts]), bias)
    outputs = ctypes.c_int.in_dll(library, "blocks_outputs").value
    if any(one.shape[0] % outputs for one in parts[:-1]):
        return None
    panels = [_in_panels(one, outputs) for one in parts]
    ends = torch.tensor([len(some) for some in panels]).cumsum(0).tolist()
    places = [(some.data_ptr(), one.type, end) for one, some, end in zip(parts, panels, ends, strict=True)]
    shape = torch.Size((sum(one.shape[0] for one in parts), parts[0].inputs))
    return CompiledProduct(library, WeightKind.BLOCKS, shape, torch.tensor(places), None, bias, parts=panels)


def _in_panels(weight: BlockWeight, outputs: int) -> Tensor:
    """Pack a weight for ``kernels/cpu/blocks.c``, in panels of ``outputs`` rows, padded with zeros: uint8 [panels,
    bytes of one]."""
    num_panels = -(-len(weight.raw) // outputs)
    together = max(1, AT_ONCE // max(1, outputs * weight.inputs))
    panels = None
    for first in range(0, num_panels, together):
        rows = weight.rows(slice(first * outputs, (first + together) * outputs))
        made = _some_panels(rows, outputs)
        if panels is None:
            panels = packed_weights.empty((num_panels, made.shape[1]), torch.uint8)
        panels[first : first + len(made)] = made
    return torch.empty((0, 0), dtype=torch.uint8) if panels is None else panels


def _some_panels(weight: BlockWeight, outputs: int) -> Tensor:
    found, bits = unpacked_blocks(weight), weight.type.bits
    groups = found.scales.shape[1]
    below = -len(weight.raw) % outputs

    def arranged(values: Tensor, parts: int = groups) -> Tensor:
        """[rows, …] → uint8 [panels, parts, bytes of a part], of each part's values those of all outputs together."""
        full = F.pad(values.reshape(len(values), parts, -1), (0, 0, 0, 0, 0, below)).unflatten(0, (-1, outputs))
        return full.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)

    pieces = [arranged(_words(found.levels, bits))]
    if bits % 4:
        pieces.append(arranged(_more_bits(found.levels, groups, bits)))
    pieces.append(arranged(found.scales))
    if found.offsets is not None:
        pieces.append(arranged(found.offsets))
    panels = torch.cat(pieces, dim=2)
    if found.factors is None:
        return panels.flatten(1)
    supers = weight.inputs // SUPER
    factors = arranged(found.factors, supers)
    return torch.cat((factors, panels.unflatten(1, (supers, -1)).flatten(2)), dim=2).flatten(1)


def _words(levels: Tensor, bits: int) -> Tensor:
    """uint8 [rows, inputs] → int32 [rows, words]: eight numbers' lowest 4 bits each or, of 8 bits, four numbers."""
    if bits < PER_WORD:
        return packed(levels & 15)
    return levels.unflatten(1, (-1, 4, 2)).transpose(2, 3).contiguous().view(torch.int32).flatten(1)


def _more_bits(levels: Tensor, groups: int, bits: int) -> Tensor:
    """uint8 [rows, inputs] → int32 [rows, groups]: the bits from the fifth on, each byte's of every fourth number in
    the order of the kernel's words."""
    fours = (levels >> 4).view(len(levels), groups, -1, 4, 2).transpose(3, 4).flatten(2, 3)
    places = torch.arange(fours.shape[2], dtype=torch.uint8).view(-1, 1) * (bits - 4)
    return (fours << places).sum(dim=2, dtype=torch.uint8).view(torch.int32)
