"""Adapter of families with a vision tower that takes any grid of patches, maybe among others."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import CheckpointError
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.shaped_calls import ShapedCalls
from triptych.models.base import AUDIO, VISION, ModelConfig
from triptych.models.shared.grid_tower import GridTower
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights
from triptych.models.shared.vision_tower import VisionTowerConfig, VisionTowerSpec, load_vision_tower
from triptych.models.shared.vision_transformer import VisionTransformer


class MultiTowerEncoder:
    """``Encoder`` of several towers, which passes each input to the tower that the input names.

    All embeddings have one width. Those of a tower without deepstack features are padded with zeros, which change
    nothing when the decoder adds them.
    """

    def __init__(self, towers: Mapping[str, Encoder], embedding_width: int) -> None:
        self.towers = towers
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        rows: dict[int, Tensor] = {}
        for name, tower in self.towers.items():
            numbers = [number for number, item in enumerate(inputs) if item.tower == name]
            made = tower.encode([inputs[number] for number in numbers]) if numbers else []
            rows |= zip(numbers, (F.pad(one, (0, self.embedding_width - one.shape[1])) for one in made), strict=True)
        return [rows[number] for number in range(len(inputs))]


def recordable_calls(encoder: Encoder) -> Iterator[ShapedCalls[Any]]:
    """Yield the calls of an encoder's towers that may be recorded: their shape says all that the CPU needs to know."""
    if isinstance(encoder, MultiTowerEncoder):
        for tower in encoder.towers.values():
            yield from recordable_calls(tower)
    elif isinstance(encoder, nn.Module):
        yield from (one.calls for one in encoder.modules() if isinstance(one, VisionTransformer | GridTower))


# In files older than transformers 4.52, and in those that it saves for such families, the decoder's tensors are named
# as in a text-only model. Longer prefixes come first, because the shorter ones match them too.
LAYOUTS = (
    WeightPrefixes({VISION: "model.visual."}, "model.language_model."),
    WeightPrefixes({VISION: "visual."}, "model."),
)


def omni_layouts(speech: str) -> tuple[WeightPrefixes, ...]:
    """Return the naming schemes of families that see and hear; ``speech`` is the prefix of their speech output, beside
    that of the model that speaks."""
    towers = {VISION: "visual.", AUDIO: "audio_tower."}

    def within(prefix: str) -> dict[str, str]:
        return {name: f"{prefix}{tower}" for name, tower in towers.items()}

    return (
        WeightPrefixes(within("thinker."), "thinker.model.", "thinker.lm_head.weight", others=("talker.", speech)),
        WeightPrefixes(within("model."), "model.language_model."),
        WeightPrefixes(towers, "model."),
    )


class MultimodalAdapter(TowerAdapter):
    """``ModelAdapter`` of a family whose vision tower is a ``GridTower``; subclasses set ``spec``.

    Raises CheckpointError for a config that lacks a setting or asks for something unsupported.
    """

    spec: ClassVar[VisionTowerSpec]
    layouts: Sequence[WeightPrefixes] = LAYOUTS

    def __init__(self, config: ModelConfig) -> None:
        text = self.text_config(config)
        self.vision = VisionTowerConfig.from_config(setting(config, "vision_config", dict), self.spec)
        features = len(self.vision.deepstack)
        # The top level takes precedence, as in transformers: the text section of saved MoE files contradicts it.
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        super().__init__(config, text, tied=tied, num_deepstack_layers=features)
        if features > (layers := self.decoder_config.num_layers):
            raise CheckpointError(f"config.json: {features} deepstack features for a decoder of {layers} layers")
        self._check_width(self.vision.output_size, self.spec.output)

    def text_config(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return the part of the config that describes the language model."""
        return setting(config, "text_config", dict)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the towers. Raises CheckpointError as ``TowerWeights`` does."""
        tower = load_vision_tower(reader, self.spec, self.vision, VISION, self.embedding_width)
        others = self.load_other_towers(reader)
        return MultiTowerEncoder({VISION: tower, **others}, self.embedding_width) if others else tower

    def load_other_towers(self, reader: TowerWeights) -> Mapping[str, Encoder]:
        """Return the towers beside the vision tower, by name. Raises as ``read_encoder`` does."""
        return {}

    def _check_width(self, width: int, name: str) -> None:
        """Raises CheckpointError if a tower's embeddings, whose width is the setting ``name``, don't have the decoder's
        hidden size."""
        if width != (hidden_size := self.decoder_config.hidden_size):
            raise CheckpointError(f"config.json: the tower's {name} {width} isn't the hidden size {hidden_size}")
