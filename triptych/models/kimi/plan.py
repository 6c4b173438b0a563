"""Plans the images, videos and prompts of Kimi-VL and Kimi K2.5. Frontend; numpy only."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, VISION, MediaToken, ModelConfig
from triptych.models.kimi.config import image_token, text_config, vision_config
from triptych.models.kimi.geometry import KimiK25Geometry, KimiVLGeometry, PaddedGeometry
from triptych.models.kimi.video import ChunkSampling, FrameGeometry, chunk_size, timestamp
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import VisionCostModel, check_aspect_ratio, patches_plan
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan, VideoHeader

VIDEO = "<|kimi_k25_video_placeholder|>"
"""What Kimi K2.5's templates have for a video; it is no token."""


class KimiVLPlanner(PlainPlanner):
    """``Planner`` of Kimi-VL. Raises CheckpointError for a missing key or a value of the wrong type."""

    geometry: ClassVar[type[PaddedGeometry]] = KimiVLGeometry
    around: ClassVar[tuple[str, ...]] = ("<|media_start|>", "<|media_content|>", "<|media_end|>")
    """Tokens that templates have around a placeholder."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        vision = vision_config(config)
        self._geometry = self.geometry.from_configs(config, preprocessor_config)
        self._cost_model = VisionCostModel(vision.hidden_size, vision.intermediate_size)
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._geometry.max_pixels,
        )
        self.media_tokens = frozenset((image_token(config), *self.around))

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for bounds that can't be met, and for an image with too long a side."""
        geometry = self._geometry.within(context.bounds)
        resized = geometry.resized(header.height, header.width)
        return patches_plan("image", header, resized, geometry, self._cost_model, bounds=context.bounds)


class KimiK25Planner(KimiVLPlanner):
    """``Planner`` of Kimi K2.5, which takes videos, too. Raises CheckpointError as ``KimiVLPlanner`` does."""

    geometry = KimiK25Geometry
    around = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")
    options = AREA_OPTIONS | FRAME_OPTIONS
    template_texts: Mapping[str, str] = {"video": VIDEO}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, preprocessor_config)
        self.placeholder_tokens = dict.fromkeys(("image", "video"), image_token(config))
        self._frames = FrameGeometry.from_configs(config, video_config or {})
        self._chunk = chunk_size(config, video_config or {})
        self._sampling = ChunkSampling.from_config(video_config or {}, self._chunk)

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """``bounds`` are those of the area of each frame.

        Raises UnsupportedMedia for invalid sampling, and BadMediaSize as ``_plan_image`` does and for an aspect ratio
        above 200.
        """
        check_aspect_ratio(header.width, header.height, "video")
        geometry = self._frames.within(context.bounds)
        frames = self._sampling.for_request(context.sampling).frames(header)
        height, width = geometry.resized(header.height, header.width)
        grid = height // geometry.patch_size, width // geometry.patch_size
        rows, parts = prod(grid) // geometry.merge_size**2, []
        for number in range(-(-len(frames) // self._chunk)):
            chunk = frames[number * self._chunk : (number + 1) * self._chunk]
            patches = len(chunk) * prod(grid)
            cost = self._cost_model.cost(patches)
            parts.append(ItemPart(((number * rows, rows),), patches, cost, VISION, chunk))
        return ItemPlan(
            modality="video",
            header=header,
            resized_height=height,
            resized_width=width,
            grid=(len(parts), *grid),
            rows=len(parts) * rows,
            patches=sum(part.patches for part in parts),
            cost=sum(part.cost for part in parts),
            parts=tuple(parts),
            bounds=context.bounds,
            sampling=context.sampling,
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return that of an image, or a placeholder for each chunk of a video, after the time of its first frame."""
        item = spelling(self.placeholder_tokens[plan.modality])
        if not isinstance(plan.header, VideoHeader):
            return item
        begin, content, end = self.around
        times = (timestamp(part.payload[0] / plan.header.rate) for part in plan.parts)
        return "".join(f"{time}{begin}video{content}{item}{end}" for time in times)

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return a run for each part."""
        return [part.rows for part in plan.parts]
