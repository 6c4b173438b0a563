"""Rotary position embedding in three axes (M-RoPE), interleaved.

M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1) gives every token a temporal, a height and a width position and shares
the rotary frequencies out among the three. Qwen3-VL (arXiv:2511.21631) interleaves the axes, T H W T H W … T T, so that
each covers low and high frequencies. The reference is ``Qwen3VLTextRotaryEmbedding`` in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triptych.errors import CheckpointError

DEFAULT_THETA = 500_000.0
DEFAULT_MROPE_SECTION = (24, 20, 20)


@dataclass(frozen=True)
class RopeSettings:
    """What a text config says of its rotary embedding."""

    theta: float
    mrope_section: tuple[int, int, int]


def rope_settings(text_config: Mapping[str, Any]) -> RopeSettings:
    """The rotary settings of a text config, in either spelling: ``rope_parameters`` (transformers 5), or
    ``rope_scaling`` and ``rope_theta`` (the published files). Defaults are transformers'.

    Raises CheckpointError for a rope type other than ``default``, for axes that aren't interleaved, and for values
    of the wrong kind.
    """
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: the rope settings must be an object, not {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise CheckpointError(f"config.json: rope type {rope_type!r} is not served; only 'default' is")
    if not rope.get("mrope_interleaved", True):
        raise CheckpointError("config.json: mrope_interleaved is false; only interleaved M-RoPE is served")
    theta = rope.get("rope_theta", text_config.get("rope_theta", DEFAULT_THETA))
    if not isinstance(theta, int | float):
        raise CheckpointError(f"config.json: rope_theta must be a number, not {theta!r}")
    match rope.get("mrope_section", DEFAULT_MROPE_SECTION):
        case [int(temporal), int(height), int(width)] if min(temporal, height, width) > 0:
            return RopeSettings(float(theta), (temporal, height, width))
        case section:
            raise CheckpointError(f"config.json: mrope_section must be three positive counts, not {section!r}")


class InterleavedMRope(nn.Module):
    """Angles of interleaved M-RoPE for heads of ``head_dim`` values.

    Raises CheckpointError unless the sections add up to half of ``head_dim``.
    """

    inverse_frequencies: Tensor  # float32 [head_dim / 2]
    axes: Tensor  # int64 [head_dim / 2]: which of the three positions turns each frequency

    def __init__(self, head_dim: int, theta: float, mrope_section: tuple[int, int, int], device: torch.device) -> None:
        super().__init__()
        if sum(mrope_section) != head_dim // 2:
            raise CheckpointError(
                f"config.json: mrope_section {mrope_section} adds up to {sum(mrope_section)}, "
                f"but head_dim {head_dim} has {head_dim // 2} frequencies"
            )
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        axes = torch.zeros(head_dim // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * mrope_section[axis] : 3] = axis
        self.register_buffer("inverse_frequencies", (1.0 / theta**exponents).to(device), persistent=False)
        self.register_buffer("axes", axes.to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, 1, head_dim], in ``dtype``, for int64 positions [3, T]."""
        per_frequency = positions[self.axes].T.float()  # [T, head_dim / 2]
        angles = per_frequency * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [T, 1, head_dim]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``heads`` [T, heads, head_dim] turned by the angles whose ``cos`` and ``sin`` [T, 1, head_dim] are given.

    The pairs that turn together are values i and i + head_dim / 2 (the "rotate half" convention of GPT-NeoX).
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
