"""Adapter of CogVLM2: tower, projector, decoder parameters and tensor names.

They follow the published ``modeling_cogvlm.py`` and, for the tower, descriptions and ports of the published code.
Transformers has no class for it, so there are no files of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import PostNormLayer
from triptych.models.base import VISION, ModelConfig
from triptych.models.cogvlm2.config import EvaConfig, eva_config
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights
from triptych.models.shared.vision_transformer import VisionTransformer, merged

MERGE = 2
"""Patches per side of the squares that the convolution takes."""
PROJECTOR_EPS = 1e-5
"""PyTorch's default."""


class GluProjector(nn.Module):
    """Projects patches, activates them, and transforms them by a gated MLP: [T, values] → [T, hidden size]."""

    def __init__(self, project: Linear, norm: LayerNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.project = project
        self.norm = norm
        self.mlp = mlp

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.mlp(Activation.GELU(self.norm(self.project(features))))
        return output


class EvaTower(nn.Module):
    """``Encoder`` of images of one size: between a row that begins an image and one that ends it, a row for each square
    of patches."""

    def __init__(
        self, transformer: VisionTransformer, convolution: Linear, projector: GluProjector, begin: Tensor, end: Tensor
    ) -> None:
        """``convolution`` takes the states of a square's patches side by side; ``begin`` and ``end`` [1, hidden]."""
        super().__init__()
        self.transformer = transformer
        self.convolution = convolution
        self.projector = projector
        self.begin, self.end = frozen(begin), frozen(end)
        self.embedding_width = begin.shape[1]

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        [states] = self.transformer.states_of(inputs, [len(self.transformer.layers)])
        rows = self.projector(self.convolution(merged(states[:, 1:], MERGE))).unflatten(0, (len(states), -1))
        images = [torch.cat((self.begin, image, self.end)) for image in rows]
        counts = iter(images)
        return [torch.cat([next(counts) for _ in range(item.grid[0])]) for item in inputs]


class CogVLM2(TowerAdapter):
    """``ModelAdapter`` for model type ``cogvlm2``. Raises CheckpointError for a config that lacks a setting or asks for
    something unsupported."""

    towers = "EVA2-CLIP"
    layouts = (WeightPrefixes({VISION: "model.vision."}, "model."),)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config, tied=setting(config, "tie_word_embeddings", bool, default=False))
        self.vision = eva_config(config)
        self._intermediate_size = setting(config, "intermediate_size", int)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        hidden, width, inner = self.vision.hidden_size, self.embedding_width, self._intermediate_size
        kernel = reader.tensor(f"{VISION}.conv.weight", hidden, hidden, MERGE, MERGE).permute(0, 2, 3, 1).flatten(1)
        glu = f"{VISION}.linear_proj"
        return EvaTower(
            load_eva(reader, self.vision, VISION),
            reader.weights.linear(kernel, reader.tensor(f"{VISION}.conv.bias", hidden), reader.device),
            GluProjector(
                reader.linear([f"{glu}.linear_proj"], width, hidden, bias=False),
                reader.layer_norm(f"{glu}.norm1", width, PROJECTOR_EPS),
                GatedMLP(
                    reader.linear([f"{glu}.gate_proj", f"{glu}.dense_h_to_4h"], inner, width, bias=False),
                    reader.linear([f"{glu}.dense_4h_to_h"], width, inner, bias=False),
                ),
            ),
            reader.parameter(f"{VISION}.boi", 1, 1, width)[0],
            reader.parameter(f"{VISION}.eoi", 1, 1, width)[0],
        )


def load_eva(reader: TowerWeights, vision: EvaConfig, tower: str) -> VisionTransformer:
    """Load the tower's layers. Raises CheckpointError as ``TowerWeights`` does."""
    embedding, hidden = f"{tower}.patch_embedding", vision.hidden_size
    return VisionTransformer(
        reader.patch_projection(f"{embedding}.proj", hidden, vision.patch_size, bias=True),
        reader.parameter(f"{embedding}.cls_embedding", 1, hidden)[0],
        reader.parameter(f"{embedding}.position_embedding.weight", vision.side**2 + 1, hidden),
        None,
        [_layer(reader, vision, f"{tower}.transformer.layers.{number}") for number in range(vision.num_layers)],
    )


def _layer(reader: TowerWeights, vision: EvaConfig, name: str) -> PostNormLayer:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    qkv, dense = f"{name}.attention.query_key_value", f"{name}.attention.dense"
    attention = reader.attention([qkv], dense, hidden, vision.num_heads, (True, True))
    mlp = reader.mlp([f"{name}.mlp.fc1", f"{name}.mlp.fc2"], (hidden, inner, hidden), Activation.GELU)
    norms = [reader.layer_norm(f"{name}.{kind}_layernorm", hidden, vision.eps) for kind in ("input", "post_attention")]
    return PostNormLayer(attention, norms[0], mlp, norms[1])
