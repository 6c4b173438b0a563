"""Plans InternVL's images and prompts. Frontend; numpy only.

The reference is ``InternVLProcessor`` in transformers: an image becomes a grid of tiles and, if that is more than one,
a thumbnail after them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.errors import UnsupportedMedia
from triptych.models.backbones.rope import context_length
from triptych.models.base import VISION, MediaToken, ModelConfig, Positions
from triptych.models.internvl.config import image_token, is_original, text_config, tile_settings, unified, vision_config
from triptych.models.internvl.tiles import TileGrids
from triptych.models.shared.mrope import plain_positions
from triptych.models.shared.planner import (
    MAX_SOURCE_PIXELS,
    VisionCostModel,
    check_aspect_ratio,
    check_source_size,
)
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SAMPLING,
    AudioHeader,
    FrameSampling,
    ImageHeader,
    ItemPart,
    ItemPlan,
    MediaHeader,
    PixelBounds,
    Placement,
)

IMAGE_START, IMAGE_END = "<img>", "</img>"
"""Tokens around an image's embeddings."""
ORIGINAL_IMAGE = "<image>"
"""What the original files' templates have for an image; it is no token."""


class InternVLPlanner:
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    audio_in_video = False

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        config, tile_config = unified(config), tile_settings(config, preprocessor_config)
        self._vision = vision = vision_config(config)
        self._grids = TileGrids.from_config(tile_config, vision.tile_size)
        self.placeholder_tokens: Mapping[str, MediaToken] = {"image": image_token(config)}
        self.template_texts: Mapping[str, str] = {"image": ORIGINAL_IMAGE} if is_original(config) else {}
        self.media_tokens: frozenset[MediaToken] = frozenset(self.placeholder_tokens.values())
        self.context_length = context_length(text_config(config))
        self.max_image_pixels = self._grids.max_pixels
        self._max_source_pixels = max_source_pixels
        self._tile_cost = VisionCostModel(vision.hidden_size, vision.intermediate_size).cost(vision.side**2 + 1)
        self._tiles: dict[int, tuple[ItemPart, ...]] = {}

    def plan(
        self,
        header: MediaHeader,
        bounds: PixelBounds = MODEL_BOUNDS,
        sampling: FrameSampling = MODEL_SAMPLING,
        sound: AudioHeader | None = None,
    ) -> ItemPlan:
        """Plan an image. ``bounds`` are those of the area of all tiles but the thumbnail.

        Raises UnsupportedMedia for other media, MediaTooLarge for more than ``max_source_pixels``, and BadMediaSize for
        an aspect ratio above 200 or for bounds that no grid of tiles is within.
        """
        if not isinstance(header, ImageHeader):
            raise UnsupportedMedia("the model takes only images")
        check_source_size("image", header.width, header.height, self._max_source_pixels)
        check_aspect_ratio(header.width, header.height)
        grids, vision = self._grids if bounds == MODEL_BOUNDS else self._grids.within(bounds), self._vision
        columns, rows = grids.best(header.width, header.height)
        parts = self._parts(columns * rows + (columns * rows > 1))
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

    def _parts(self, tiles: int) -> tuple[ItemPart, ...]:
        """Return a part for each tile."""
        if tiles not in self._tiles:
            rows, patches = self._vision.rows, self._vision.side**2
            self._tiles[tiles] = tuple(
                ItemPart(((tile * rows, rows),), patches, self._tile_cost, VISION) for tile in range(tiles)
            )
        return self._tiles[tiles]

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder between markers."""
        return f"{IMAGE_START}{spelling(self.placeholder_tokens[plan.modality])}{IMAGE_END}"

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return one run of all embeddings."""
        return [plan.rows]

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Return 0, 1, 2, … on all three axes. Raises PlanMismatch if a placement doesn't fit its plan, or if
        placements overlap or extend beyond the prompt."""
        return plain_positions(num_tokens, placements, [plan.rows for plan in plans])
