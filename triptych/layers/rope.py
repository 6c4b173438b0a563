"""Rotary position embedding (arXiv:2104.09864), in one axis or in three (M-RoPE), with scaled frequencies.

M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1) gives every token a temporal, a height and a width position. Each axis
has a section of the rotary frequencies. Qwen3-VL (arXiv:2511.21631) interleaves the axes, T H W T H W … T T, so that
each covers low and high frequencies. The references are ``ROPE_INIT_FUNCTIONS``, ``Qwen2VLRotaryEmbedding`` and
``Qwen3VLTextRotaryEmbedding`` in transformers.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import CheckpointError
from triptych.layers.rope_config import (
    LENGTH_AXIS,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)


class Rope(nn.Module):
    """Computes rotary angles for heads of ``head_dim`` values, in the order of ``RopeConfig.order``; values that aren't
    rotated have angle 0. Raises CheckpointError unless the sections of ``rope`` add up to its frequencies."""

    inverse_frequencies: Tensor  # float32 [head_dim / 2]
    long_frequencies: Tensor | None  # float32 [head_dim / 2]: of long requests; None if their length doesn't matter
    axes: Tensor  # int64 [head_dim / 2]: the axis of each frequency
    factors: Tensor | None  # float32 [head_dim]: of cosines and sines; None if all are 1
    exponents: Tensor | None  # float64 [head_dim / 2]: of the divisors of dynamic frequencies; None if they are fixed

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device) -> None:
        super().__init__()
        frequencies, factor = inverse_frequencies(head_dim, rope)
        count, half = len(frequencies), head_dim // 2
        factors = None if factor == 1 else F.pad(torch.full((count,), factor), (0, half - count), value=1.0)
        padded, axes = (F.pad(one, (0, half - count)) for one in (frequencies, _axes(count, rope)))
        long = _long_frequencies(head_dim, rope)
        self.register_buffer("inverse_frequencies", padded.to(device), persistent=False)
        self.register_buffer(
            "long_frequencies", None if long is None else F.pad(long, (0, half - count)).to(device), persistent=False
        )
        self.register_buffer("axes", axes.to(device), persistent=False)
        self.register_buffer("factors", None if factors is None else factors.repeat(2).to(device), persistent=False)
        self._dynamic = rope.scaling if isinstance(rope.scaling, DynamicScaling) else None
        exponents = None if self._dynamic is None else F.pad(_dynamic_exponents(count), (0, half - count)).to(device)
        self.register_buffer("exponents", exponents, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [T, 1, head_dim], in ``dtype``, for positions [3, T]."""
        per_frequency = positions[self.axes].T.float()  # [T, head_dim / 2]
        frequencies = self.inverse_frequencies
        if self.long_frequencies is not None:
            frequencies = torch.where(positions[LENGTH_AXIS, :, None] > 0, self.long_frequencies, frequencies)
        if self._dynamic is not None and self.exponents is not None:
            lengths = positions[LENGTH_AXIS, :, None] / self._dynamic.original_length
            growth = (1 + self._dynamic.factor * (lengths - 1)).clamp(min=1)  # 1 for short requests
            frequencies = (frequencies / growth**self.exponents).float()  # [T, head_dim / 2]
        angles = per_frequency * frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [T, 1, head_dim]
        cos, sin = angles.cos(), angles.sin()
        if self.factors is not None:
            cos, sin = cos * self.factors, sin * self.factors
        return cos.to(dtype), sin.to(dtype)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> tuple[Tensor, float]:
    """Return the angles per position, float32 [frequencies], and the factor of cosines and sines; of short requests,
    if they depend on the length. Raises CheckpointError for a head that the frequencies don't fit."""
    count, scaling = rope.num_frequencies(head_dim), rope.scaling
    size = head_dim if isinstance(scaling, ProportionalScaling) else 2 * count
    powers = rope.theta ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / size)
    match scaling:
        case None | DynamicScaling():
            return 1.0 / powers, 1.0
        case LinearScaling() | ProportionalScaling():
            return 1.0 / powers / scaling.factor, 1.0
        case Llama3Scaling():
            return _llama3(1.0 / powers, scaling), 1.0
        case YarnScaling():
            return _yarn(powers, rope.theta, scaling), scaling.attention_factor
        case LongRopeScaling():
            return _divided(powers, scaling.short_factors), scaling.attention_factor


def _long_frequencies(head_dim: int, rope: RopeConfig) -> Tensor | None:
    """Return ``inverse_frequencies`` of long requests; None if they are the same. Raises the same."""
    if not isinstance(rope.scaling, LongRopeScaling):
        return None
    # the same powers, with other factors
    exchanged = replace(rope.scaling, short_factors=rope.scaling.long_factors)
    return inverse_frequencies(head_dim, replace(rope, scaling=exchanged))[0]


def _dynamic_exponents(count: int) -> Tensor:
    """Return the exponents, float64 [count], of the divisors of ``count`` frequencies: i / (count - 1), since the base
    grows by the power count / (count - 1). Raises CheckpointError for fewer than 2 frequencies."""
    if count < 2:
        raise CheckpointError(f"config.json: rope type 'dynamic' needs heads that rotate 4 values, not {2 * count}")
    return torch.arange(count, dtype=torch.float64) / (count - 1)


def _divided(powers: Tensor, factors: tuple[float, ...]) -> Tensor:
    if len(factors) != len(powers):
        raise CheckpointError(f"config.json: {len(factors)} rope factors for {len(powers)} frequencies of a head")
    return 1.0 / (torch.tensor(factors) * powers)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_length / (2 * math.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (turns >= low).float() if low == high else ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(powers: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    size = 2 * len(powers)

    def index_at(turns: float) -> float:
        """Return the index of the frequency with this number of turns in the original length."""
        return size * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_at(scaling.beta_fast), index_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))  # integers may have more bits than tensors take
    low, high = max(low, 0.0), min(high, size - 1.0)
    high += 0.001 if low == high else 0
    is_low = ((torch.arange(len(powers), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * is_low + 1.0 / powers * (1 - is_low)


def _axes(count: int, rope: RopeConfig) -> Tensor:
    """Return the axis of each of ``count`` frequencies, int64."""
    section = rope.mrope_section
    axes = torch.zeros(count, dtype=torch.int64)
    if section is None:
        return axes
    if sum(section) != count:
        raise CheckpointError(
            f"config.json: mrope_section {section} adds up to {sum(section)}, but {count} frequencies rotate a head"
        )
    if not rope.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(section))
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes
