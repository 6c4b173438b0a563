"""Plans Qwen2.5-Omni's images, videos, audio and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen2_5OmniProcessor`` and
``Qwen2_5OmniThinkerForConditionalGeneration.get_rope_index`` in transformers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig, Positions
from triptych.models.qwen2_5_omni.config import thinker_settings, window_framing
from triptych.models.qwen2_5_vl.plan import vision_cost_model
from triptych.models.shared.mrope import MediaPositions, timed_grid_positions
from triptych.models.shared.omni import OmniGeometry, OmniPlanner
from triptych.models.shared.settings import setting
from triptych.models.shared.video import IntervalStartSampling
from triptych.models.shared.whisper_config import WhisperConfig
from triptych.types import ItemPlan, Placement, VideoHeader


class Qwen25OmniGeometry(OmniGeometry):
    """``OmniGeometry`` of this family."""

    default_size: ClassVar = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}


class Qwen25OmniPlanner(OmniPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    video_sampling = IntervalStartSampling
    video_geometry = Qwen25OmniGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_settings(config)
        cost_model = vision_cost_model(setting(thinker, "vision_config", dict))
        tower = WhisperConfig.from_config(setting(thinker, "audio_config", dict))
        width = setting(thinker, "text_config.hidden_size", int)
        unit = cost_model.linear * setting(thinker, "vision_config.depth", int)
        super().__init__(
            thinker,
            preprocessor_config,
            video_config,
            cost_model=cost_model,
            framing=window_framing(thinker, preprocessor_config),
            audio_cost=lambda frames: tower.cost(frames, width, unit),
        )
        self._chunk = int(self._positions_per_second * setting(thinker, "seconds_per_chunk", float, default=2.0))
        if self._chunk < 1:
            raise CheckpointError("config.json: position_id_per_seconds times seconds_per_chunk must be at least 1")

    def _order(self, video: ItemPlan, audio_rows: int) -> Iterator[tuple[bool, int]]:
        """Alternate between the video's rows and the audio's of each chunk of time."""
        times, rows = self._times(video).tolist(), video.parts[0].rows
        seen, heard = _ends(times, rows, self._chunk), _ends(range(audio_rows), 1, self._chunk)
        for number in range(max(len(seen), len(heard))):
            for is_audio, ends in ((False, seen), (True, heard)):
                if number < len(ends):
                    yield is_audio, ends[number] - (ends[number - 1] if number else 0)

    def _grid_positions(self, plan: ItemPlan, frames: int, height: int, width: int) -> MediaPositions:
        if not isinstance(plan.header, VideoHeader):
            return super()._grid_positions(plan, frames, height, width)
        # in float32, like the reference, and rounded down
        seconds = np.arange(frames, dtype=np.float32) * np.float32(self._seconds(plan))
        times = np.floor(seconds * np.float32(self._positions_per_second))
        return timed_grid_positions(times.astype(np.float64), height, width)

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """See ``PatchPlanner.positions``. The two markers before a video with audio share a position, and so do the two
        behind it."""
        prompt = super().positions(num_tokens, placements, plans).prompt
        for placement, plan in zip(placements, plans, strict=True):
            if plan.sound:
                prompt[:, max(placement.start - 1, 0) :] -= 1
                prompt[:, placement.end + 1 :] -= 1
        return Positions(prompt=prompt, next_position=float(prompt.max(initial=-1)) + 1)


def _ends(times: Sequence[float], rows: int, chunk: int) -> list[int]:
    """Return where each chunk's rows end, of patches at ``times`` with ``rows`` each.

    As in the reference, ``Qwen2_5OmniProcessor.get_chunked_index``, a row begins at most one chunk: if several chunks
    pass between two patches, then the first rows of the second patch are chunks of their own.
    """
    ends: list[int] = []
    for number, time in enumerate(times):
        first = number * rows
        begun = 0
        while begun < rows and time >= (len(ends) + 1) * chunk:
            ends.append(first + begun)
            begun += 1
    return [*ends, len(times) * rows]
