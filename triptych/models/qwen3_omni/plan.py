"""Plans Qwen3-Omni's images, videos, audio and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen3OmniMoeProcessor`` and
``Qwen3OmniMoeThinkerForConditionalGeneration.get_rope_index`` in transformers.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.models.base import AUDIO, MediaToken, ModelConfig
from triptych.models.qwen3_omni.audio import AudioCostModel, AudioFraming
from triptych.models.qwen3_omni.interleaving import interleaved_parts, runs_by_modality
from triptych.models.shared.mrope import (
    MediaPositions,
    interleaved_positions,
    sequential_positions,
    timed_grid_positions,
)
from triptych.models.shared.planner import VISION_TOKENS, PatchPlanner, VisionCostModel
from triptych.models.shared.settings import setting
from triptych.models.shared.video import IntervalStartSampling, PerFrameGeometry
from triptych.types import AudioHeader, ItemPart, ItemPlan, VideoHeader

AUDIO_TOKENS = ("audio_token_id", "audio_start_token_id")
AUDIO_END = "audio_end_token_id"


def thinker_config(config: ModelConfig) -> ModelConfig:
    """Return the settings of the thinker, which are at the top level if it was saved by itself."""
    return setting(config, "thinker_config", dict, default=config)


class OmniSampling(IntervalStartSampling):
    """``IntervalStartSampling`` at one frame per second by default, like the reference's processor."""

    default_fps = 1.0


class OmniGeometry(PerFrameGeometry):
    """``PerFrameGeometry`` with the fixed bounds of the reference's processor, which ignores the config files."""

    default_size: ClassVar = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}

    @classmethod
    def from_config(cls, config: dict[str, Any], factor: int, temporal_patch_size: int) -> Self:
        silent = config | {"size": None, "min_pixels": None, "max_pixels": None}
        return super().from_config(silent, factor, temporal_patch_size)


class Qwen3OmniPlanner(PatchPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    video_sampling = OmniSampling
    video_geometry = OmniGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_config(config)
        cost_model = VisionCostModel(
            hidden_size=setting(thinker, "vision_config.hidden_size", int),
            intermediate_size=setting(thinker, "vision_config.intermediate_size", int),
        )
        # transformers takes the end token from the tokenizer, so not every config has it
        has_end = thinker.get(AUDIO_END) is not None
        super().__init__(
            thinker,
            preprocessor_config,
            video_config,
            context_length=setting(thinker, "text_config.max_position_embeddings", int),
            cost_model=cost_model,
            media_tokens=(*VISION_TOKENS, *AUDIO_TOKENS, *((AUDIO_END,) if has_end else ())),
        )
        self._positions_per_second = setting(thinker, "position_id_per_seconds", float, default=25.0)
        self.placeholder_tokens = {**self.placeholder_tokens, "audio": setting(thinker, "audio_token_id", int)}
        self._audio_start = setting(thinker, "audio_start_token_id", int)
        self._audio_end = setting(thinker, AUDIO_END, int) if has_end else None
        self.audio_in_video = self._audio_end is not None
        audio = setting(thinker, "audio_config", dict)
        self._framing = AudioFraming.from_configs(audio, preprocessor_config)
        self._audio_cost_model = _audio_cost_model(
            audio, cost_model.linear * setting(thinker, "vision_config.depth", int)
        )

    def _plan_audio(self, header: AudioHeader) -> ItemPlan:
        """Plan a part for each window. Its payload is the window's first frame of features and number of frames."""
        framing = self._framing
        frames = framing.mel.num_frames(header.resampled(framing.mel.rate))
        window_rows = framing.rows(framing.window)
        windows = [(first, length) for first, length, _ in framing.parts(frames)]
        # all windows but the last are equal
        costs = {length: self._audio_cost_model.cost(framing, length) for length in {length for _, length in windows}}
        parts = tuple(
            ItemPart(((number * window_rows, framing.rows(window[1])),), window[1], costs[window[1]], AUDIO, window)
            for number, window in enumerate(windows)
        )
        return ItemPlan(
            modality="audio",
            header=header,
            resized_height=0,
            resized_width=0,
            grid=(frames, 1, 1),
            rows=framing.rows(frames),
            patches=frames,
            cost=self._audio_cost_model.cost(framing, frames),
            parts=parts,
        )

    def _with_sound(self, plan: ItemPlan, sound: AudioHeader) -> ItemPlan:
        """Place each temporal patch before the first audio token that isn't earlier; a token takes one position."""
        if self._audio_end is None:
            return super()._with_sound(plan, sound)
        audio = self._plan_audio(sound)
        return msgspec.structs.replace(
            plan,
            rows=plan.rows + audio.rows,
            patches=plan.patches + audio.patches,
            cost=plan.cost + audio.cost,
            parts=interleaved_parts(self._times(plan), plan.parts, audio.parts),
            sound=sound,
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """For a video with audio, return one placeholder per run of rows of one modality, between the audio markers."""
        if self._audio_end is None or plan.sound is None:
            return super().placeholder(plan, spelling)
        modalities = ("audio" if is_audio else "video" for is_audio, _ in runs_by_modality(plan.parts))
        placeholders = (self.placeholder_tokens[modality] for modality in modalities)
        return "".join(map(spelling, (self._audio_start, *placeholders, self._audio_end)))

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return the number of rows at each placeholder of ``placeholder``."""
        return [rows for _, rows in runs_by_modality(plan.parts)] if plan.sound else super().runs(plan)

    def _run_positions(self, plan: ItemPlan) -> list[MediaPositions]:
        """Audio counts up like text; a video's frames and its audio start at the same position."""
        if plan.modality == "audio":
            return [sequential_positions(plan.rows)]
        video = super()._run_positions(plan)
        if plan.sound is None:
            return video
        audio = sequential_positions(sum(part.rows for part in plan.parts if part.tower == AUDIO))
        return interleaved_positions([*video, audio], runs_by_modality(plan.parts))

    def _grid_positions(self, plan: ItemPlan, frames: int, height: int, width: int) -> MediaPositions:
        if not isinstance(plan.header, VideoHeader):
            return super()._grid_positions(plan, frames, height, width)
        return timed_grid_positions(self._times(plan), height, width)

    def _times(self, plan: ItemPlan) -> NDArray[np.float64]:
        """Return where a video's temporal patches begin, in positions from its start, proportional to time.

        The frame rate is the requested one or, if a number of frames was requested, that of the sampled frames.
        """
        assert isinstance(plan.header, VideoHeader)
        sampling = self._sampling.for_request(plan.sampling)
        rate = sampling.fps
        if plan.header.presampled or sampling.num_frames is not None:
            rate = self._sampled_fps(plan, plan.header)
        seconds = self._geometry.temporal_patch_size / rate
        # the reference's order of operations: rounding decides which of two simultaneous rows comes first
        return np.arange(plan.grid[0], dtype=np.float64) * seconds * self._positions_per_second


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
