"""Adapter of DeepSeek-OCR and DeepSeek-OCR-2: towers, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, have the same names.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.errors import PlanMismatch
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import Linear, frozen
from triptych.layers.pinned import to_device
from triptych.layers.tower_layer import TowerLayer
from triptych.models.base import ModelConfig
from triptych.models.deepseek_ocr.config import DOWNSAMPLED, QUERY_TABLES, OcrConfig, ocr_config, text_config
from triptych.models.deepseek_ocr.queries import QueryEncoder, load_queries
from triptych.models.deepseek_ocr.sam import Sam, load_sam, resized_table
from triptych.models.deepseek_ocr.views import OcrView
from triptych.models.shared.clip import clip_layer
from triptych.models.shared.clip_config import ClipConfig
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer

SAM, CLIP, QUERIES, PROJECTOR, NEWLINE, SEPARATOR = "sam", "clip", "queries", "projector", "newline", "separator"
MAX_PATCHES = 4096
"""Patches of the views that go through the towers together, unless one has more. Bounds the memory for activations."""


class ClipOnFeatures(nn.Module):
    """CLIP's layers over another tower's features, of images of several sizes."""

    def __init__(self, transformer: VisionTransformer) -> None:
        """Its positions are interpolated for images of another size than its own."""
        super().__init__()
        self.transformer = transformer
        self._resized: dict[int, VisionTransformer] = {}

    def forward(self, features: Tensor) -> Tensor:
        """Return the features [images, features, 2 * channels] of ``features`` [images, features, channels]: CLIP's and
        these themselves, side by side."""
        transformer = self._for(round(features.shape[1] ** 0.5))
        [states] = transformer(features.flatten(0, 1), [len(transformer.layers)])
        return torch.cat((states[:, 1:], features), dim=-1)

    def _for(self, side: int) -> VisionTransformer:
        whole, own = self.transformer, round(self.transformer.num_patches**0.5)
        if side not in self._resized:
            table = resized_table(whole.positions[1:].unflatten(0, (own, own)), side).flatten(0, 1)
            positions = torch.cat((whole.positions[:1], table))
            layers = [layer for layer in whole.layers if isinstance(layer, TowerLayer)]
            self._resized[side] = VisionTransformer(
                nn.Identity(), whole.class_embedding, positions, whole.first_norm, layers
            )
        return self._resized[side]


class OcrTower(nn.Module):
    """``Encoder`` of views: both towers, the projector, and the rows between embeddings."""

    def __init__(
        self,
        sam: Sam,
        second: ClipOnFeatures | QueryEncoder,
        project: Linear,
        separator: Tensor,
        newline: Tensor | None,
    ) -> None:
        """``separator`` and ``newline`` [embedding width] end an image and, if it has lines, each of these."""
        super().__init__()
        self.sam = sam
        self.second = second
        self.project = project
        self.separator = frozen(separator)
        self.newline = None if newline is None else frozen(newline)
        self.embedding_width = len(separator)

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        found: dict[int, Tensor] = {}
        for side in {item.grid[1] for item in inputs}:
            numbers = [number for number, item in enumerate(inputs) if item.grid[1] == side]
            count = max(MAX_PATCHES // side**2, 1)
            for first in range(0, len(numbers), count):
                some = numbers[first : first + count]
                found |= dict(zip(some, self._encoded([inputs[number] for number in some], side), strict=True))
        return [self._arranged(found[number], item.layout) for number, item in enumerate(inputs)]

    def _encoded(self, inputs: Sequence[PreprocessedPart], side: int) -> Tensor:
        """Return the embeddings [views, features, width] of views of ``side`` patches per side."""
        for item in inputs:
            if item.grid != (1, side, side) or len(item.patches) != side**2 or side % DOWNSAMPLED:
                raise PlanMismatch(f"{len(item.patches)} patches of a grid of {item.grid} aren't a square view")
        if isinstance(self.second, QueryEncoder) and (side // DOWNSAMPLED) ** 2 not in self.second.queries:
            raise PlanMismatch(f"the model has no queries for a view of {side} by {side} patches")
        device = self.separator.device
        [patches] = to_device([torch.cat([torch.from_numpy(item.patches) for item in inputs])], device)
        features = self.second(self.sam(patches.to(self.separator.dtype), side))
        embeddings: Tensor = self.project(features.flatten(0, 1))
        return embeddings.unflatten(0, (len(inputs), -1))

    def _arranged(self, embeddings: Tensor, layout: tuple[int, ...]) -> Tensor:
        """Return the rows [rows, width] of a view's ``embeddings`` [features, width]."""
        view = OcrView(layout[0]) if layout else OcrView.TILE
        if self.newline is not None and view != OcrView.TILE:
            side = round(len(embeddings) ** 0.5)
            lines = embeddings.unflatten(0, (side, side))
            embeddings = torch.cat((lines, self.newline.expand(side, 1, -1)), dim=1).flatten(0, 1)
        return torch.cat((embeddings, self.separator[None])) if view == OcrView.WHOLE else embeddings


class DeepseekOcr(TowerAdapter):
    """``ModelAdapter`` for model types ``deepseek_vl_v2`` and ``deepseek_ocr2``. Raises CheckpointError for a config
    that lacks a setting or asks for something unsupported."""

    towers = "SAM, then CLIP or Qwen2 with queries"
    layouts = (
        WeightPrefixes(
            {
                SAM: "model.sam_model.",
                CLIP: "model.vision_model.",
                QUERIES: "model.qwen2_model.",
                PROJECTOR: "model.projector.",
                NEWLINE: "model.image_newline",
                SEPARATOR: "model.view_seperator",
            },
            "model.",
        ),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, text_config(config), tied=setting(config, "tie_word_embeddings", bool, default=False))
        self.ocr = ocr_config(config)
        if isinstance(self.ocr.second, ClipConfig):
            tower_activation(self.ocr.second.activation, "vision_config.encoder_config.hidden_act")  # checks it

    @property
    def unread(self) -> Sequence[str]:
        """CLIP's own patches and, in DeepSeek-OCR-2, what DeepSeek-OCR or a language model would have."""
        clip = [f"{CLIP}.embeddings.patch_embedding.", f"{CLIP}.embeddings.position_ids", f"{CLIP}.post_layernorm."]
        return [*clip, f"{QUERIES}.model.model.embed_tokens.", NEWLINE]

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the towers and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        width, ocr = self.embedding_width, self.ocr
        values = ocr.second.hidden_size * (2 if ocr.is_first else 1)
        return OcrTower(
            load_sam(reader, ocr.sam, SAM),
            self._second(reader, ocr),
            reader.linear([f"{PROJECTOR}.layers"], width, values),
            reader.parameter(f"{SEPARATOR}.", width),
            reader.parameter(f"{NEWLINE}.", width) if ocr.is_first else None,
        )

    @staticmethod
    def _second(reader: TowerWeights, ocr: OcrConfig) -> ClipOnFeatures | QueryEncoder:
        clip = ocr.second
        if not isinstance(clip, ClipConfig):
            return load_queries(reader, clip, QUERIES, QUERY_TABLES)
        layers = [
            clip_layer(reader, clip, f"{CLIP}.transformer.layers.{number}", ["qkv_proj"])
            for number in range(clip.num_layers)
        ]
        transformer = VisionTransformer(
            nn.Identity(),
            reader.parameter(f"{CLIP}.embeddings.class_embedding", clip.hidden_size),
            reader.parameter(f"{CLIP}.embeddings.position_embedding.weight", clip.states, clip.hidden_size),
            reader.layer_norm(f"{CLIP}.pre_layrnorm", clip.hidden_size, clip.eps),
            layers,
        )
        return ClipOnFeatures(transformer)
