"""Plans Gemma 4's media and prompts. Frontend; numpy only.

The reference is ``Gemma4Processor`` in transformers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, MediaToken, ModelConfig, at_most
from triptych.models.gemma4.audio_config import audio_config, check_bands, has_audio
from triptych.models.gemma4.config import AUDIO_MARKERS, MARKERS, has_spans, text_config, token, vision_config
from triptych.models.gemma4.geometry import OPTION, BudgetGeometry, frame_geometry
from triptych.models.gemma4.speech import SpeechFeatures, WholeClip
from triptych.models.shared.audio import plan_audio
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import VisionCostModel, patches_plan
from triptych.models.shared.video import IntervalStartSampling, frame_sampling, sampled_frames
from triptych.types import AudioHeader, ImageHeader, ItemContext, ItemPlan, VideoHeader


class Gemma4Planner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a value that is invalid or not served."""

    options = AREA_OPTIONS | FRAME_OPTIONS | {OPTION: at_most(2**16)}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        vision = vision_config(config)
        self._geometry = BudgetGeometry.from_configs(config, preprocessor_config)
        self._frame_geometry = frame_geometry(config, video_config or {})
        self._sampling = frame_sampling(IntervalStartSampling, {"min_frames": 1, **(video_config or {})})
        self._cost_model = VisionCostModel(vision.hidden_size, vision.intermediate_size, mlp_matrices=3)
        start_end = [token(config, name) for name in MARKERS]
        markers = {"image": start_end, "video": start_end}
        if has_audio(config):
            markers["audio"] = [token(config, name) for name in AUDIO_MARKERS]
            self._framing = WholeClip(SpeechFeatures.from_config(preprocessor_config))
            audio = audio_config(config)
            check_bands(audio, self._framing.mel.num_bands)
            unit = self._cost_model.linear * vision.num_layers
            self._audio_cost = partial(audio.cost, unit=unit)
        super().__init__(
            {kind: token(config, f"{kind}_token_id") for kind in markers},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._geometry.max_pixels,
        )
        self._markers = markers
        self._has_spans = has_spans(config)
        if self._has_spans:
            self.atomic_rows = self._geometry.max_pixels // self._geometry.factor**2
        self.media_tokens |= frozenset(chain(*markers.values()))

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for bounds that can't be met."""
        bounds = self._geometry.bounds_of(context)
        resized = self._geometry.within(bounds).resized(header.height, header.width)
        return patches_plan(
            "image", header, resized, self._geometry, self._cost_model, bounds=bounds, atomic=self._has_spans
        )

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Bounds are those of each frame. Raises UnsupportedMedia for invalid sampling, and as ``_plan_image``."""
        bounds = self._frame_geometry.bounds_of(context)
        resized = self._frame_geometry.within(bounds).resized(header.height, header.width)
        return patches_plan(
            "video",
            header,
            resized,
            self._frame_geometry,
            self._cost_model,
            bounds=bounds,
            sampling=context.sampling,
            frames=self._sampling.for_request(context.sampling).frames(header),
            atomic=self._has_spans,
        )

    def _plan_audio(self, header: AudioHeader, context: ItemContext) -> ItemPlan:
        """Raises UnsupportedMedia if the model has no audio tower, and BadMediaSize and MediaTooLarge as
        ``SpeechFeatures`` does."""
        if "audio" not in self.placeholder_tokens:
            return super()._plan_audio(header, context)
        return plan_audio(header, self._framing, self._audio_cost)

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder between markers; one for each frame of a video, after its time."""
        start, end = self._markers[plan.modality]
        item = "".join(map(spelling, (start, self.placeholder_tokens[plan.modality], end)))
        if not isinstance(plan.header, VideoHeader):
            return item
        seconds = [frame / plan.header.rate for frame in sampled_frames(plan)]
        return " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {item}" for time in seconds)

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return the number of an image's embeddings, or those of each frame of a video."""
        return [part.rows for part in plan.parts]
