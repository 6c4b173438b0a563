"""Plans the images and prompts of Kimi-VL and Kimi K2.5. Frontend; numpy only."""

from typing import Any, ClassVar

from triptych.models.backbones.rope import context_length
from triptych.models.base import VISION, ModelConfig
from triptych.models.kimi.config import image_token, text_config, vision_config
from triptych.models.kimi.geometry import KimiK25Geometry, KimiVLGeometry, PaddedGeometry
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import MAX_SOURCE_PIXELS, VisionCostModel
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan


class KimiVLPlanner(PlainPlanner):
    """``Planner`` of Kimi-VL. Raises CheckpointError for a missing key or a value of the wrong type."""

    geometry: ClassVar[type[PaddedGeometry]] = KimiVLGeometry
    markers: ClassVar[tuple[str, ...]] = ("<|media_start|>", "<|media_content|>", "<|media_end|>")
    """Tokens that templates have around a placeholder."""

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        vision = vision_config(config)
        self._geometry = self.geometry.from_configs(config, preprocessor_config)
        self._cost_model = VisionCostModel(vision.hidden_size, vision.intermediate_size)
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._geometry.max_pixels,
            max_source_pixels=max_source_pixels,
        )
        self.media_tokens = frozenset((image_token(config), *self.markers))

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for bounds that can't be met, and for an image with too long a side."""
        geometry = self._geometry.within(context.bounds)
        height, width = geometry.resized(header.height, header.width)
        grid = 1, height // geometry.patch_size, width // geometry.patch_size
        patches = grid[1] * grid[2]
        rows, cost = patches // geometry.merge_size**2, self._cost_model.cost(patches)
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=height,
            resized_width=width,
            grid=grid,
            rows=rows,
            patches=patches,
            cost=cost,
            parts=(ItemPart(((0, rows),), patches, cost, VISION),),
            bounds=context.bounds,
        )


class KimiK25Planner(KimiVLPlanner):
    """``Planner`` of Kimi K2.5. Raises CheckpointError as ``KimiVLPlanner`` does."""

    geometry = KimiK25Geometry
    markers = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")
