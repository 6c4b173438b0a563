"""Plans images for Pixtral's tower, and their prompts. Frontend; numpy only.

The reference is ``PixtralProcessor`` in transformers: a marker follows each row of an image's embeddings.
"""

from collections.abc import Callable, Sequence

from triptych.models.base import AREA_OPTIONS, SIZE_OPTIONS, MediaToken
from triptych.models.shared.geometry import edge_bounds
from triptych.models.shared.longest_edge import LongestEdgeGeometry
from triptych.models.shared.pixtral_config import PixtralConfig
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import VisionCostModel, patches_plan
from triptych.types import ImageHeader, ItemContext, ItemPlan

ROW_END, IMAGE_END = "[IMG_BREAK]", "[IMG_END]"
"""Tokens after each row of embeddings, and after the last one."""


class MarkedRowsPlanner(PlainPlanner):
    """``Planner`` of images whose rows of embeddings have markers."""

    options = AREA_OPTIONS | SIZE_OPTIONS

    def __init__(
        self,
        vision: PixtralConfig,
        geometry: LongestEdgeGeometry,
        image_token: int,
        *,
        context_length: int,
    ) -> None:
        """``image_token`` is the placeholder's id."""
        self._geometry = geometry
        self._cost_model = VisionCostModel(vision.hidden_size, vision.intermediate_size, mlp_matrices=3)
        super().__init__(
            {"image": image_token},
            context_length=context_length,
            max_image_pixels=geometry.max_pixels,
        )
        self.media_tokens = frozenset((image_token, ROW_END, IMAGE_END))

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for bounds that can't be met."""
        bounds, geometry = edge_bounds(context), self._geometry
        resized = geometry.within(bounds).resized(header.height, header.width)
        return patches_plan("image", header, resized, geometry, self._cost_model, bounds=bounds)

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return a placeholder for each row of embeddings, followed by its marker."""
        row = spelling(self.placeholder_tokens[plan.modality])
        return ROW_END.join([row] * len(self.runs(plan))) + IMAGE_END

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return a run for each row of embeddings."""
        _, rows, columns = plan.grid
        merge = self._geometry.merge_size
        return [columns // merge] * (rows // merge)
