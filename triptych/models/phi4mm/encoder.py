"""Adapter of Phi-4-multimodal: towers, projectors, decoder parameters and tensor names, in both layouts.

The published files hold the decoder's weights as ``….base_layer.weight``, beside two LoRAs: ``….lora_A.vision.weight``,
``….lora_A.speech.weight``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import PlanMismatch
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import frozen
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import TowerLayer
from triptych.models.base import AUDIO, VISION, ModelConfig
from triptych.models.phi4mm.audio import audio_config
from triptych.models.phi4mm.audio_tower import audio_name, load_audio
from triptych.models.phi4mm.config import LORA_LAYERS, PooledTilesConfig, is_published, loras, vision_config
from triptych.models.shared.clip import load_clip, unused
from triptych.models.shared.encoder import MultiTowerEncoder
from triptych.models.shared.settings import setting
from triptych.models.shared.shares import places
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights
from triptych.models.shared.vision_transformer import MAX_STATES, VisionTransformer

EXTRA = "embed_tokens_extend."
"""Towers and projectors, within the decoder's names."""
TRANSFORMER = f"{VISION}.img_processor"
RENAMED = (
    (f"{VISION}.img_projection.0.", f"{VISION}.img_projection_up."),
    (f"{VISION}.img_projection.2.", f"{VISION}.img_projection_down."),
    (f"{VISION}.glb_GN", f"{VISION}.global_img_feature_extensor"),
    (f"{VISION}.sub_GN", f"{VISION}.sub_img_feature_extensor"),
)
"""Published names, and transformers'."""


class PartlyShown(nn.Module):
    """A vision transformer of tiles that show an image in part: their other patches attend, but aren't attended to."""

    def __init__(self, transformer: VisionTransformer, table: Tensor, layer: int) -> None:
        """``table`` [patches, hidden] has all positions; ``layer`` is the last one, numbered from 1."""
        super().__init__()
        self.transformer = transformer
        self.table = frozen(table)
        self.layer = layer

    def forward(self, tiles: Tensor, rows: int, columns: int) -> Tensor:
        """Return hidden states [tiles, patches, hidden] of ``tiles`` [tiles, patches, values per patch]. The first
        ``rows`` by ``columns`` patches of each show the image."""
        count, length = tiles.shape[:2]
        side = round(length**0.5)
        if (rows, columns) == (side, side):
            parts = tiles.split(max(MAX_STATES // length, 1))
            return torch.cat([self.transformer(part.flatten(0, 1), [self.layer])[0] for part in parts])
        positions = self.table[places(side, rows, columns).to(tiles.device)]
        shown = torch.arange(length, device=tiles.device).view(side, side)[:rows, :columns].flatten()
        hidden = (self.transformer.projection(tiles.flatten(0, 1)).view(count, length, -1) + positions).flatten(0, 1)
        for layer in self.transformer.layers:
            assert isinstance(layer, TowerLayer)
            hidden = layer.finish(hidden, attended(layer, hidden, count, shown))
        return hidden.view(count, length, -1)


def attended(layer: TowerLayer, hidden: Tensor, count: int, shown: Tensor) -> Tensor:
    """Return what the layer's output projection takes, [T, hidden], of ``count`` tiles whose patches attend to those
    ``shown``, int64 [patches]."""
    attention = layer.attention
    projected = attention.inputs[0](layer.attention_norm(hidden)).view(
        count, -1, 3, attention.num_heads, hidden.shape[1] // attention.num_heads
    )
    query, key, value = projected.permute(2, 0, 3, 1, 4)
    found = F.scaled_dot_product_attention(query, key[:, :, shown], value[:, :, shown], scale=attention.scale)
    return found.transpose(1, 2).reshape(hidden.shape)


class Phi4MMTower(nn.Module):
    """``Encoder`` of an image's tiles, and of the whole."""

    def __init__(  # noqa: PLR0917 (what a tower is made of)
        self,
        config: PooledTilesConfig,
        transformer: PartlyShown,
        newline: Tensor,
        separator: Tensor,
        projector: nn.Module,
        width: int,
    ) -> None:
        """``newline`` [hidden] ends each line of embeddings, ``separator`` [hidden] stands before the whole; ``width``
        is that of an embedding."""
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.newline, self.separator = frozen(newline), frozen(separator)
        self.projector = projector
        self.embedding_width = width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        return [self.projector(self._lines(item)) for item in inputs]

    def _lines(self, item: PreprocessedPart) -> Tensor:
        """Return a part's rows [rows, hidden] before they are projected."""
        side = self.config.clip.side
        rows, columns, *shown = item.layout or (1, 1, side, side)
        if item.grid != (rows * columns, side, side) or len(item.patches) != rows * columns * side**2:
            raise PlanMismatch(
                f"{len(item.patches)} patches of a grid of {item.grid} don't fill {rows} by {columns} tiles"
            )
        device = self.newline.device
        tiles = torch.from_numpy(item.patches).to(device, self.newline.dtype).view(rows * columns, side**2, -1)
        pooled = self._pooled(tiles, columns, shown).view(rows, columns, side // 2, side // 2, -1).transpose(1, 2)
        grid = pooled.reshape(rows * side // 2, columns * side // 2, -1)[: -(-shown[0] // 2), : -(-shown[1] // 2)]
        lines = torch.cat((grid, self.newline.expand(len(grid), 1, -1)), dim=1).flatten(0, 1)
        return lines if item.layout else torch.cat((self.separator[None], lines))

    def _pooled(self, tiles: Tensor, columns: int, shown: Sequence[int]) -> Tensor:
        """Return the averages of squares of two by two patches: [tiles, squares, hidden]."""
        side, by_shape = self.config.clip.side, dict[tuple[int, int], list[int]]()
        for number in range(len(tiles)):
            place = divmod(number, columns)
            shape = tuple(min(most - one * side, side) for most, one in zip(shown, place, strict=True))
            by_shape.setdefault((shape[0], shape[1]), []).append(number)
        pooled = tiles.new_empty(len(tiles), side**2 // 4, self.newline.shape[0])
        for shape, numbers in by_shape.items():
            for some in (numbers[start : start + 4] for start in range(0, len(numbers), 4)):
                states = self.transformer(tiles[some], *shape)
                squares = states.view(len(some), side // 2, 2, side // 2, 2, -1)
                pooled[some] = squares.mean(dim=(2, 4)).flatten(1, 2)
        return pooled


class Phi4MM(TowerAdapter):
    """``ModelAdapter`` for model types ``phi4mm`` and ``phi4_multimodal``. Raises CheckpointError for a config that
    lacks a setting or asks for something unsupported."""

    towers = "Phi4MultimodalVisionModel and Phi4MultimodalAudioModel"
    layouts = (WeightPrefixes({VISION: f"model.{EXTRA}image_embed.", AUDIO: f"model.{EXTRA}audio_embed."}, "model."),)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config, tied=setting(config, "tie_word_embeddings", bool, default=False))
        own = self.decoder_config.names
        renamed = tuple((f"{name}.weight", f"{name}.base_layer.weight") for name in LORA_LAYERS if is_published(config))
        names = replace(own, renamed=own.renamed + renamed, ignored_modules=(*own.ignored_modules, EXTRA))
        self.decoder_config = replace(self.decoder_config, names=names, loras=loras(config))
        self.vision = vision_config(config)
        self._audio = audio_config(config)

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        return unused(self.vision.clip, TRANSFORMER, self.vision.layer)

    def tower_keys(self, all_keys: Iterable[str]) -> dict[str, str]:
        """See ``TowerAdapter``."""
        return {transformers_name(name): key for name, key in super().tower_keys(all_keys).items()}

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the vision tower's used layers, the audio tower, and the projectors. Raises CheckpointError as
        ``TowerWeights`` does."""
        clip, width = self.vision.clip, self.embedding_width
        depth, hidden = self.vision.layer, self.vision.clip.hidden_size
        transformer = load_clip(reader, clip, TRANSFORMER, depth, places(clip.side))
        table = reader.parameter(f"{TRANSFORMER}.embeddings.position_embedding.weight", clip.states, hidden)
        tower = Phi4MMTower(
            self.vision,
            PartlyShown(transformer, table, depth),
            reader.parameter(f"{VISION}.sub_img_feature_extensor", 1, 1, 1, hidden).view(hidden),
            reader.parameter(f"{VISION}.global_img_feature_extensor", 1, 1, hidden).view(hidden),
            reader.mlp(
                [f"{VISION}.img_projection_{part}" for part in ("up", "down")], (hidden, width, width), Activation.GELU
            ),
            width,
        )
        return MultiTowerEncoder({VISION: tower, AUDIO: load_audio(reader, self._audio, width)}, width)


def transformers_name(name: str) -> str:
    """Return transformers' name of an encoder's tensor."""
    for published, own in RENAMED:
        name = name.replace(published, own)
    return audio_name(name) if name.startswith(f"{AUDIO}.") else name
