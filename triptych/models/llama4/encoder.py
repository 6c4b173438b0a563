"""Adapter of Llama 4: tower, adapter of its features, projector, decoder parameters and tensor names."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.layers.attention.tower import TowerAttention
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.base import VISION, ModelConfig
from triptych.models.llama4.config import EPS, Llama4VisionConfig, text_config, vision_config
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights
from triptych.models.shared.vision_transformer import VisionTransformer, merged

PROJECTOR = "projector"


def rotations(vision: Llama4VisionConfig) -> Tensor:
    """Return cos and sin, float32 [2, states, head dim], of a tile's states; the class embedding is the first.

    Of a head's pairs, the first half rotates by the column, the second by the row, both counted from 1. The class
    embedding isn't rotated.
    """
    size, side = vision.head_dim // 2, vision.clip.side
    frequencies = 1.0 / vision.rope_theta ** (torch.arange(0, size, 2).float() / size)
    numbers = torch.arange(1, side + 1)[:, None] * frequencies  # [patches per side, head dim / 4]
    by_column, by_row = numbers.repeat(side, 1), numbers.repeat_interleave(side, dim=0)
    patches = torch.cat((by_column, by_row), dim=1).repeat(1, 2)
    angles = torch.cat((torch.zeros_like(patches[:1]), patches))
    return torch.stack((angles.cos(), angles.sin()))


class Llama4Tower(nn.Module):
    """``Encoder`` of tiles."""

    def __init__(
        self,
        config: Llama4VisionConfig,
        transformer: VisionTransformer,
        norm: LayerNorm,
        adapter: MLP,
        project: Linear,
        *,
        width: int,
    ) -> None:
        """``width`` is that of an embedding."""
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.norm = norm
        self.adapter = adapter
        self.project = project
        self.embedding_width = width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        [states] = self.transformer.states_of(inputs, [self.config.clip.num_layers])
        patches = states[:, 1:]
        normed = self.norm(patches.reshape(-1, patches.shape[2])).view_as(patches)
        adapted = Activation.GELU(self.adapter(merged(normed, self.config.merge_size)))
        rows: Tensor = self.project(adapted)
        return list(rows.split([item.grid[0] * self.config.rows for item in inputs]))


class Llama4(TowerAdapter):
    """``ModelAdapter`` for model type ``llama4``. Raises CheckpointError for a config that lacks a setting or asks for
    something unsupported."""

    towers = "Llama4VisionModel"
    layouts = (
        WeightPrefixes(
            {VISION: "vision_model.", PROJECTOR: "multi_modal_projector."},
            "language_model.model.",
            "language_model.lm_head.weight",
        ),
    )

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        super().__init__(config, text, tied=setting(text, "tie_word_embeddings", bool, default=False))
        self.vision = vision_config(config)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        clip, inner, width = self.vision.clip, self.vision.adapter_inner, self.vision.adapter_width
        squares = clip.hidden_size * self.vision.merge_size**2
        mlp = f"{VISION}.vision_adapter.mlp"
        return Llama4Tower(
            self.vision,
            _transformer(reader, self.vision),
            reader.layer_norm(f"{VISION}.layernorm_post", clip.hidden_size, EPS),
            reader.mlp([f"{mlp}.fc1", f"{mlp}.fc2"], (squares, inner, width), Activation.GELU, bias=False),
            reader.linear([f"{PROJECTOR}.linear_1"], self.embedding_width, width, bias=False),
            width=self.embedding_width,
        )


def _transformer(reader: TowerWeights, vision: Llama4VisionConfig) -> VisionTransformer:
    """Load the layers. The class embedding, last in the reference, comes first: order doesn't matter to attention."""
    clip, hidden = vision.clip, vision.clip.hidden_size
    positions = reader.parameter(f"{VISION}.positional_embedding_vlm", clip.states, hidden).roll(1, dims=0)
    return VisionTransformer(
        reader.flat_projection(f"{VISION}.patch_embedding.linear", hidden, clip.patch_size),
        reader.parameter(f"{VISION}.class_embedding", hidden),
        positions,
        reader.layer_norm(f"{VISION}.layernorm_pre", hidden, EPS),
        [_layer(reader, vision, f"{VISION}.model.layers.{number}") for number in range(clip.num_layers)],
        rotations=rotations(vision).to(reader.device),
    )


def _layer(reader: TowerWeights, vision: Llama4VisionConfig, name: str) -> TowerLayer:
    hidden, inner, heads = vision.clip.hidden_size, vision.clip.intermediate_size, vision.clip.num_heads
    attention = TowerAttention(
        [reader.paired_attention([f"{name}.self_attn.{kind}_proj" for kind in "qkv"], heads, hidden)],
        reader.linear([f"{name}.self_attn.o_proj"], hidden, hidden),
        heads,
        vision.head_dim**-0.5,
        reader.weights.bf16_attention,
    )
    mlp = reader.mlp([f"{name}.mlp.fc1", f"{name}.mlp.fc2"], (hidden, inner, hidden), Activation.GELU)
    norms = [reader.layer_norm(f"{name}.{kind}_layernorm", hidden, EPS) for kind in ("input", "post_attention")]
    return TowerLayer(norms[0], attention, norms[1], mlp)
