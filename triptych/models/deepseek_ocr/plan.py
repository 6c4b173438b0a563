"""Plans the images and prompts of DeepSeek-OCR and DeepSeek-OCR-2. Frontend; numpy only."""

from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, VISION, ModelConfig, at_most
from triptych.models.deepseek_ocr.config import image_token, ocr_config, text_config
from triptych.models.deepseek_ocr.views import BASE_SIZE, CROP_MODE, IMAGE_SIZE, Views
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan


class DeepseekOcrPlanner(PlainPlanner):
    """``Planner`` of both models. Raises CheckpointError for a missing key or a value of the wrong type."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        ocr = ocr_config(config)
        self._sam = ocr.sam
        self._views = Views.from_configs(ocr, preprocessor_config)
        sizes = (BASE_SIZE, IMAGE_SIZE) if ocr.is_first else ()
        self.options = AREA_OPTIONS | {CROP_MODE: bool} | dict.fromkeys(sizes, at_most(2**16))
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=max(self._views.grids.max_pixels, self._views.whole**2),
        )
        self._parts: dict[tuple[tuple[int, int] | None, int, bool], tuple[ItemPart, ...]] = {}

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds`` are those of the area of all tiles. Of several images, DeepSeek-OCR cuts none, unless the request
        asks for it. Without tiles, DeepSeek-OCR-2 shows the whole as large as a tile.

        Raises BadMediaSize for bounds that no grid of tiles is within, and for sizes of views that aren't served.
        """
        views = self._views
        cuts = bool(context.options.get(CROP_MODE, not (views.has_lines and context.siblings)))
        grid = views.grid(header.width, header.height, context.bounds) if cuts else None
        whole, stretched = views.whole_of(context.options, cuts=cuts)
        parts = self._parts_of(grid, whole, stretched)
        side = views.grids.factor
        height, width = (whole, whole) if grid is None else (grid[1] * side, grid[0] * side)
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=height,
            resized_width=width,
            grid=(1, height // self._sam.patch_size, width // self._sam.patch_size),
            rows=sum(part.rows for part in parts),
            patches=sum(part.patches for part in parts),
            cost=sum(part.cost for part in parts),
            parts=parts,
            bounds=context.bounds,
        )

    def _parts_of(self, grid: tuple[int, int] | None, whole: int, stretched: bool) -> tuple[ItemPart, ...]:
        """Return the parts of tiles of ``grid`` and of the whole."""
        key = grid, whole, stretched
        if key not in self._parts:
            sides = self._views.parts(*key)
            patches = [(part.side // self._sam.patch_size) ** 2 for part in sides]
            self._parts[key] = tuple(
                ItemPart(part.runs, count, self._sam.cost(count), VISION, part.payload)
                for part, count in zip(sides, patches, strict=True)
            )
        return self._parts[key]
