"""Rotary position embedding, in one axis or in three (M-RoPE).

M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1) gives every token a temporal, a height and a width position. Each axis
has a section of the rotary frequencies. Qwen3-VL (arXiv:2511.21631) interleaves the axes, T H W T H W … T T, so that
each covers low and high frequencies. The references are ``Qwen2VLRotaryEmbedding`` and ``Qwen3VLTextRotaryEmbedding``
in transformers.
"""

import torch
from torch import Tensor, nn

from triptych.errors import CheckpointError
from triptych.layers.specs import RopeConfig


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
