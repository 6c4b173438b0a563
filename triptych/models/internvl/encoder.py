"""Adapter of InternVL: tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``vision_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``. Files of transformers 4.52 to 4.57 are named as the modules:
``model.vision_tower.…``, ``model.language_model.…``. The original files (``internvl_chat``) have ``vision_model.…``,
``mlp1.…`` and ``language_model.…``, and other names within the tower: ``ORIGINAL``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych.layers.attention.tower import TowerAttention
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.base import VISION, ModelConfig
from triptych.models.internvl.config import TileTowerConfig, text_config, unified, vision_config
from triptych.models.shared.projector import PROJECTOR, projector_layouts
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer, merged

PROJECTOR_EPS = 1e-5
HEADS_EPS = 1e-6
"""Not in the config: as in transformers."""


@dataclass(frozen=True)
class TowerNames:
    """What a checkpoint calls the tensors of the tower and of the projector."""

    class_embedding: str
    positions: str
    patches: str
    layers: str
    norms: tuple[str, str]
    scales: tuple[str, str]
    qkv: tuple[str, ...]
    """Separate or fused."""
    heads_norms: tuple[str, str]
    output: str
    projector: tuple[str, str, str]
    """The norm and the two products."""


TRANSFORMERS = TowerNames(
    class_embedding="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    patches="embeddings.patch_embeddings.projection",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    scales=("lambda_1", "lambda_2"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    heads_norms=("attention.q_norm", "attention.k_norm"),
    output="attention.projection_layer",
    projector=("layer_norm", "linear_1", "linear_2"),
)
ORIGINAL = TowerNames(
    class_embedding="embeddings.class_embedding",
    positions="embeddings.position_embedding",
    patches="embeddings.patch_embedding",
    layers="encoder.layers",
    norms=("norm1", "norm2"),
    scales=("ls1", "ls2"),
    qkv=("attn.qkv",),
    heads_norms=("attn.q_norm", "attn.k_norm"),
    output="attn.proj",
    projector=("0", "1", "3"),
)


class NormedProjector(nn.Module):
    """``mlp(norm(features))``: features [T, values] → embeddings [T, hidden size]."""

    def __init__(self, norm: LayerNorm, mlp: MLP) -> None:
        super().__init__()
        self.norm = norm
        self.mlp = mlp

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.mlp(self.norm(features))
        return output


class InternVLTower(nn.Module):
    """``Encoder`` of tiles."""

    def __init__(
        self, config: TileTowerConfig, transformer: VisionTransformer, projector: NormedProjector, embedding_width: int
    ) -> None:
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.projector = projector
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        [states] = self.transformer.states_of(inputs, [self.config.features_of])
        rows: Tensor = self.projector(merged(states[:, 1:], self.config.merge_size))
        if self.config.by_columns:
            side = self.config.side // self.config.merge_size
            rows = rows.view(-1, side, side, self.embedding_width).transpose(1, 2).flatten(0, 2)
        return list(rows.split(self.config.rows))


class InternVL(TowerAdapter):
    """``ModelAdapter`` for model type ``internvl``. Raises CheckpointError for a config that lacks a setting or asks
    for something unsupported."""

    towers = "InternVLVisionModel and projector"
    layouts: Sequence[WeightPrefixes] = projector_layouts()
    names = TRANSFORMERS

    def __init__(self, config: ModelConfig) -> None:
        config = unified(config)
        super().__init__(config, text_config(config), tied=setting(config, "tie_word_embeddings", bool, default=True))
        self.vision = vision_config(config)
        self._tower_activation = tower_activation(self.vision.activation, "vision_config.hidden_act")
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        unused = range(self.vision.features_of, self.vision.num_layers)
        return [*(f"{VISION}.{self.names.layers}.{number}." for number in unused), f"{VISION}.embeddings.mask_token"]

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower's used layers and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        transformer = self._transformer(reader, self.vision.features_of)
        return InternVLTower(self.vision, transformer, self._projector(reader), self.embedding_width)

    def _transformer(self, reader: TowerWeights, depth: int) -> VisionTransformer:
        vision, hidden, names = self.vision, self.vision.hidden_size, self.names
        return VisionTransformer(
            reader.patch_projection(f"{VISION}.{names.patches}", hidden, vision.patch_size, bias=True),
            reader.parameter(f"{VISION}.{names.class_embedding}", 1, 1, hidden)[0, 0],
            reader.parameter(f"{VISION}.{names.positions}", 1, vision.side**2 + 1, hidden)[0],
            None,
            [self._layer(reader, f"{VISION}.{names.layers}.{number}") for number in range(depth)],
        )

    def _layer(self, reader: TowerWeights, layer: str) -> TowerLayer:
        vision, names = self.vision, self.names
        hidden, inner = vision.hidden_size, vision.intermediate_size
        fused = 3 // len(names.qkv)
        qkv = [f"{layer}.{name}" for name in names.qkv]
        heads_norms = [f"{layer}.{name}" for name in names.heads_norms] if vision.normalises_heads else []
        attention = TowerAttention(
            [reader.linear(qkv, fused * hidden, hidden, vision.attention_bias)],
            reader.scaled_linear(f"{layer}.{names.output}", f"{layer}.{names.scales[0]}", hidden, hidden),
            vision.num_heads,
            (hidden // vision.num_heads) ** -0.5,
            reader.weights.bf16_attention,
            norms=[reader.rms_norm(name, hidden, HEADS_EPS) for name in heads_norms],
        )
        mlp = MLP(
            reader.linear([f"{layer}.mlp.fc1"], inner, hidden),
            self._tower_activation,
            reader.scaled_linear(f"{layer}.mlp.fc2", f"{layer}.{names.scales[1]}", hidden, inner),
        )
        load_norm = reader.rms_norm if vision.has_rms_norms else reader.layer_norm
        before, after = (load_norm(f"{layer}.{name}", hidden, vision.eps) for name in names.norms)
        return TowerLayer(before, attention, after, mlp)

    def _projector(self, reader: TowerWeights) -> NormedProjector:
        width, values = self.embedding_width, self.vision.hidden_size * self.vision.merge_size**2
        norm, first, second = (f"{PROJECTOR}.{name}" for name in self.names.projector)
        return NormedProjector(
            reader.layer_norm(norm, values, PROJECTOR_EPS),
            MLP(
                reader.linear([first], width, values), self._projector_activation, reader.linear([second], width, width)
            ),
        )


class InternVLChat(InternVL):
    """``ModelAdapter`` for model type ``internvl_chat``, the original files. Raises as ``InternVL`` does."""

    names = ORIGINAL

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        head = f"language_model.{self.decoder_config.names.head}"
        towers = {VISION: "vision_model.", PROJECTOR: "mlp1."}
        self.layouts = (WeightPrefixes(towers, "language_model.model.", head),)
