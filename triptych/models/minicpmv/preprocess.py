"""Turns images and videos into pieces for MiniCPM-V 4.6's tower, as planned. Runs in encode workers; numpy, Pillow,
PyAV, and torch to resize videos.

Bit-exact with ``MiniCPMV4_6ImageProcessorPil`` and ``MiniCPMV4_6VideoProcessor`` in transformers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.minicpmv.config import UNITS, frame_slices, image_slices
from triptych.models.minicpmv.slices import Cut, Slices
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.frames import decoded_frames, normalised_video_bytes, resized, torch_mode
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
from triptych.models.shared.video import sampled_frames
from triptych.types import ImageHeader, ItemPlan, VideoHeader

MEAN = STD = (0.5, 0.5, 0.5)
DEFAULTS = {"image_mean": 0.5, "image_std": 0.5}
Pixels = NDArray[np.uint8]
"""[height, width, channels]"""


class MiniCPMV46Preprocessor:
    """``Preprocessor`` of model type ``minicpmv4_6``. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._slices = image_slices(config, preprocessor_config)
        self._frame_slices = frame_slices(config, video_config)
        self._resample = resampling(preprocessor_config)
        self._table = normalised_bytes(DEFAULTS | preprocessor_config)
        self._video_mode = torch_mode(video_config or {})
        self._video_table = normalised_video_bytes(video_config or {}, MEAN, STD)

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """Decode, resize and cut an image or the frames of a video; each piece's ``patches`` are float32
        [patches, 3 * patch²], and its ``layout`` is (unit,), the patches per side of an embedding.

        Raises MediaError if the bytes can't be decoded, and PlanMismatch if the pieces aren't the planned ones.
        """
        header, unit = plan.header, _unit(plan)
        if isinstance(header, VideoHeader):
            slices, frames = self._frame_slices.in_units(unit), len(sampled_frames(plan))
            cut = slices.cut(header.width, header.height)
            _check(plan, cut, slices, frames)
            for frame in decoded_frames(data, plan, header):
                yield from _inputs(partial(self._resized_frame, np.array(frame)), cut, slices, self._video_table)
            return
        assert isinstance(header, ImageHeader)
        slices, payload = self._slices.in_units(unit), plan.parts[0].payload
        if len(payload) != 2:
            raise PlanMismatch(f"the plan of an image has no grid of slices, but {payload}")
        cut = slices.cut_into(header.width, header.height, *payload)
        _check(plan, cut, slices, 1)
        image = decode_image(data, header.format, (header.width, header.height))
        yield from _inputs(lambda size: np.asarray(image.resize(size, self._resample)), cut, slices, self._table)

    def _resized_frame(self, frame: Pixels, size: tuple[int, int]) -> Pixels:
        pixels: Pixels = resized(frame[None], size[::-1], self._video_mode)[0]
        return pixels


def _unit(plan: ItemPlan) -> int:
    """Return the unit by which the plan's rows were counted. Raises PlanMismatch for none of ``UNITS``."""
    part = plan.parts[0]
    for unit in UNITS.values():
        if part.rows * unit**2 == part.patches:
            return unit
    raise PlanMismatch(f"{part.patches} patches don't become {part.rows} embeddings")


def _check(plan: ItemPlan, cut: Cut, slices: Slices, frames: int) -> None:
    """Raise PlanMismatch if the plan isn't that of ``frames`` images that are cut in this way."""
    area = slices.patch_size**2
    patches = [width * height // area for width, height in cut.pieces]
    expected = [(count // slices.unit**2, count) for count in patches]
    if plan.num_parts != frames * len(expected) or any(
        (part.rows, part.patches) != expected[number % len(expected)] for number, part in enumerate(plan.parts)
    ):
        raise PlanMismatch(f"{frames} images become {len(patches)} pieces each; their plan says otherwise")


def _inputs(
    resize: Callable[[tuple[int, int]], Pixels], cut: Cut, slices: Slices, table: NDArray[np.float32]
) -> Iterator[EncoderInput]:
    """Yield an image's pieces; ``resize`` returns the image in a width and height."""
    pieces = [resize(cut.whole)]
    if cut.columns:
        canvas, (width, height) = resize(cut.canvas), cut.slice
        for top in range(0, len(canvas), height):
            pieces += [canvas[top : top + height, left : left + width] for left in range(0, canvas.shape[1], width)]
    for piece in pieces:
        yield fixed_size_input([piece], table, slices.patch_size, (slices.unit,))
