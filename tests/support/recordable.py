"""Encoders whose calls may be recorded, and inputs for them."""

import math
from typing import Any

from torch import nn

from tests.support.forward import random_input
from triptych.layers.encoder import Encoder
from triptych.models.base import EncoderInput
from triptych.models.shared.encoder import MultiTowerEncoder
from triptych.models.shared.grid_tower import GridTower
from triptych.models.shared.vision_transformer import VisionTransformer

RECORDABLE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v", "qwen2_5_omni", "qwen3_omni_moe"),
    *("llava", "llava_next", "llava_onevision", "internvl", "gemma3", "llama4", "smolvlm", "idefics3", "cogvlm2"),
)
"""Tiny checkpoints."""
GRIDS = [(1, 4, 6), (1, 2, 2), (2, 8, 4), (1, 4, 6)]
"""For towers that take any."""


def recordable_inputs(encoder: Encoder, seed: int) -> list[EncoderInput]:
    """Return random inputs for an encoder on the CPU, of the same shapes whatever the seed."""
    tower: Any = encoder.towers["vision"] if isinstance(encoder, MultiTowerEncoder) else encoder
    projection: Any
    if isinstance(tower, GridTower):
        projection, grids = tower.patches, GRIDS
    else:
        assert isinstance(tower, nn.Module)
        transformer: Any
        [transformer] = [one for one in tower.modules() if isinstance(one, VisionTransformer)]
        side, projection = math.isqrt(transformer.num_patches), transformer.projection
        grids = [(tiles, side, side) for tiles in (1, 2)]
    return [random_input(grid, 10 * seed + number, projection.product.inputs) for number, grid in enumerate(grids)]
