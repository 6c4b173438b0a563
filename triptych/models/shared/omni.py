"""Plans images, videos, audio and prompts of families that see and hear. Frontend; numpy only.

The references are ``Qwen2_5OmniProcessor`` and ``Qwen3OmniMoeProcessor`` in transformers, and their models'
``get_rope_index``.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.models.base import AUDIO, MediaToken, ModelConfig
from triptych.models.shared.audio import AudioFraming, plan_audio
from triptych.models.shared.interleaving import interleaved_parts, runs_by_modality
from triptych.models.shared.mrope import MediaPositions, interleaved_positions, sequential_positions
from triptych.models.shared.patch_planner import VISION_TOKENS, PatchPlanner
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.video import PerFrameGeometry
from triptych.types import NO_CONTEXT, AudioHeader, ItemContext, ItemPlan, VideoHeader

AUDIO_TOKENS = ("audio_token_id", "audio_start_token_id")
AUDIO_END = "audio_end_token_id"
AUDIO_ENDS = frozenset(("<|audio_eos|>", "<|audio_end|>"))
"""The token after audio in published tokenizers, which not every config names."""


def thinker_config(config: ModelConfig) -> ModelConfig:
    """Return the settings of the thinker, which are at the top level if it was saved by itself."""
    return setting(config, "thinker_config", dict, default=config)


class OmniGeometry(PerFrameGeometry):
    """``PerFrameGeometry`` with the fixed bounds of the reference's processor, which ignores the config files."""

    default_size: ClassVar[dict[str, int]]

    @classmethod
    def from_config(cls, config: dict[str, Any], factor: int, temporal_patch_size: int) -> Self:
        silent = config | {"size": None, "min_pixels": None, "max_pixels": None}
        return super().from_config(silent, factor, temporal_patch_size)


class OmniPlanner(PatchPlanner):
    """``Planner`` of these families. Raises CheckpointError for a missing key or a value of the wrong type."""

    markers = AUDIO_ENDS

    def __init__(
        self,
        thinker: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None,
        *,
        cost_model: VisionCostModel,
        framing: AudioFraming,
        audio_cost: Callable[[int], float],
    ) -> None:
        """``audio_cost`` returns the audio tower's work for a window, by its number of frames."""
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
        self.placeholder_tokens = {**self.placeholder_tokens, "audio": setting(thinker, "audio_token_id", int)}
        self.audio_in_video = has_end
        self._audio_start = setting(thinker, "audio_start_token_id", int)
        self._audio_end = setting(thinker, AUDIO_END, int) if has_end else None
        self._positions_per_second = positive_number(thinker, "position_id_per_seconds", 25.0)
        self._framing = framing
        self._audio_cost = audio_cost

    def _plan_audio(self, header: AudioHeader, context: ItemContext = NO_CONTEXT) -> ItemPlan:
        return plan_audio(header, self._framing, self._audio_cost)

    def _with_sound(self, plan: ItemPlan, sound: AudioHeader) -> ItemPlan:
        if self._audio_end is None:
            return super()._with_sound(plan, sound)
        audio = self._plan_audio(sound)
        return msgspec.structs.replace(
            plan,
            rows=plan.rows + audio.rows,
            patches=plan.patches + audio.patches,
            cost=plan.cost + audio.cost,
            parts=interleaved_parts(self._order(plan, audio.rows), plan.parts, audio.parts),
            sound=sound,
        )

    @abstractmethod
    def _order(self, video: ItemPlan, audio_rows: int) -> Iterable[tuple[bool, int]]:
        """Return the order of a video's rows and its audio track's, as ``interleaved_parts`` takes it; an audio row
        takes one position."""

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

    def _times(self, plan: ItemPlan) -> NDArray[np.float64]:
        """Return where a video's temporal patches begin, in positions from its start, proportional to time."""
        # the reference's order of operations: rounding decides which of two simultaneous rows comes first
        return np.arange(plan.grid[0], dtype=np.float64) * self._seconds(plan) * self._positions_per_second

    def _seconds(self, plan: ItemPlan) -> float:
        """Return how long a temporal patch of a video lasts. The frame rate is the requested one or, if a number of
        frames was requested, that of the sampled frames."""
        assert isinstance(plan.header, VideoHeader)
        sampling = self._sampling.for_request(plan.sampling)
        rate = sampling.fps
        if plan.header.presampled or sampling.num_frames is not None:
            rate = self._sampled_fps(plan, plan.header)
        return self._geometry.temporal_patch_size / rate
