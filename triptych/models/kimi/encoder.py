"""Adapters of Kimi-VL and Kimi K2.5: tower, decoder parameters and tensor names."""

from typing import ClassVar

from triptych.layers.encoder import Encoder
from triptych.models.base import VISION, ModelConfig
from triptych.models.kimi.config import text_config, vision_config
from triptych.models.kimi.tower import load_moon
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights

PROJECTOR = "projector"


def _layouts(projector: str) -> tuple[WeightPrefixes, ...]:
    towers = {VISION: "vision_tower.", PROJECTOR: projector}
    return (WeightPrefixes(towers, "language_model.model.", "language_model.lm_head.weight"),)


class KimiVL(TowerAdapter):
    """``ModelAdapter`` for model type ``kimi_vl``. Raises CheckpointError for a config that lacks a setting or asks for
    something unsupported."""

    towers = "MoonViT and projector"
    layouts = _layouts("multi_modal_projector.")
    projector_layers: ClassVar[tuple[str, str]] = ("linear_1", "linear_2")
    """Names of the projector's two layers."""

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        default = bool(text.get("tie_word_embeddings", False))
        super().__init__(config, text, tied=setting(config, "tie_word_embeddings", bool, default=default))
        self.vision = vision_config(config)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        norm, first, second = (f"{PROJECTOR}.{name}" for name in ("pre_norm", *self.projector_layers))
        return load_moon(reader, self.vision, VISION, (norm, first, second), self.embedding_width)


class KimiK25(KimiVL):
    """``ModelAdapter`` for model type ``kimi_k25``. Raises CheckpointError as ``KimiVL`` does."""

    layouts = _layouts("mm_projector.")
    projector_layers = ("proj.0", "proj.2")
