"""Turns images and videos into pieces for MiniCPM-V's towers, as planned. Runs in encode workers; numpy, Pillow,
PyAV, and torch to resize videos.

Bit-exact with ``MiniCPMV4_6ImageProcessorPil`` and ``MiniCPMV4_6VideoProcessor`` in transformers and, of
earlier versions, with the published processor.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.minicpmv.config import UNITS, frame_slices, image_slices
from triptych.models.minicpmv.original import original_slices, query_num
from triptych.models.minicpmv.sampling import sliced_frames
from triptych.models.minicpmv.slices import Cut, Slices
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.frames import decoded_frames, normalised_video_bytes, resized, torch_mode
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
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
            slices, (numbers, grid) = self._frame_slices.in_units(unit), sliced_frames(plan)
            cut = slices.cut_into(header.width, header.height, *grid)
            _check(plan, cut, slices.patch_size, lambda patches: patches // unit**2, len(numbers))
            for frame in decoded_frames(data, numbers, header):
                resize = partial(self._resized_frame, np.array(frame))
                yield from _inputs(resize, cut, slices.patch_size, self._video_table, (unit,))
            return
        assert isinstance(header, ImageHeader)
        slices = self._slices.in_units(unit)
        cut = _planned_cut(plan, header, slices)
        _check(plan, cut, slices.patch_size, lambda patches: patches // unit**2)
        image = decode_image(data, header.format, (header.width, header.height))
        yield from _inputs(partial(_resized_image, image, self._resample), cut, slices.patch_size, self._table, (unit,))

    def _resized_frame(self, frame: Pixels, size: tuple[int, int]) -> Pixels:
        pixels: Pixels = resized(frame[None], size[::-1], self._video_mode)[0]
        return pixels


class MiniCPMVPreprocessor:
    """``Preprocessor`` of model type ``minicpmv``. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._slices = original_slices(config, preprocessor_config)
        self._queries = query_num(config, preprocessor_config)
        names = (("image_mean", "norm_mean"), ("image_std", "norm_std"))
        settings = {ours: preprocessor_config.get(theirs, 0.5) for ours, theirs in names}
        self._table = normalised_bytes(settings)

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """Decode, resize and cut an image; each piece's ``patches`` are float32 [patches, 3 * patch²].

        Raises MediaError if the bytes can't be decoded, and PlanMismatch if the pieces aren't the planned ones.
        """
        header = plan.header
        assert isinstance(header, ImageHeader)
        cut = _planned_cut(plan, header, self._slices)
        _check(plan, cut, self._slices.patch_size, lambda _: self._queries)
        image = decode_image(data, header.format, (header.width, header.height))
        resize = partial(_resized_image, image, Image.Resampling.BICUBIC)
        yield from _inputs(resize, cut, self._slices.patch_size, self._table)


def _planned_cut(plan: ItemPlan, header: ImageHeader, slices: Slices) -> Cut:
    """Return the pieces by the grid that the plan has. Raises PlanMismatch for none."""
    payload = plan.parts[0].payload
    if len(payload) != 2:
        raise PlanMismatch(f"the plan of an image has no grid of slices, but {payload}")
    return slices.cut_into(header.width, header.height, *payload)


def _resized_image(image: Image.Image, resample: Image.Resampling, size: tuple[int, int]) -> Pixels:
    return np.asarray(image.resize(size, resample))


def _unit(plan: ItemPlan) -> int:
    """Return the unit by which the plan's rows were counted. Raises PlanMismatch for none of ``UNITS``."""
    part = plan.parts[0]
    for unit in UNITS.values():
        if part.rows * unit**2 == part.patches:
            return unit
    raise PlanMismatch(f"{part.patches} patches don't become {part.rows} embeddings")


def _check(plan: ItemPlan, cut: Cut, patch_size: int, rows: Callable[[int], int], frames: int = 1) -> None:
    """Raise PlanMismatch if the plan isn't that of ``frames`` images that are cut in this way. ``rows`` returns the
    embeddings of a piece of a number of patches."""
    patches = [width * height // patch_size**2 for width, height in cut.pieces]
    expected = [(rows(count), count) for count in patches]
    if plan.num_parts != frames * len(expected) or any(
        (part.rows, part.patches) != expected[number % len(expected)] for number, part in enumerate(plan.parts)
    ):
        raise PlanMismatch(f"{frames} images become {len(patches)} pieces each; their plan says otherwise")


def _inputs(
    resize: Callable[[tuple[int, int]], Pixels],
    cut: Cut,
    patch_size: int,
    table: NDArray[np.float32],
    layout: tuple[int, ...] = (),
) -> Iterator[EncoderInput]:
    """Yield an image's pieces; ``resize`` returns the image in a width and height."""
    pieces = [resize(cut.whole)]
    if cut.columns:
        canvas, (width, height) = resize(cut.canvas), cut.slice
        for top in range(0, len(canvas), height):
            pieces += [canvas[top : top + height, left : left + width] for left in range(0, canvas.shape[1], width)]
    for piece in pieces:
        yield fixed_size_input([piece], table, patch_size, layout)
