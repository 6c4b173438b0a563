"""Plans Qwen3-Omni's images, videos, audio and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen3OmniMoeProcessor`` and
``Qwen3OmniMoeThinkerForConditionalGeneration.get_rope_index`` in transformers.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np

from triptych.models.base import ModelConfig
from triptych.models.qwen3_omni.audio import AudioCostModel, ChunkFraming
from triptych.models.shared.mrope import MediaPositions, timed_grid_positions
from triptych.models.shared.omni import OmniGeometry, OmniPlanner, thinker_config
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import setting
from triptych.models.shared.video import IntervalStartSampling
from triptych.types import ItemPlan, VideoHeader


class Qwen3OmniSampling(IntervalStartSampling):
    """``IntervalStartSampling`` at one frame per second by default, like the reference's processor."""

    default_fps = 1.0


class Qwen3OmniGeometry(OmniGeometry):
    """``OmniGeometry`` of this family."""

    default_size: ClassVar = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}


class Qwen3OmniPlanner(OmniPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    video_sampling = Qwen3OmniSampling
    video_geometry = Qwen3OmniGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_config(config)
        cost_model = VisionCostModel(
            hidden_size=setting(thinker, "vision_config.hidden_size", int),
            intermediate_size=setting(thinker, "vision_config.intermediate_size", int),
        )
        audio = setting(thinker, "audio_config", dict)
        framing = ChunkFraming.from_configs(audio, preprocessor_config)
        audio_cost_model = _audio_cost_model(audio, cost_model.linear * setting(thinker, "vision_config.depth", int))
        super().__init__(
            thinker,
            preprocessor_config,
            video_config,
            cost_model=cost_model,
            framing=framing,
            audio_cost=partial(audio_cost_model.cost, framing),
        )

    def _order(self, video: ItemPlan, audio_rows: int) -> Iterator[tuple[bool, int]]:
        """Place each temporal patch before the first audio row that isn't earlier: row ``ceil(time)``, or behind the
        last one if there are fewer. The reference is ``Qwen3OmniMoeProcessor.replace_video_with_audio_token``."""
        heard = 0
        for place in np.minimum(np.ceil(self._times(video)), audio_rows).astype(int).tolist():
            yield True, place - heard
            yield False, video.parts[0].rows
            heard = place
        yield True, audio_rows - heard

    def _grid_positions(self, plan: ItemPlan, frames: int, height: int, width: int) -> MediaPositions:
        if not isinstance(plan.header, VideoHeader):
            return super()._grid_positions(plan, frames, height, width)
        return timed_grid_positions(self._times(plan), height, width)


def _audio_cost_model(audio: ModelConfig, unit: int) -> AudioCostModel:
    return AudioCostModel(
        hidden_size=setting(audio, "d_model", int, default=1280),
        intermediate_size=setting(audio, "encoder_ffn_dim", int, default=5120),
        layers=setting(audio, "encoder_layers", int, default=32),
        channels=setting(audio, "downsample_hidden_size", int, default=480),
        output_size=setting(audio, "output_dim", int),
        bands=setting(audio, "num_mel_bins", int, default=128),
        unit=unit,
    )
