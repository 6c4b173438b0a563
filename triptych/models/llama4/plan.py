"""Plans Llama 4's images and prompts. Frontend; numpy only.

The reference is ``Llama4Processor`` in transformers: an image becomes tiles, with separators in the prompt, and then
the whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

from triptych.errors import BadMediaSize
from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, VISION, MediaToken, ModelConfig, at_most
from triptych.models.llama4.config import image_token, text_config, vision_config
from triptych.models.llama4.tiles import CanvasTiles
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan, PixelBounds

START, END, WHOLE = "<|image_start|>", "<|image_end|>", "<|image|>"
NEXT_COLUMN, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
"""Tokens between the tiles of a row, and after each row."""
FILLED = (1,)
"""``payload`` of the parts of an image that is enlarged to the largest canvas."""


class Llama4Planner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = AREA_OPTIONS | {"max_patches": at_most(2**16), "resize_to_max_canvas": bool}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._vision = vision_config(config)
        self._tiles = CanvasTiles.from_config(preprocessor_config, self._vision.clip.image_size)
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._tiles.max_pixels,
        )
        self.template_texts = {"image": WHOLE}
        self.media_tokens = frozenset((image_token(config), START, END, WHOLE, NEXT_COLUMN, NEXT_ROW))

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds`` are those of the area of all tiles but the whole. Raises BadMediaSize for bounds that no whole
        tiles are within, and for more tiles than the model's own."""
        bounds, fills = self._bounds(context), self._fills(context)
        canvas = self._within(bounds, fills).canvas(header.height, header.width)
        clip, rows, count = self._vision.clip, self._vision.rows, canvas.parts
        payload, cost = FILLED if fills else (), clip.cost
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=canvas.rows * clip.image_size,
            resized_width=canvas.columns * clip.image_size,
            grid=(1, canvas.rows * clip.side, canvas.columns * clip.side),
            rows=count * rows,
            patches=count * clip.side**2,
            cost=count * cost,
            parts=tuple(ItemPart(((part * rows, rows),), clip.side**2, cost, VISION, payload) for part in range(count)),
            bounds=bounds,
        )

    def _within(self, bounds: PixelBounds, fills: bool) -> CanvasTiles:
        return self._tiles.within(bounds).filling(fills)

    def _fills(self, context: ItemContext) -> bool:
        return bool(context.options.get("resize_to_max_canvas", self._tiles.fills))

    def _bounds(self, context: ItemContext) -> PixelBounds:
        """Return the bounds of the tiles' area: the lower of those by pixels and by ``max_patches``."""
        most = int(context.options.get("max_patches", 0)) * self._tiles.factor**2
        if not most:
            return context.bounds
        if most > self._tiles.max_pixels:
            own = self._tiles.max_pixels // self._tiles.factor**2
            raise BadMediaSize(f"max_patches {context.options['max_patches']} exceeds the model's own, {own}")
        return PixelBounds(context.bounds.min_pixels, min(most, context.bounds.max_pixels or most))

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return a placeholder for each tile, with separators, and one for the whole."""
        tile, side = spelling(self.placeholder_tokens[plan.modality]), self._vision.clip.image_size
        tiles = ""
        if plan.num_parts > 1:
            columns, rows = plan.resized_width // side, plan.resized_height // side
            tiles = (NEXT_COLUMN.join([tile] * columns) + NEXT_ROW) * rows
        return f"{START}{tiles}{WHOLE}{tile}{END}"

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return a run for each tile, and one for the whole."""
        return [part.rows for part in plan.parts]
