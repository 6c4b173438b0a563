"""Adapter of Idefics3 and SmolVLM: tower, projector, decoder parameters and tensor names."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear
from triptych.models.base import VISION, ModelConfig
from triptych.models.idefics3.config import ShuffledConfig, text_config, vision_config
from triptych.models.shared.clip import load_clip
from triptych.models.shared.settings import setting
from triptych.models.shared.shares import places
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer, merged

PROJECTOR = "projector"


class Idefics3Tower(nn.Module):
    """``Encoder`` of tiles."""

    def __init__(
        self, config: ShuffledConfig, transformer: VisionTransformer, norm: LayerNorm, project: Linear, width: int
    ) -> None:
        """``width`` is that of an embedding."""
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.norm = norm
        self.project = project
        self.embedding_width = width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        [states] = self.transformer.states_of(inputs, [self.config.clip.num_layers])
        normed = self.norm(states.flatten(0, 1)).view_as(states)
        rows: Tensor = self.project(merged(normed, self.config.merge_size))
        return list(rows.split([item.grid[0] * self.config.rows for item in inputs]))


class Idefics3(TowerAdapter):
    """``ModelAdapter`` for model types ``idefics3`` and ``smolvlm``. Raises CheckpointError for a config that lacks a
    setting or asks for something unsupported."""

    towers = "Idefics3VisionTransformer"
    layouts = (
        WeightPrefixes(
            {VISION: "model.vision_model.", PROJECTOR: "model.connector.modality_projection."}, "model.text_model."
        ),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, text_config(config), tied=setting(config, "tie_word_embeddings", bool, default=False))
        self.vision = vision_config(config)
        tower_activation(self.vision.clip.activation, "vision_config.hidden_act")  # checks it

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        clip, width = self.vision.clip, self.embedding_width
        return Idefics3Tower(
            self.vision,
            load_clip(reader, clip, VISION, clip.num_layers, places(clip.side)),
            reader.layer_norm(f"{VISION}.post_layernorm", clip.hidden_size, clip.eps),
            reader.linear([f"{PROJECTOR}.proj"], width, clip.hidden_size * self.vision.merge_size**2, bias=False),
            width,
        )
