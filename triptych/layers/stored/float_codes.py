"""Weights of 4-bit floating point, whose codes stand in bytes."""

import torch
from torch import Tensor

from triptych.layers.stored.fp4 import LEVELS
from triptych.layers.stored.linears import ScaledWeight


def coded_weight(codes: Tensor, scales: Tensor, group: int) -> ScaledWeight:
    """Return the weight [out, in] of ``codes``, uint8 [out, in / 2], the first of two inputs in the lower bits, whose
    groups of inputs have ``scales``, float32 [out, groups]."""
    values = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    columns = torch.arange(values.shape[1]) // group
    levels = torch.tensor(LEVELS, device=codes.device)
    return ScaledWeight(values, scales, None, torch.arange(len(values)), columns, levels)


def powers(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in float32 for uint8 e, or for 8-bit floats that are stored like that; 255 is NaN."""
    return exponents.view(torch.float8_e8m0fnu).float()
