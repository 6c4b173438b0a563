"""Rotary position embedding, in one axis or in three (M-RoPE).

M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1) gives every token a temporal, a height and a width position. Each axis
has a section of the rotary frequencies. Qwen3-VL (arXiv:2511.21631) interleaves the axes, T H W T H W … T T, so that
each covers low and high frequencies. The references are ``Qwen2VLRotaryEmbedding`` and ``Qwen3VLTextRotaryEmbedding``
in transformers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import RopeConfig


def parse_rope_config(text_config: Mapping[str, Any], default: RopeConfig) -> RopeConfig:
    """Return the rotary settings of a text config.

    Reads either spelling: ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta`` (published
    files). ``default`` provides omitted values, and decides whether there are three axes and in which order. Raises
    CheckpointError for a rope type other than ``default`` (``mrope`` in older files), for axes in the other order, and
    for values of the wrong type.
    """
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"config.json: the rope settings must be an object, not {rope!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default" and (rope_type != "mrope" or default.mrope_section is None):
        raise CheckpointError(f"config.json: rope type {rope_type!r} is not served; only 'default' is")
    theta = rope.get("rope_theta", text_config.get("rope_theta", default.theta))
    if not isinstance(theta, int | float):
        raise CheckpointError(f"config.json: rope_theta must be a number, not {theta!r}")
    if default.mrope_section is None:
        return RopeConfig(float(theta))
    if rope.get("mrope_interleaved", default.interleaved) != default.interleaved:
        order = "interleaved" if default.interleaved else "not interleaved"
        raise CheckpointError(f"config.json: mrope_interleaved: only M-RoPE that is {order} is served for this model")
    match rope.get("mrope_section", default.mrope_section):
        case [int(temporal), int(height), int(width)] if min(temporal, height, width) > 0:
            return RopeConfig(float(theta), (temporal, height, width), default.interleaved)
        case section:
            raise CheckpointError(f"config.json: mrope_section must be three positive counts, not {section!r}")


class Rope(nn.Module):
    """Computes rotary angles for heads of ``head_dim`` values. Raises CheckpointError unless the sections of ``rope``
    add up to half of ``head_dim``."""

    inverse_frequencies: Tensor  # float32 [head_dim / 2]
    axes: Tensor  # int64 [head_dim / 2]: the axis of each frequency

    def __init__(self, head_dim: int, rope: RopeConfig, device: torch.device) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequencies", (1.0 / rope.theta**exponents).to(device), persistent=False)
        self.register_buffer("axes", _axes(head_dim, rope).to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [T, 1, head_dim], in ``dtype``, for positions [3, T]."""
        per_frequency = positions[self.axes].T.float()  # [T, head_dim / 2]
        angles = per_frequency * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [T, 1, head_dim]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _axes(head_dim: int, rope: RopeConfig) -> Tensor:
    """Return the axis of each frequency, int64 [head_dim / 2]."""
    section = rope.mrope_section
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    if section is None:
        return axes
    if sum(section) != head_dim // 2:
        raise CheckpointError(
            f"config.json: mrope_section {section} adds up to {sum(section)}, "
            f"but head_dim {head_dim} has {head_dim // 2} frequencies"
        )
    if not rope.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(section))
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes
