"""Plans images and videos for towers that take any grid of patches, and prompts with M-RoPE positions. Frontend; numpy
only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from triptych.errors import BadMediaSize, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, SIZE_OPTIONS, VISION, MediaToken, ModelConfig, Positions
from triptych.models.shared.geometry import ImageGeometry
from triptych.models.shared.mrope import MediaPositions, grid_positions, mrope_positions
from triptych.models.shared.settings import setting
from triptych.models.shared.video import VideoGeometry, VideoSampling, sampled_frames
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SAMPLING,
    MODEL_SIZE,
    NO_CONTEXT,
    AudioHeader,
    FrameSampling,
    ImageHeader,
    ItemContext,
    ItemPart,
    ItemPlan,
    MediaHeader,
    PixelBounds,
    Placement,
    VideoHeader,
)

MAX_ASPECT_RATIO = 200
MAX_SOURCE_PIXELS = 50_000_000
SQUARE_FACTOR = 4
"""How many times ``max_source_pixels`` an image may have once it is padded to a square."""
VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class VisionCostModel:
    """Estimates a vision tower's work from its dimensions."""

    hidden_size: int
    intermediate_size: int
    mlp_matrices: int = 2
    """3 for a gated MLP, otherwise 2."""
    windowed_share: float = 0.0
    """Share of the layers whose attention is windowed."""
    window: int = 0
    """Patches per window."""

    @property
    def linear(self) -> int:
        """Multiplications in one layer's linear layers for one patch."""
        return 4 * self.hidden_size**2 + self.mlp_matrices * self.hidden_size * self.intermediate_size

    def cost(self, patches: int) -> float:
        """Return the work of encoding an image or temporal patch of n patches, in units of one patch's linear layers.

        A layer of hidden size h and intermediate size i takes n * (4h² + 2hi) multiplications in its linear layers
        (query, key, value and output; two or three of the MLP). Attention (scores and weighted sum) takes 2n²h, where
        windowed layers have n * window instead of n². Depth multiplies both alike.
        """
        attended = (1 - self.windowed_share) * patches + self.windowed_share * min(patches, self.window)
        return patches * (1 + 2 * self.hidden_size * attended / self.linear)


GIVEN = "rows"
"""The format of a header that stands for an image whose rows are given."""


def check_source_size(kind: str, width: int, height: int, max_pixels: int = MAX_SOURCE_PIXELS) -> None:
    """Check the size of an image or of a video's frames; ``kind`` names it in errors.

    Raises BadMediaSize for a side below 1, and MediaTooLarge for more than ``max_pixels``.
    """
    if min(width, height) < 1:
        raise BadMediaSize(f"the {kind} is {width} by {height} pixels; both sides must be at least 1")
    if width * height > max_pixels:
        raise MediaTooLarge(
            f"the {kind} has {width * height} pixels ({width} by {height}); at most {max_pixels} are taken"
        )


def check_square_size(width: int, height: int, max_pixels: int = MAX_SOURCE_PIXELS) -> None:
    """Check an image that is padded to a square. Raises MediaTooLarge for a square of more than four times
    ``max_pixels``, which a long, thin image may become."""
    side = max(width, height)
    check_source_size("image, padded to a square,", side, side, SQUARE_FACTOR * max_pixels)


def check_aspect_ratio(width: int, height: int, what: str = "image") -> None:
    """Raise BadMediaSize for an image, or ``what`` it is, whose sides differ more than ``MAX_ASPECT_RATIO``-fold."""
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise BadMediaSize(
            f"the {what} is {width} by {height} pixels; its sides may differ at most {MAX_ASPECT_RATIO}-fold"
        )


def patches_plan(
    modality: str,
    header: MediaHeader,
    resized: tuple[int, int],
    geometry: ImageGeometry,
    cost_model: VisionCostModel,
    *,
    bounds: PixelBounds,
    sampling: FrameSampling = MODEL_SAMPLING,
    frames: tuple[int, ...] = (),
    atomic: bool = False,
) -> ItemPlan:
    """Plan a part for each temporal patch of an item that becomes ``resized``, (height, width). A part's payload is the
    numbers of a video's frames in it, which ``sampled_frames`` reads."""
    height, width = resized
    size = geometry.temporal_patch_size
    in_time = -(-len(frames) // size) if frames else 1
    grid = (in_time, height // geometry.patch_size, width // geometry.patch_size)
    patches = grid[1] * grid[2]
    rows, cost = patches // geometry.merge_size**2, cost_model.cost(patches)
    return ItemPlan(
        modality=modality,
        header=header,
        resized_height=height,
        resized_width=width,
        grid=grid,
        rows=in_time * rows,
        patches=in_time * patches,
        cost=in_time * cost,
        parts=tuple(
            ItemPart(((number * rows, rows),), patches, cost, VISION, frames[number * size : (number + 1) * size])
            for number in range(in_time)
        ),
        bounds=bounds,
        sampling=sampling,
        atomic=atomic,
    )


class PatchPlanner:
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type.

    By default a video's embeddings form one contiguous run, and its temporal patches are one position apart; families
    override this.
    """

    image_geometry: ClassVar[type[ImageGeometry]] = ImageGeometry
    """How the family resizes images."""
    video_sampling: ClassVar[type[VideoSampling]]
    """How the family samples frames."""
    video_geometry: ClassVar[type[VideoGeometry]]
    """How the family resizes frames."""
    atomic_rows = 0
    audio_in_video = False
    options = AREA_OPTIONS | SIZE_OPTIONS | FRAME_OPTIONS
    template_texts: Mapping[str, str] = {}
    markers: frozenset[str] = frozenset()
    loras: Mapping[str, str] = {}

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        context_length: int,
        cost_model: VisionCostModel,
        media_tokens: Sequence[str] = VISION_TOKENS,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        """``media_tokens`` are the settings with the ids of tokens that only the template may produce."""
        self.placeholder_tokens: Mapping[str, MediaToken] = {
            "image": setting(config, "image_token_id", int),
            "video": setting(config, "video_token_id", int),
        }
        self.media_tokens: frozenset[MediaToken] = frozenset(setting(config, key, int) for key in media_tokens)
        self.context_length = context_length
        self._geometry = self.image_geometry.from_configs(config, preprocessor_config)
        self.max_image_pixels = self._geometry.max_pixels
        in_time = self._geometry.temporal_patch_size
        self._sampling: VideoSampling = self.video_sampling.from_config(video_config or {}, in_time)
        self._video_geometry = self.video_geometry.from_config(video_config or {}, self._geometry.factor, in_time)
        self._max_source_pixels = max_source_pixels
        self._cost_model = cost_model

    def plan(self, header: MediaHeader, context: ItemContext = NO_CONTEXT) -> ItemPlan:
        """Plan an image, a video or an audio clip. ``siblings`` and ``index`` change nothing.

        Raises MediaTooLarge if an image or a frame exceeds ``max_source_pixels``. Raises BadMediaSize for an aspect
        ratio above 200, unsatisfiable bounds and too short audio, and UnsupportedMedia for invalid sampling or
        unsupported audio.
        """
        if isinstance(header, AudioHeader):
            return self._plan_audio(header)
        kind = "video" if isinstance(header, VideoHeader) else "image"
        check_source_size(kind, header.width, header.height, self._max_source_pixels)
        if isinstance(header, VideoHeader):
            plan = self._plan_video(header, self._bounds(context, "video"), context.sampling)
            return self._with_sound(plan, context.sound) if context.sound else plan
        return self._plan_image(header, self._bounds(context, "image"))

    def plan_rows(self, grid: tuple[int, int, int]) -> ItemPlan:
        """Plan an image whose rows are given, by its patches in time, rows and columns. Raises BadMediaSize for a grid
        that no image has."""
        in_time, rows, columns = grid
        size, merge = self._geometry.patch_size, self._geometry.merge_size
        if in_time != 1 or rows % merge or columns % merge:
            raise BadMediaSize(f"no image has the grid {in_time} × {rows} × {columns}")
        header = ImageHeader(GIVEN, columns * size, rows * size)
        check_source_size("image", header.width, header.height, self._max_source_pixels)
        check_aspect_ratio(header.width, header.height)
        resized = (header.height, header.width)
        return patches_plan("image", header, resized, self._geometry, self._cost_model, bounds=MODEL_BOUNDS)

    def _bounds(self, context: ItemContext, modality: str) -> PixelBounds:
        """Return the bounds of an item's area that a request asks for."""
        size = context.size
        return PixelBounds(size.shortest_edge, size.longest_edge) if size != MODEL_SIZE else context.bounds

    def _plan_image(self, header: ImageHeader, bounds: PixelBounds) -> ItemPlan:
        width, height = header.width, header.height
        check_aspect_ratio(width, height)
        resized = self._geometry.within(bounds).resized(height, width)
        return patches_plan("image", header, resized, self._geometry, self._cost_model, bounds=bounds)

    def _plan_video(self, header: VideoHeader, bounds: PixelBounds, sampling: FrameSampling) -> ItemPlan:
        frames = self._sampling.for_request(sampling).frames(header)
        resized = self._video_geometry.within(bounds).resized(len(frames), header.height, header.width)
        return patches_plan(
            "video", header, resized, self._geometry, self._cost_model, bounds=bounds, sampling=sampling, frames=frames
        )

    def _plan_audio(self, header: AudioHeader) -> ItemPlan:
        raise UnsupportedMedia("the model takes no audio clips")

    def _with_sound(self, plan: ItemPlan, sound: AudioHeader) -> ItemPlan:
        raise UnsupportedMedia("the model takes no audio track with a video")

    def num_frames(self, plan: ItemPlan) -> int:
        """Return how many frames of a planned video are sampled."""
        return len(sampled_frames(plan))

    def label(self, plan: ItemPlan, context: ItemContext) -> str:
        """Return nothing."""
        return ""

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder unchanged."""
        return spelling(self.placeholder_tokens[plan.modality])

    def timestamps(self, plan: ItemPlan) -> Sequence[float]:
        """Return the times that the prompt has before an item's temporal patches, in seconds; none in most families."""
        return ()

    def why_untimed(self, plan: ItemPlan) -> str:
        """Return why engines don't position a video right that are told its grid alone; empty if they do."""
        return ""

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return one run of all embeddings."""
        return [plan.rows]

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
