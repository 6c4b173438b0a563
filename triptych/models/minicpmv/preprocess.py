"""Turns images and videos into pieces for MiniCPM-V's towers, as planned. Runs in encode workers; numpy, Pillow,
PyAV, and torch to resize videos.

Bit-exact with ``MiniCPMV4_6ImageProcessorPil`` and ``MiniCPMV4_6VideoProcessor`` in transformers and, of
earlier versions, with the published processor.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.minicpmv.config import UNITS, frame_slices, image_slices
from triptych.models.minicpmv.original import PACKS_FRAMES, original_slices, query_num, version_of
from triptych.models.minicpmv.sampling import grouped_frames, sliced_frames, temporal_ids
from triptych.models.minicpmv.slices import Cut, Slices
from triptych.models.shared.byte_table import ByteTable
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

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize and cut an image or the frames of a video; each piece's ``patches`` are float32
        [patches, 3 * patch²], and its ``layout`` is (unit,), the patches per side of an embedding.

        Raises MediaError if the bytes can't be decoded, and PlanMismatch if the pieces aren't the planned ones.
        """
        header, unit = plan.header, _unit(plan)
        if isinstance(header, VideoHeader):
            slices, (numbers, grid) = self._frame_slices.in_units(unit), sliced_frames(plan)
            cut = slices.cut_into(header.width, header.height, *grid)
            _check(plan, cut, slices.patch_size, lambda patches: patches // unit**2, [1] * len(numbers))
            pieces = _pieces(plan, parts, cut)
            frames = decoded_frames(data, [numbers[group] for group in pieces], header)
            for wanted, frame in zip(pieces.values(), frames, strict=True):
                resize = partial(self._resized_frame, np.array(frame))
                yield from _inputs(
                    [resize], cut, wanted, patch_size=slices.patch_size, table=self._video_table, layout=(unit,)
                )
            return
        assert isinstance(header, ImageHeader)
        slices = self._slices.in_units(unit)
        cut = _planned_cut(plan, header, slices)
        _check(plan, cut, slices.patch_size, lambda patches: patches // unit**2)
        image = decode_image(data, header.format, (header.width, header.height))
        resize = partial(_resized_image, image, self._resample)
        yield from _inputs(
            [resize], cut, chosen(plan, parts), patch_size=slices.patch_size, table=self._table, layout=(unit,)
        )

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
        self._packs = version_of(config) == PACKS_FRAMES
        names = (("image_mean", "norm_mean"), ("image_std", "norm_std"))
        settings = {ours: preprocessor_config.get(theirs, 0.5) for ours, theirs in names}
        self._table = normalised_bytes(settings)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize and cut an image or the frames of a video; each piece's ``patches`` are float32
        [patches, 3 * patch²]. The pieces of frames that are shown together are one part, whose ``layout`` are the times
        of the frames if the tower takes them.

        Raises MediaError if the bytes can't be decoded, and PlanMismatch if the pieces aren't the planned ones.
        """
        header = plan.header
        if isinstance(header, VideoHeader):
            yield from self._frames(data, plan, header, parts)
            return
        assert isinstance(header, ImageHeader)
        cut = _planned_cut(plan, header, self._slices)
        _check(plan, cut, self._slices.patch_size, lambda _: self._queries)
        image = decode_image(data, header.format, (header.width, header.height))
        resize = partial(_resized_image, image, Image.Resampling.BICUBIC)
        yield from _inputs([resize], cut, chosen(plan, parts), patch_size=self._slices.patch_size, table=self._table)

    def _frames(self, data: bytes, plan: ItemPlan, header: VideoHeader, parts: Parts) -> Iterator[EncoderInput]:
        groups, grid = grouped_frames(plan)
        cut = self._slices.cut_into(header.width, header.height, *grid)
        _check(plan, cut, self._slices.patch_size, lambda _: self._queries, [len(group) for group in groups])
        pieces = _pieces(plan, parts, cut)
        sampled = decoded_frames(data, [frame for number in pieces for frame in groups[number]], header)
        for number, wanted in pieces.items():
            group = groups[number]
            images = [Image.fromarray(np.array(frame)) for frame in islice(sampled, len(group))]
            resizes = [partial(_resized_image, image, Image.Resampling.BICUBIC) for image in images]
            layout = temporal_ids(group, header) if self._packs else ()
            yield from _inputs(
                resizes, cut, wanted, patch_size=self._slices.patch_size, table=self._table, layout=layout
            )


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


def _check(
    plan: ItemPlan, cut: Cut, patch_size: int, rows: Callable[[int], int], together: Sequence[int] = (1,)
) -> None:
    """Raise PlanMismatch if the plan isn't that of images that are cut in this way, or of numbers of frames whose
    pieces are ``together``. ``rows`` returns the embeddings of a piece of a number of patches."""
    patches = [width * height // patch_size**2 for width, height in cut.pieces]
    expected = [(rows(count), frames * count) for frames in together for count in patches]
    if [(part.rows, part.patches) for part in plan.parts] != expected:
        raise PlanMismatch(f"{len(together)} images become {len(patches)} pieces each; their plan says otherwise")


def _pieces(plan: ItemPlan, parts: Parts, cut: Cut) -> dict[int, list[int]]:
    """Return the numbers of the wanted pieces of each group of frames that has some."""
    wanted: dict[int, list[int]] = {}
    for number in chosen(plan, parts):
        group, piece = divmod(number, len(cut.pieces))
        wanted.setdefault(group, []).append(piece)
    return wanted


def _inputs(
    resizes: Sequence[Callable[[tuple[int, int]], Pixels]],
    cut: Cut,
    wanted: Sequence[int],
    *,
    patch_size: int,
    table: ByteTable,
    layout: tuple[int, ...] = (),
) -> Iterator[EncoderInput]:
    """Yield the wanted pieces of an image, or of several together; ``resizes`` return an image in a width and
    height."""
    for number, pieces in enumerate(zip(*(_cut_up(resize, cut) for resize in resizes), strict=True)):
        if number in wanted:
            yield fixed_size_input(pieces, table, patch_size, layout)


def _cut_up(resize: Callable[[tuple[int, int]], Pixels], cut: Cut) -> Iterator[Pixels]:
    """Yield the whole and the slices."""
    yield resize(cut.whole)
    if cut.columns:
        canvas, (width, height) = resize(cut.canvas), cut.slice
        for top in range(0, len(canvas), height):
            for left in range(0, canvas.shape[1], width):
                yield canvas[top : top + height, left : left + width]
