"""Plans the images and prompts of Kimi-VL and Kimi K2.5. Frontend; numpy only."""

from typing import Any, ClassVar

from triptych.models.backbones.rope import context_length
from triptych.models.base import ModelConfig
from triptych.models.kimi.config import image_token, text_config, vision_config
from triptych.models.kimi.geometry import KimiK25Geometry, KimiVLGeometry, PaddedGeometry
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import MAX_SOURCE_PIXELS, VisionCostModel, patches_plan
from triptych.types import ImageHeader, ItemContext, ItemPlan


class KimiVLPlanner(PlainPlanner):
    """``Planner`` of Kimi-VL. Raises CheckpointError for a missing key or a value of the wrong type."""

    geometry: ClassVar[type[PaddedGeometry]] = KimiVLGeometry
    around: ClassVar[tuple[str, ...]] = ("<|media_start|>", "<|media_content|>", "<|media_end|>")
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
        self.media_tokens = frozenset((image_token(config), *self.around))

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for bounds that can't be met, and for an image with too long a side."""
        geometry = self._geometry.within(context.bounds)
        resized = geometry.resized(header.height, header.width)
        return patches_plan("image", header, resized, geometry, self._cost_model, bounds=context.bounds)


class KimiK25Planner(KimiVLPlanner):
    """``Planner`` of Kimi K2.5. Raises CheckpointError as ``KimiVLPlanner`` does."""

    geometry = KimiK25Geometry
    around = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")
