"""Adapter of Gemma 3 with images: tower, projector, decoder parameters and tensor names, which are as LLaVA's."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, RMSNorm
from triptych.models.base import VISION, ModelConfig
from triptych.models.gemma3.config import PooledConfig, text_config, vision_config
from triptych.models.shared.clip import clip_keys, load_clip, unused
from triptych.models.shared.projector import PROJECTOR, projector_layouts
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer


class PoolingProjector(nn.Module):
    """Normalises means of hidden states and projects them: [T, values] → embeddings [T, hidden size]."""

    def __init__(self, norm: RMSNorm, project: Linear) -> None:
        super().__init__()
        self.norm = norm
        self.project = project

    def forward(self, means: Tensor) -> Tensor:
        output: Tensor = self.project(self.norm(means))
        return output


class PoolingTower(nn.Module):
    """``Encoder`` of images of one size: means of squares of the last hidden states, projected."""

    def __init__(
        self,
        config: PooledConfig,
        transformer: VisionTransformer,
        last_norm: LayerNorm,
        projector: PoolingProjector,
        embedding_width: int,
    ) -> None:
        """``last_norm`` is that of the hidden states."""
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.last_norm = last_norm
        self.projector = projector
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        [states] = self.transformer.states_of(inputs, [self.config.clip.num_layers])
        normed = self.last_norm(states.flatten(0, 1))
        squares = self.config.rows_per_side, self.config.pooled
        rows: Tensor = self.projector(normed.view(len(states), *squares, *squares, -1).mean((2, 4)).flatten(0, 2))
        return list(rows.split([item.grid[0] * self.config.rows for item in inputs]))


class Gemma3(TowerAdapter):
    """``ModelAdapter`` for model type ``gemma3``. Raises CheckpointError for a config that lacks a setting or asks for
    something unsupported."""

    towers = "SiglipVisionModel"
    layouts = projector_layouts()

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, text_config(config), tied=setting(config, "tie_word_embeddings", bool, default=True))
        self.vision = vision_config(config)
        tower_activation(self.vision.clip.activation, "vision_config.hidden_act")  # checks it

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        return unused(self.vision.clip, VISION, self.vision.clip.num_layers)

    def tower_keys(self, all_keys: Iterable[str]) -> dict[str, str]:
        """See ``TowerAdapter``."""
        return clip_keys(super().tower_keys(all_keys), VISION)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        clip = self.vision.clip
        projection = reader.tensor(f"{PROJECTOR}.mm_input_projection_weight", clip.hidden_size, self.embedding_width)
        return PoolingTower(
            self.vision,
            load_clip(reader, clip, VISION, clip.num_layers),
            reader.layer_norm(f"{VISION}.post_layernorm", clip.hidden_size, clip.eps),
            PoolingProjector(
                reader.rms_norm(f"{PROJECTOR}.mm_soft_emb_norm", clip.hidden_size, clip.eps, offset=1.0),
                reader.weights.linear(projection.T.contiguous(), None, reader.device),
            ),
            self.embedding_width,
        )
