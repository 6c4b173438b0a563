"""Plans Qwen3-Omni's images, videos, audio and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen3OmniMoeProcessor`` and
``Qwen3OmniMoeThinkerForConditionalGeneration.get_rope_index`` in transformers.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.models.base import ModelConfig
from triptych.models.qwen3_omni.audio import Hearing, HearingWork
from triptych.models.qwen3_omni.interleaving import interleaved, runs_of_kinds
from triptych.models.shared.mrope import Shape, interleaved_shapes, line_shape, timed_shape
from triptych.models.shared.planner import VISION_TOKENS, EncoderWork, PatchPlanner
from triptych.models.shared.settings import setting
from triptych.models.shared.video import EqualSteps, FrameGeometry
from triptych.types import AudioHeader, AudioTrackPlan, ItemPlan, VideoHeader

AUDIO_TOKENS = ("audio_token_id", "audio_start_token_id")
AUDIO_END = "audio_end_token_id"


def thinker_config(config: ModelConfig) -> ModelConfig:
    """The settings of the part that understands and answers, in a section of their own unless it was saved alone."""
    return setting(config, "thinker_config", dict, default=config)


class OmniSampling(EqualSteps):
    """The reference's processor takes frames to be a second apart where nothing is said."""

    default_fps = 1.0


class OmniGeometry(FrameGeometry):
    """The reference's processor has bounds of its own, whatever the files say."""

    default_size: ClassVar = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}

    @classmethod
    def from_config(cls, config: dict[str, Any], factor: int, temporal_patch_size: int) -> Self:
        silent = config | {"size": None, "min_pixels": None, "max_pixels": None}
        return super().from_config(silent, factor, temporal_patch_size)


class Qwen3OmniPlanner(PatchPlanner):
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    video_sampling = OmniSampling
    video_geometry = OmniGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_config(config)
        work = EncoderWork(
            hidden_size=setting(thinker, "vision_config.hidden_size", int),
            intermediate_size=setting(thinker, "vision_config.intermediate_size", int),
        )
        # transformers takes the end's from the tokenizer, so that not every config has it
        has_end = thinker.get(AUDIO_END) is not None
        super().__init__(
            thinker,
            preprocessor_config,
            video_config,
            context_length=setting(thinker, "text_config.max_position_embeddings", int),
            work=work,
            media_tokens=(*VISION_TOKENS, *AUDIO_TOKENS, *((AUDIO_END,) if has_end else ())),
        )
        self._positions_per_second = setting(thinker, "position_id_per_seconds", float, default=25.0)
        self.placeholder_ids = {**self.placeholder_ids, "audio": setting(thinker, "audio_token_id", int)}
        self._audio_start = setting(thinker, "audio_start_token_id", int)
        self._audio_end = setting(thinker, AUDIO_END, int) if has_end else None
        self.audio_in_video = self._audio_end is not None
        audio = setting(thinker, "audio_config", dict)
        self._hearing = Hearing.from_configs(audio, preprocessor_config)
        self._hearing_work = _hearing_work(audio, work.linear * setting(thinker, "vision_config.depth", int))

    def _plan_audio(self, header: AudioHeader) -> ItemPlan:
        hearing = self._hearing
        frames = hearing.mel.num_frames(header.resampled(hearing.mel.rate))
        rows = hearing.rows(frames)
        return ItemPlan(
            modality="audio",
            header=header,
            resized_height=0,
            resized_width=0,
            grid=(frames, 1, 1),
            rows=rows,
            rows_per_part=min(rows, hearing.rows(hearing.window)),
            cost=self._hearing_work.cost(hearing, frames),
        )

    def _with_sound(self, plan: ItemPlan, sound: AudioHeader) -> ItemPlan:
        """A patch in time comes before the first token of sound that isn't earlier, a token taking a position."""
        if self._audio_end is None:
            return super()._with_sound(plan, sound)
        heard = self._plan_audio(sound)
        windows = [heard.rows_of(part) for part in range(heard.num_parts)]
        return msgspec.structs.replace(
            plan,
            rows=plan.rows + heard.rows,
            cost=plan.cost + heard.cost,
            audio_track=AudioTrackPlan(sound, heard.grid[0], heard.rows),
            parts=interleaved(self._times(plan), plan.rows_per_part, windows),
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[int], str]) -> str:
        """Of a video that is heard one for each run of rows of a kind, within the marks of audio."""
        if self._audio_end is None or plan.audio_track is None:
            return super().placeholder(plan, spelling)
        kinds = ("audio" if heard else "video" for heard, _ in runs_of_kinds(plan.parts))
        placeholders = (self.placeholder_ids[kind] for kind in kinds)
        return "".join(map(spelling, (self._audio_start, *placeholders, self._audio_end)))

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """As ``placeholder`` has them."""
        return [rows for _, rows in runs_of_kinds(plan.parts)] if plan.audio_track else super().runs(plan)

    def _shapes(self, plan: ItemPlan) -> list[Shape]:
        """Audio counts up like text; a video's frames and its sound begin together."""
        if plan.modality == "audio":
            return [line_shape(plan.rows)]
        shapes = super()._shapes(plan)
        if plan.audio_track is None:
            return shapes
        return interleaved_shapes([*shapes, line_shape(plan.audio_track.rows)], runs_of_kinds(plan.parts))

    def _shape(self, plan: ItemPlan, frames: int, height: int, width: int) -> Shape:
        if not isinstance(plan.header, VideoHeader):
            return super()._shape(plan, frames, height, width)
        return timed_shape(self._times(plan), height, width)

    def _times(self, plan: ItemPlan) -> NDArray[np.float64]:
        """When a video's patches in time begin, in positions from its start: as far apart as they are in seconds, at
        the rate that was asked for; at that of the frames that are seen where their number was."""
        assert isinstance(plan.header, VideoHeader)
        asked = self._sampling.asked(plan.sampling)
        rate = asked.fps
        if plan.header.presampled or asked.num_frames is not None:
            rate = self._seen_rate(plan, plan.header)
        seconds = self._geometry.temporal_patch_size / rate
        # in this order, as the reference: what it is rounded to decides which of two at the same time comes first
        return np.arange(plan.grid[0], dtype=np.float64) * seconds * self._positions_per_second


def _hearing_work(audio: ModelConfig, unit: int) -> HearingWork:
    return HearingWork(
        hidden_size=setting(audio, "d_model", int, default=1280),
        intermediate_size=setting(audio, "encoder_ffn_dim", int, default=5120),
        layers=setting(audio, "encoder_layers", int, default=32),
        channels=setting(audio, "downsample_hidden_size", int, default=480),
        output_size=setting(audio, "output_dim", int),
        bands=setting(audio, "num_mel_bins", int, default=128),
        unit=unit,
    )
