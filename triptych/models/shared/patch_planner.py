"""Plans images and videos for towers that take any grid of patches, and prompts with M-RoPE positions. Frontend; numpy
only."""

from collections.abc import Sequence
from typing import Any, ClassVar

from triptych.errors import BadMediaSize, PlanMismatch, UnsupportedMedia
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, SIZE_OPTIONS, MediaToken, ModelConfig, Positions
from triptych.models.shared.geometry import ImageGeometry
from triptych.models.shared.mrope import MediaPositions, grid_positions, mrope_positions
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import VisionCostModel, check_aspect_ratio, check_source_size, patches_plan
from triptych.models.shared.settings import setting
from triptych.models.shared.video import VideoGeometry, VideoSampling, sampled_frames
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SIZE,
    AudioHeader,
    ImageHeader,
    ItemContext,
    ItemPlan,
    PixelBounds,
    Placement,
    VideoHeader,
)

VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
GIVEN = "rows"
"""The format of a header that stands for an image whose rows are given."""


class PatchPlanner(PlainPlanner):
    """``Planner`` of images and videos in patches. Raises CheckpointError for a missing key or a value of the wrong
    type.

    By default a video's embeddings form one contiguous run, and its temporal patches are one position apart; families
    override this.
    """

    image_geometry: ClassVar[type[ImageGeometry]] = ImageGeometry
    """How the family resizes images."""
    video_sampling: ClassVar[type[VideoSampling]]
    """How the family samples frames."""
    video_geometry: ClassVar[type[VideoGeometry]]
    """How the family resizes frames."""
    options = AREA_OPTIONS | SIZE_OPTIONS | FRAME_OPTIONS

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        context_length: int,
        cost_model: VisionCostModel,
        media_tokens: Sequence[str] = VISION_TOKENS,
    ) -> None:
        """``media_tokens`` are the settings with the ids of tokens that only the template may produce."""
        geometry = self.image_geometry.from_configs(config, preprocessor_config)
        tokens: dict[str, MediaToken] = {kind: setting(config, f"{kind}_token_id", int) for kind in ("image", "video")}
        super().__init__(tokens, context_length=context_length, max_image_pixels=geometry.max_pixels)
        self.media_tokens = frozenset(setting(config, key, int) for key in media_tokens)
        self._geometry, in_time = geometry, geometry.temporal_patch_size
        self._sampling: VideoSampling = self.video_sampling.from_config(video_config or {}, in_time)
        self._video_geometry = self.video_geometry.from_config(video_config or {}, geometry.factor, in_time)
        self._cost_model = cost_model

    def plan_rows(self, grid: tuple[int, int, int]) -> ItemPlan:
        """Plan an image whose rows are given, by its patches in time, rows and columns. Raises BadMediaSize for a grid
        that no image has."""
        in_time, rows, columns = grid
        size, merge = self._geometry.patch_size, self._geometry.merge_size
        if in_time != 1 or rows % merge or columns % merge:
            raise BadMediaSize(f"no image has the grid {in_time} × {rows} × {columns}")
        header = ImageHeader(GIVEN, columns * size, rows * size)
        check_source_size("image", header.width, header.height)
        check_aspect_ratio(header.width, header.height)
        resized = (header.height, header.width)
        return patches_plan("image", header, resized, self._geometry, self._cost_model, bounds=MODEL_BOUNDS)

    def _bounds(self, context: ItemContext, modality: str) -> PixelBounds:
        """Return the bounds of an item's area that a request asks for."""
        size = context.size
        return PixelBounds(size.shortest_edge, size.longest_edge) if size != MODEL_SIZE else context.bounds

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for unsatisfiable bounds."""
        bounds = self._bounds(context, "image")
        resized = self._geometry.within(bounds).resized(header.height, header.width)
        return patches_plan("image", header, resized, self._geometry, self._cost_model, bounds=bounds)

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for unsatisfiable bounds and for too short audio, and UnsupportedMedia for invalid
        sampling or unsupported audio."""
        bounds = self._bounds(context, "video")
        frames = self._sampling.for_request(context.sampling).frames(header)
        plan = patches_plan(
            "video",
            header,
            self._video_geometry.within(bounds).resized(len(frames), header.height, header.width),
            self._geometry,
            self._cost_model,
            bounds=bounds,
            sampling=context.sampling,
            frames=frames,
        )
        return self._with_sound(plan, context.sound) if context.sound else plan

    def _with_sound(self, plan: ItemPlan, sound: AudioHeader) -> ItemPlan:
        raise UnsupportedMedia("the model takes no audio track with a video")

    def timestamps(self, plan: ItemPlan) -> Sequence[float]:
        """Return the times that the prompt has before an item's temporal patches, in seconds; none in most families."""
        return ()

    def why_untimed(self, plan: ItemPlan) -> str:
        """Return why engines don't position a video right that are told its grid alone; empty if they do."""
        return ""

    def _run_positions(self, plan: ItemPlan) -> list[MediaPositions]:
        """Return the positions of each run of ``runs``."""
        merge = self._geometry.merge_size
        frames, rows, columns = plan.grid
        return [self._grid_positions(plan, frames, rows // merge, columns // merge)]

    def _grid_positions(self, plan: ItemPlan, frames: int, height: int, width: int) -> MediaPositions:
        """Return the positions of a grid of tokens: frames, rows, columns."""
        return grid_positions(frames, height, width)

    @staticmethod
    def _sampled_fps(plan: ItemPlan, header: VideoHeader) -> float:
        """Return the frame rate of the sampled frames, per second."""
        return len(sampled_frames(plan)) / header.frames * header.rate

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Return the M-RoPE positions. Raises PlanMismatch if a placement doesn't fit its plan, or if placements
        overlap or extend beyond the prompt."""
        spans = [span for placement in placements for span in placement.spans]
        media = [run for plan in plans for run in self._run_positions(plan)]
        if len(spans) != len(media):
            raise PlanMismatch(f"{len(media)} runs of rows can't be at {len(spans)} places")
        return mrope_positions(num_tokens, spans, media)
