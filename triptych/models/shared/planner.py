"""Plans images and videos for towers that take any grid of patches, and prompts in M-RoPE positions. Frontend; numpy
only."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from triptych.errors import BadMediaSize, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.models.base import ModelConfig, Positions
from triptych.models.shared.geometry import ImageGeometry
from triptych.models.shared.mrope import Shape, grid_shape, mrope_positions
from triptych.models.shared.settings import setting
from triptych.models.shared.video import VideoGeometry, VideoSampling
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SAMPLING,
    AudioHeader,
    FrameSampling,
    ImageHeader,
    ItemPlan,
    MediaHeader,
    PixelBounds,
    Placement,
    VideoHeader,
)

MAX_ASPECT_RATIO = 200
MAX_SOURCE_PIXELS = 50_000_000
VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class EncoderWork:
    """What a tower of transformer layers computes. ``mlp_matrices`` is 3 for a gated MLP, else 2; in a
    ``windowed_share`` of the layers, attention reaches over ``window`` patches only."""

    hidden_size: int
    intermediate_size: int
    mlp_matrices: int = 2
    windowed_share: float = 0.0
    window: int = 0

    @property
    def linear(self) -> int:
        """Multiplications of a layer's linear layers for one patch."""
        return 4 * self.hidden_size**2 + self.mlp_matrices * self.hidden_size * self.intermediate_size

    def cost(self, patches: int) -> float:
        """Work of encoding an image, or a patch in time, of n patches; the unit is the linear layers' work for one.

        A layer of hidden size h and intermediate size i takes n * (4h² + 2hi) multiplications in its linear layers
        (query, key, value and output; the two, or three, of the MLP) and 2n²h in attention (scores and weighted sum),
        where a window has n * window in place of n². Depth multiplies all of it alike.
        """
        seen = (1 - self.windowed_share) * patches + self.windowed_share * min(patches, self.window)
        return patches * (1 + 2 * self.hidden_size * seen / self.linear)


class PatchPlanner:
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type.

    ``video_sampling`` and ``video_geometry`` are a family's own, and so is what it overrides: here a video's rows stand
    at one run, and its patches in time are a position apart.
    """

    video_sampling: ClassVar[type[VideoSampling]]
    video_geometry: ClassVar[type[VideoGeometry]]
    audio_in_video = False

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        context_length: int,
        work: EncoderWork,
        media_tokens: Sequence[str] = VISION_TOKENS,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        """``media_tokens`` names the settings that say which tokens may only come from the template."""
        self.placeholder_ids: Mapping[str, int] = {
            "image": setting(config, "image_token_id", int),
            "video": setting(config, "video_token_id", int),
        }
        self.media_token_ids = frozenset(setting(config, key, int) for key in media_tokens)
        self.context_length = context_length
        self._geometry = ImageGeometry.from_configs(config, preprocessor_config)
        self.max_image_pixels = self._geometry.max_pixels
        in_time = self._geometry.temporal_patch_size
        self._sampling = self.video_sampling.from_config(video_config or {}, in_time)
        self._video_geometry = self.video_geometry.from_config(video_config or {}, self._geometry.factor, in_time)
        self._max_source_pixels = max_source_pixels
        self._work = work

    def plan(
        self,
        header: MediaHeader,
        bounds: PixelBounds = MODEL_BOUNDS,
        sampling: FrameSampling = MODEL_SAMPLING,
        sound: AudioHeader | None = None,
    ) -> ItemPlan:
        """What the image, video or audio will become; ``sound`` is that of a video that is heard.

        Raises MediaTooLarge for more than ``max_source_pixels`` (of an image, or of one frame), BadMediaSize for an
        aspect ratio above 200, for bounds that can't be kept and for audio that is too short, and UnsupportedMedia for
        such sampling and for audio where the family takes none.
        """
        if isinstance(header, AudioHeader):
            return self._plan_audio(header)
        kind = "video" if isinstance(header, VideoHeader) else "image"
        width, height = header.width, header.height
        if min(width, height) < 1:
            raise BadMediaSize(f"the {kind} is {width} by {height} pixels; both sides must be at least 1")
        if width * height > self._max_source_pixels:
            raise MediaTooLarge(
                f"the {kind} has {width * height} pixels ({width} by {height}); "
                f"at most {self._max_source_pixels} are taken"
            )
        if isinstance(header, VideoHeader):
            plan = self._plan_video(header, bounds, sampling)
            return self._with_sound(plan, sound) if sound else plan
        return self._plan_image(header, bounds)

    def _plan_image(self, header: ImageHeader, bounds: PixelBounds) -> ItemPlan:
        width, height = header.width, header.height
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise BadMediaSize(
                f"the image is {width} by {height} pixels; its sides may differ at most {MAX_ASPECT_RATIO}-fold"
            )
        return self._item_plan("image", header, self._geometry.within(bounds).resized(height, width), bounds=bounds)

    def _plan_video(self, header: VideoHeader, bounds: PixelBounds, sampling: FrameSampling) -> ItemPlan:
        frames = self._sampling.asked(sampling).frames(header)
        resized = self._video_geometry.within(bounds).resized(len(frames), header.height, header.width)
        return self._item_plan("video", header, resized, bounds=bounds, sampling=sampling, frames=frames)

    def _plan_audio(self, header: AudioHeader) -> ItemPlan:
        raise UnsupportedMedia("the model takes no audio clips")

    def _with_sound(self, plan: ItemPlan, sound: AudioHeader) -> ItemPlan:
        raise UnsupportedMedia("the model doesn't hear videos")

    def _item_plan(
        self,
        modality: str,
        header: MediaHeader,
        resized: tuple[int, int],
        *,
        bounds: PixelBounds,
        sampling: FrameSampling = MODEL_SAMPLING,
        frames: tuple[int, ...] = (),
    ) -> ItemPlan:
        height, width = resized
        in_time = -(-len(frames) // self._geometry.temporal_patch_size) if frames else 1
        grid = (in_time, height // self._geometry.patch_size, width // self._geometry.patch_size)
        return ItemPlan(
            modality=modality,
            header=header,
            resized_height=height,
            resized_width=width,
            grid=grid,
            rows=math.prod(grid) // self._geometry.merge_size**2,
            rows_per_part=grid[1] * grid[2] // self._geometry.merge_size**2,
            cost=in_time * self._work.cost(grid[1] * grid[2]),
            bounds=bounds,
            sampling=sampling,
            frames=frames,
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[int], str]) -> str:
        """The template's own stays as it is."""
        return spelling(self.placeholder_ids[plan.modality])

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """All rows at one."""
        return [plan.rows]

    def _shapes(self, plan: ItemPlan) -> list[Shape]:
        """The positions of each run of an item's rows."""
        merge = self._geometry.merge_size
        frames, rows, columns = plan.grid
        return [self._shape(plan, frames, rows // merge, columns // merge)]

    def _shape(self, plan: ItemPlan, frames: int, height: int, width: int) -> Shape:
        """The positions of an item of so many frames, rows and columns of tokens."""
        return grid_shape(frames, height, width)

    @staticmethod
    def _seen_rate(plan: ItemPlan, header: VideoHeader) -> float:
        """Frames per second, of those that are seen."""
        return len(plan.frames) / header.frames * header.rate

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """M-RoPE positions. Raises PlanMismatch where a placement isn't its plan's, or placements overlap or leave the
        prompt."""
        spans = [span for placement in placements for span in placement.spans]
        shapes = [shape for plan in plans for shape in self._shapes(plan)]
        if len(spans) != len(shapes):
            raise PlanMismatch(f"{len(shapes)} runs of rows can't be at {len(spans)} places")
        return mrope_positions(num_tokens, spans, shapes)
