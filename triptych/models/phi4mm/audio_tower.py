"""Phi-4-multimodal's audio tower: transformers' conformer, and one of two projectors."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, PlanMismatch
from triptych.layers.encoder import PreprocessedPart, load_module
from triptych.layers.pinned import to_device
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP
from triptych.models.base import AUDIO
from triptych.models.shared.tower_weights import TowerWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RENAMED = (
    (r"audio_projection\.(speech|vision)\.0\.", r"up_proj_for_\1."),
    (r"audio_projection\.(speech|vision)\.2\.", r"down_proj_for_\1."),
    (r"proj_for_vision\.", r"proj_for_vision_speech."),
    (r"feed_forward_(in|out)\.net\.0\.linear\.", r"feed_forward_\1.gate_up_proj."),
    (r"feed_forward_(in|out)\.net\.2\.", r"feed_forward_\1.down_proj."),
    (r"self_attn\.linear_([qkv])\.", r"self_attn.\1_proj."),
    (r"self_attn\.linear_out\.", r"self_attn.o_proj."),
)
"""Patterns of published names, and transformers'."""
PROJECTORS = ("speech", "vision_speech")
"""Projectors of requests without images, and with."""


class Phi4AudioTower(nn.Module):
    """``Encoder`` of clips. Each goes through the tower by itself, in windows of 500 embeddings that the last one is
    filled up to with zeros, as transformers does with a clip alone."""

    def __init__(self, module: "PreTrainedModel", projectors: Sequence[MLP], width: int) -> None:
        """``projectors`` are those of ``PROJECTORS``."""
        super().__init__()
        self.module = module
        self.projectors = nn.ModuleList(projectors)
        self.embedding_width = width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        return [self._rows(item) for item in inputs]

    def _rows(self, item: PreprocessedPart) -> Tensor:
        if item.layout not in ((0,), (1,)) or item.grid[0] != len(item.patches):
            raise PlanMismatch(f"{len(item.patches)} frames of features don't fill a grid of {item.grid}")
        [features] = to_device([torch.from_numpy(item.patches)], self.module.device)
        states = self.module(features.to(self.module.dtype)[None], mask=None)[0]
        rows: Tensor = self.projectors[item.layout[0]](states)
        return rows


def audio_name(name: str) -> str:
    """Return transformers' name of an audio tower's tensor."""
    for published, own in RENAMED:
        name = re.sub(published, own, name)
    return name


def load_audio(
    settings: dict[str, Any], checkpoint: Checkpoint, reader: TowerWeights, keys: Mapping[str, str], width: int
) -> Phi4AudioTower:
    """Load the tower of these settings; ``keys`` maps transformers' names to the checkpoint's. Raises as
    ``load_module`` does, and CheckpointError for settings that transformers rejects."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import Phi4MultimodalAudioConfig, Phi4MultimodalAudioModel

    try:
        config = Phi4MultimodalAudioConfig(**settings)
    except StrictDataclassError as error:
        raise CheckpointError(f"config.json: the audio tower: {error}") from error
    prefix = f"{AUDIO}.encoder."
    own = {name.removeprefix(prefix): key for name, key in keys.items() if name.startswith(prefix)}
    module = load_module(
        Phi4MultimodalAudioModel, config, checkpoint, own, weights=reader.weights, device=reader.device
    )
    projectors = [
        MLP(
            reader.linear([f"{AUDIO}.up_proj_for_{name}"], width, config.hidden_size),
            Activation.GELU,
            reader.linear([f"{AUDIO}.down_proj_for_{name}"], width, width),
        )
        for name in PROJECTORS
    ]
    return Phi4AudioTower(module, projectors, width)
