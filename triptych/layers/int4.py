"""Products with 4-bit weights and activations quantized to int8 dynamically, in blocks of inputs with a scale each: by
the compiled kernel if there is one, else with the weights in fp16."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.float_product import half_product
from triptych.layers.grouped_weight import PER_WORD, GroupedWeight, quantize_with_offsets
from triptych.layers.huge_pages import packed_weights
from triptych.layers.int8 import MAX_INPUTS, SMALLEST
from triptych.layers.products import AT_ONCE, CompiledProduct, Product, WeightKind, Zeros

LARGEST_BLOCK = 64
"""Most inputs of a token that share a scale, as in the kernel."""


class DequantizedProduct:
    """The product without compiled kernels: weights are rounded to fp16 again, and tokens to int8 as in the kernel."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._product = half_product(weight.dequantized(), None)
        self._bias = None if bias is None else bias.float()
        self._block = min(weight.group, LARGEST_BLOCK)

    def __call__(self, activations: Tensor) -> Tensor:
        """Return float32 [T, out] for activations [T, in]."""
        inputs = activations.shape[1]
        blocks = F.pad(activations.float(), (0, -inputs % self._block)).unflatten(1, (-1, self._block))
        highest = blocks.abs().amax(dim=2, keepdim=True).clamp(min=SMALLEST)
        scales = highest / 127 + (highest - highest)  # NaN for an infinity as well
        rounded = (blocks * (127 / highest)).round_().nan_to_num_(0).mul_(scales)
        outputs = self._product(rounded.flatten(1)[:, :inputs].contiguous())
        return outputs if self._bias is None else outputs.add_(self._bias)


def int4_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return ``x W^T + b`` for W [out, in] quantized by ``quantize_with_offsets``. Raises ConfigError as
    ``grouped_product`` does."""
    return grouped_product(quantize_with_offsets(weight), bias)


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
    zeros = Zeros.OFFSETS if weight.offsets is not None else Zeros.MIDDLE if weight.zeros is None else Zeros.OWN
    shape = torch.Size(weight.shape)
    return CompiledProduct(library, WeightKind.INT4, shape, panels, None, bias, group=weight.group, zeros=zeros)


def _in_panels(weight: GroupedWeight, outputs: int) -> Tensor:
    """Pack a weight for ``kernels/cpu/int4.c``, in panels of ``outputs`` rows, padded with zeros.

    Returns uint8 [ceil(out / outputs), groups, bytes of a group]: words, scales and zero points or offsets of the
    group.
    """
    num_outputs, groups = weight.scales.shape
    words = weight.group // PER_WORD
    ends = [4 * words * outputs]
    ends.append(ends[0] + 2 * outputs)
    size = ends[1] + (0 if weight.zeros is None else outputs) + (0 if weight.offsets is None else 2 * outputs)
    panels = packed_weights.empty((-(-num_outputs // outputs), groups, size), torch.uint8)
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
        if rows.offsets is not None:
            some[..., ends[1] :] = arranged(rows.offsets.unsqueeze(2))
    return panels
