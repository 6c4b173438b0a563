"""Turns an image's bytes into tiles for the towers of LLaVA-NeXT and LLaVA-OneVision, as planned. Runs in encode
workers; numpy and Pillow only.

Bit-exact with ``LlavaNextImageProcessorPil`` and ``LlavaOnevisionImageProcessorPil`` in transformers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.llava.anyres import AnyResolution, ImageView, View, frame_layout, scaled
from triptych.models.llava.config import tile_config
from triptych.models.llava.preprocess import mean_colour, squared
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.frame_tiles import FrameTiles
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
from triptych.models.shared.planner import check_square_size
from triptych.types import ImageHeader, ItemPlan, VideoHeader

BLACK = (0, 0, 0)


class LlavaNextPreprocessor:
    """``Preprocessor`` of LLaVA-NeXT. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._tile = tile_config(config).clip
        self._anyres = AnyResolution.from_configs(config, preprocessor_config, self._tile.image_size, self._tile.side)
        _check_size(preprocessor_config, self._tile.image_size)
        self._resample = resampling(preprocessor_config)
        self._table = normalised_bytes(preprocessor_config)
        self._background = mean_colour(preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize and cut one image; each view's ``patches`` are float32 [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the tiles aren't the planned ones.
        """
        header = plan.header
        assert isinstance(header, ImageHeader)
        views = self._views(header, plan)
        if [view.payload for view in views] != [part.payload for part in plan.parts]:
            raise PlanMismatch("an image's tiles aren't those of its plan")
        image = decode_image(data, header.format, (header.width, header.height))
        for one in (views[number] for number in chosen(plan, parts)):
            tiles = [np.asarray(tile) for tile in self._tiles(image, one)]
            yield fixed_size_input(tiles, self._table, self._tile.patch_size, one.layout.numbers)

    def _views(self, header: ImageHeader, plan: ItemPlan) -> tuple[ImageView, ...]:
        """Return the image's parts."""
        return self._anyres.within(plan.bounds).views(header.width, header.height)

    def _tiles(self, image: Image.Image, one: ImageView) -> Iterator[Image.Image]:
        side = self._tile.image_size
        if one.view != View.TILED:
            whole = squared(image, self._background) if one.view == View.SQUARE else image
            yield whole.resize((side, side), self._resample)
            return
        height, width = size = one.layout.tiles[0] * side, one.layout.tiles[1] * side
        resized = image.resize(scaled(image.width, image.height, size), self._resample)
        canvas = Image.new("RGB", (width, height), BLACK)
        canvas.paste(resized, ((width - resized.width) // 2, (height - resized.height) // 2))
        for top in range(0, height, side):
            for left in range(0, width, side):
                yield canvas.crop((left, top, left + side, top + side))


class LlavaOneVisionPreprocessor(LlavaNextPreprocessor):
    """``Preprocessor`` of LLaVA-OneVision. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, preprocessor_config)
        self._frames = FrameTiles(video_config or {}, self._tile.image_size)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Return the parts of an image as ``LlavaNextPreprocessor`` does, and one for each frame of a video."""
        if not isinstance(plan.header, VideoHeader):
            yield from super().__call__(data, plan, parts)
            return
        for number, frame in zip(chosen(plan, parts), self._frames(data, plan, parts), strict=False):
            layout = frame_layout(self._tile.side, newlines=int(number == plan.num_parts - 1))
            yield fixed_size_input([frame], self._frames.table, self._tile.patch_size, layout.numbers)

    def _views(self, header: ImageHeader, plan: ItemPlan) -> tuple[ImageView, ...]:
        """Return the image's parts: a square, which doesn't depend on bounds, or tiles. Raises MediaTooLarge for a
        square that no planner takes."""
        if plan.parts[0].payload[:1] != (View.SQUARE,):
            return super()._views(header, plan)
        check_square_size(header.width, header.height)
        return self._anyres.square()


def _check_size(preprocessor_config: dict[str, Any], side: int) -> None:
    """Raise CheckpointError for tiles of another size than the tower's."""
    square = {"height": side, "width": side}
    for name in ("size", "crop_size"):
        if (size := preprocessor_config.get(name)) not in (None, side, {"shortest_edge": side}, square):
            raise CheckpointError(f"{PREPROCESSOR_FILE}: {name} must be the tower's image_size {side}, not {size!r}")
