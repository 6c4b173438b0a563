"""Adapter of LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``vision_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``; the former have ``vision_model.`` within the tower's names. Files
of transformers 4.52 to 4.57 are named as the modules: ``model.vision_tower.…``, ``model.language_model.…``.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from triptych.errors import PlanMismatch
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import frozen
from triptych.models.base import VISION, ModelConfig
from triptych.models.llava.anyres import Layout, layout_of
from triptych.models.llava.config import VisionConfig, text_config, tile_config, vision_config
from triptych.models.registry import backbone_of
from triptych.models.shared.clip import clip_keys, load_clip, unused
from triptych.models.shared.projector import PROJECTOR, projector_layouts
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer

NEWLINE = "newline"


class LlavaTower(nn.Module):
    """``Encoder`` of images or tiles of one size: hidden states of some layers, projected. Those of an input with a
    layout are put together."""

    def __init__(
        self,
        config: VisionConfig,
        transformer: VisionTransformer,
        projector: nn.Module,
        newline: Tensor | None,
        embedding_width: int,
    ) -> None:
        """``newline`` [embedding width] ends each row of embeddings."""
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.projector = projector
        self.newline = None if newline is None else frozen(newline)
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        states = self.transformer.states_of(inputs, self.config.feature_layers)
        drops_class = self.config.clip.is_clip and not self.config.keeps_class_row
        features = (states[0] if len(states) == 1 else torch.cat(states, dim=-1))[:, int(drops_class) :]
        rows = self.projector(features.flatten(0, 1)).unflatten(0, (-1, self.config.rows))
        each = rows.split([item.grid[0] for item in inputs])
        return [
            arranged(tiles, layout_of(item.layout), self.newline) if item.layout else tiles.flatten(0, 1)
            for tiles, item in zip(each, inputs, strict=True)
        ]


def arranged(tiles: Tensor, layout: Layout, newline: Tensor | None) -> Tensor:
    """Return the rows [layout.rows, width] of tiles [tiles, embeddings, width]; ``newline`` is [width]. Raises
    PlanMismatch for another number of tiles."""
    (rows, columns), width, side = layout.tiles, tiles.shape[2], math.isqrt(tiles.shape[1])
    if len(tiles) != rows * columns:
        raise PlanMismatch(f"{len(tiles)} tiles don't fill {rows} by {columns}")
    numbers = torch.arange(rows * columns * side * side, device=tiles.device).view(rows, columns, side, side)
    numbers = numbers.transpose(1, 2).reshape(rows * side, columns * side)
    top, left = (rows * side - layout.kept[0]) // 2, (columns * side - layout.kept[1]) // 2
    grid = tiles.flatten(0, 1)[numbers[top : top + layout.kept[0], left : left + layout.kept[1]]]
    if layout.pooled != layout.kept:
        # with an image's stride, PyTorch sees that channels are last, and copies nothing
        pooled = interpolate(grid[None].permute(0, 3, 1, 2), layout.pooled, mode="bilinear", align_corners=False)
        grid = pooled.permute(0, 2, 3, 1)[0]
    if not layout.newlines or newline is None:
        return grid.reshape(-1, width)
    size = layout.pooled[0] * layout.pooled[1] // layout.newlines
    lines = grid.reshape(layout.newlines, size, width)
    return torch.cat((lines, newline.expand(layout.newlines, 1, -1)), dim=1).flatten(0, 1)


class Llava(TowerAdapter):
    """``ModelAdapter`` for model type ``llava``. Raises CheckpointError for a config that lacks a setting or asks for
    something unsupported."""

    towers = "CLIPVisionModel or SiglipVisionModel"
    layouts = projector_layouts()

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        backbone = backbone_of({**config, "text_config": text})
        # as transformers, which ties if either section says so
        tied = bool(config.get("tie_word_embeddings")) or bool(
            text.get("tie_word_embeddings", backbone.ties_embeddings)
        )
        super().__init__(config, text, tied=tied)
        self.vision = vision_config(config)
        tower_activation(self.vision.clip.activation, "vision_config.hidden_act")  # checks it
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")
        self._projector_bias = setting(config, "multimodal_projector_bias", bool, default=True)

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        return unused(self.vision.clip, VISION, max(self.vision.feature_layers))

    def tower_keys(self, all_keys: Iterable[str]) -> dict[str, str]:
        """See ``TowerAdapter``."""
        return clip_keys(super().tower_keys(all_keys), VISION)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower's used layers and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        depth = max(self.vision.feature_layers)
        transformer = load_clip(reader, self.vision.clip, VISION, depth)
        projector, newline = self._projector(reader), self._newline(reader)
        return LlavaTower(self.vision, transformer, projector, newline, self.embedding_width)

    def _newline(self, reader: TowerWeights) -> Tensor | None:
        return None

    def _projector(self, reader: TowerWeights) -> nn.Module:
        width, values = self.embedding_width, self.vision.clip.hidden_size * len(self.vision.feature_layers)
        names = [f"{PROJECTOR}.linear_{number}" for number in (1, 2)]
        return reader.mlp(names, (values, width, width), self._projector_activation, self._projector_bias)


class LlavaNext(Llava):
    """``ModelAdapter`` for model types ``llava_next`` and ``llava_onevision``. Raises as ``Llava`` does."""

    layouts = projector_layouts(**{NEWLINE: "image_newline"})

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.vision = tile_config(config)

    def _newline(self, reader: TowerWeights) -> Tensor:
        return reader.parameter(f"{NEWLINE}.", self.embedding_width)
