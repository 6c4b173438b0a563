"""Plans InternVL's images and prompts. Frontend; numpy only.

The reference is ``InternVLProcessor`` in transformers: an image becomes a grid of tiles and, if that is more than one,
a thumbnail after them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from triptych.errors import BadMediaSize, UnsupportedMedia
from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, VISION, MediaToken, ModelConfig, Options, at_most
from triptych.models.internvl.config import (
    frame_settings,
    has_thumbnail,
    image_token,
    is_original,
    text_config,
    tile_grids,
    tile_settings,
    unified,
    vision_config,
)
from triptych.models.shared.plain_planner import PlainPlanner, check_no_bounds
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.video import IntervalMiddleSampling, frame_sampling, frames_plan
from triptych.types import MODEL_BOUNDS, ImageHeader, ItemContext, ItemPart, ItemPlan, PixelBounds, VideoHeader

IMAGE_START, IMAGE_END = "<img>", "</img>"
"""Tokens around an image's embeddings."""
ORIGINAL_IMAGE = "<image>"
"""What the original files' templates have for an image; it is no token."""
VIDEO = "<video>"
"""What all templates have for a video."""


LEAST, MOST, DYNAMIC, THUMBNAIL = "min_dynamic_patch", "max_dynamic_patch", "dynamic_image_size", "use_thumbnail"
TILE_OPTIONS: Options = {LEAST: at_most(256), MOST: at_most(256), DYNAMIC: bool, THUMBNAIL: bool}
"""``mm_processor_kwargs`` as vLLM has them: tiles at least and at most, whether there may be several, and whether a
thumbnail follows these."""


class InternVLPlanner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = AREA_OPTIONS | FRAME_OPTIONS | TILE_OPTIONS
    markers = frozenset((IMAGE_START, IMAGE_END))

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        tile_config = tile_settings(config, preprocessor_config)
        frame_config = frame_settings(config, preprocessor_config, video_config)
        original, config = config, unified(config)
        self._vision = vision = vision_config(config)
        self._grids = tile_grids(tile_config, vision.tile_size)
        super().__init__(
            {"image": image_token(config), "video": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._grids.max_pixels,
        )
        self._has_thumbnail = has_thumbnail(original)
        self.template_texts = {"video": VIDEO} | ({"image": ORIGINAL_IMAGE} if is_original(config) else {})
        self._sampling = frame_sampling(IntervalMiddleSampling, frame_config)
        self._tile_cost = VisionCostModel(vision.hidden_size, vision.intermediate_size).cost(vision.side**2 + 1)
        self._tiles: dict[int, tuple[ItemPart, ...]] = {}

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds`` are those of the area of all tiles but the thumbnail.

        Raises BadMediaSize for bounds or options that no grid of tiles is within.
        """
        bounds, vision = self._bounds(context), self._vision
        grids = self._grids if bounds == MODEL_BOUNDS else self._grids.within(bounds)
        columns, rows = grids.best(header.width, header.height)
        thumbnail = bool(context.options.get(THUMBNAIL, self._has_thumbnail)) and columns * rows > 1
        parts = self._parts(columns * rows + thumbnail)
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=rows * vision.tile_size,
            resized_width=columns * vision.tile_size,
            grid=(1, rows * vision.side, columns * vision.side),
            rows=len(parts) * vision.rows,
            patches=len(parts) * vision.side**2,
            cost=len(parts) * self._tile_cost,
            parts=parts,
            bounds=bounds,
        )

    def _bounds(self, context: ItemContext) -> PixelBounds:
        """Return the bounds of the area, or those of the numbers of tiles in the options.

        Raises BadMediaSize for both, and for more tiles than the model's own, for which the service is sized.
        """
        options, tile = context.options, self._grids.factor**2
        if not options.keys() & {LEAST, MOST, DYNAMIC}:
            return context.bounds
        if context.bounds != MODEL_BOUNDS:
            raise BadMediaSize(f"bounds of the area exclude {LEAST}, {MOST} and {DYNAMIC}")
        if not options.get(DYNAMIC, True):
            return PixelBounds(tile, tile)
        own = self._grids.max_pixels // tile
        if options.get(DYNAMIC) and own == 1:
            raise BadMediaSize(f"{DYNAMIC}: the model's own number of tiles is 1")
        least, most = int(options.get(LEAST, 0)), int(options.get(MOST, own))
        if most > own:
            raise BadMediaSize(f"{MOST} {most} exceeds the model's own, {own}")
        if least > most:
            raise BadMediaSize(f"{LEAST} {least} exceeds the largest number of tiles, {most}")
        return PixelBounds(least * tile, most * tile if MOST in options else 0)

    def _parts(self, tiles: int) -> tuple[ItemPart, ...]:
        """Return a part for each tile."""
        if tiles not in self._tiles:
            rows, patches = self._vision.rows, self._vision.side**2
            self._tiles[tiles] = tuple(
                ItemPart(((tile * rows, rows),), patches, self._tile_cost, VISION) for tile in range(tiles)
            )
        return self._tiles[tiles]

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Each frame is a tile. Raises UnsupportedMedia for invalid sampling, for bounds, and for options of tiles in a
        request without images, which they are for."""
        check_no_bounds(context)
        if "image" not in context.modalities and (unused := sorted(TILE_OPTIONS.keys() & context.options.keys())):
            raise UnsupportedMedia(f"each frame of a video is one tile: without images there is no {unused[0]}")
        frames = self._sampling.for_request(context.sampling).frames(header)
        [part] = self._parts(1)
        return frames_plan(header, context.sampling, frames, part, last_rows=part.rows, side=self._vision.tile_size)

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder between markers and, for each frame of a video, after its number."""
        image = f"{IMAGE_START}{spelling(self.placeholder_tokens[plan.modality])}{IMAGE_END}"
        if plan.modality == "image":
            return image
        return "\n".join(f"Frame{number}: {image}" for number in range(1, plan.num_parts + 1))

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return one run of all embeddings of an image, and one for each frame of a video."""
        return [plan.rows] if plan.modality == "image" else [part.rows for part in plan.parts]
