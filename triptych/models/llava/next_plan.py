"""Plans the images and prompts of LLaVA-NeXT and LLaVA-OneVision. Frontend; numpy only."""

from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, VISION, ModelConfig
from triptych.models.llava.anyres import AnyResolution, ImageView, frame_layout
from triptych.models.llava.config import image_token, text_config, tile_config, video_token
from triptych.models.shared.plain_planner import PlainPlanner, check_no_bounds
from triptych.models.shared.planner import check_square_size
from triptych.models.shared.video import IntervalStartSampling, frame_sampling, frames_plan
from triptych.types import (
    MODEL_BOUNDS,
    ImageHeader,
    ItemContext,
    ItemPart,
    ItemPlan,
    PixelBounds,
    VideoHeader,
)


class LlavaNextPlanner(PlainPlanner):
    """``Planner`` of LLaVA-NeXT. Raises CheckpointError for a missing key or a value of the wrong type.

    An image's parts are its views. That of tiles is one part, since rows of embeddings, which end with a newline, go
    through several tiles.
    """

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._tile = tile_config(config).clip
        self._anyres = AnyResolution.from_configs(config, preprocessor_config, self._tile.image_size, self._tile.side)
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._anyres.max_pixels,
        )

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds`` are those of the area of all tiles. Raises BadMediaSize for bounds that no size of the model is
        within."""
        bounds = context.bounds
        anyres = self._anyres if bounds == MODEL_BOUNDS else self._anyres.within(bounds)
        return self._plan_views(header, bounds, anyres.views(header.width, header.height))

    def _plan_views(self, header: ImageHeader, bounds: PixelBounds, views: tuple[ImageView, ...]) -> ItemPlan:
        """Plan a part for each view. Its payload is that of ``ImageView``."""
        parts, rows, tile = list[ItemPart](), 0, self._tile
        for one in views:
            tiles = one.layout.tiles[0] * one.layout.tiles[1]
            runs = ((rows, one.layout.rows),)
            parts.append(ItemPart(runs, tiles * tile.side**2, tiles * tile.cost, VISION, one.payload))
            rows += one.layout.rows
        tile_rows, tile_columns = views[-1].layout.tiles
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=tile_rows * tile.image_size,
            resized_width=tile_columns * tile.image_size,
            grid=(1, tile_rows * tile.side, tile_columns * tile.side),
            rows=rows,
            patches=sum(part.patches for part in parts),
            cost=sum(part.cost for part in parts),
            parts=tuple(parts),
            bounds=bounds,
        )


class LlavaOneVisionPlanner(LlavaNextPlanner):
    """``Planner`` of LLaVA-OneVision. Raises as ``LlavaNextPlanner``."""

    options = AREA_OPTIONS | FRAME_OPTIONS

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, preprocessor_config, video_config)
        self.placeholder_tokens = {**self.placeholder_tokens, "video": video_token(config)}
        self.media_tokens = frozenset(self.placeholder_tokens.values())
        self._sampling = frame_sampling(IntervalStartSampling, video_config or {})

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Plan an image; each of several is one tile, whatever the bounds, as in transformers' processor. The plan has
        no bounds then, so that equal pixels have equal plans."""
        if context.siblings:
            check_square_size(header.width, header.height)
            return self._plan_views(header, MODEL_BOUNDS, self._anyres.square())
        return super()._plan_image(header, context)

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Each frame is a tile, and one newline follows the last. Raises UnsupportedMedia for invalid sampling and for
        bounds."""
        check_no_bounds(context)
        tile, layout = self._tile, frame_layout(self._tile.side)
        part = ItemPart(((0, layout.rows),), tile.side**2, tile.cost, VISION)
        frames = self._sampling.for_request(context.sampling).frames(header)
        return frames_plan(header, context.sampling, frames, part, last_rows=layout.rows + 1, side=tile.image_size)
