"""Turns an image's or a video's bytes into patches for a tower that takes any grid of them, as planned. Encode workers;
numpy, Pillow, PyAV, and torch for the resizing of videos alone. Videos are bit-exact with transformers'
``Qwen2VLVideoProcessor`` and ``Qwen3VLVideoProcessor``, which differ in what they assume."""

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import CheckpointError, PlanMismatch
from triptych.media import frames
from triptych.media.video import Frame, decode_frames
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import (
    CHANNELS,
    CLIP_MEAN,
    CLIP_STD,
    PatchPreprocessor,
    per_channel,
    resampling,
    rescale_factor,
)
from triptych.models.shared.video import FILE
from triptych.types import ItemPlan, VideoHeader

_MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}


class VideoPreprocessor(PatchPreprocessor):
    """Satisfies ``families.base.Preprocessor``. Raises CheckpointError for a setting that can't be honoured.

    ``video_mean`` and ``video_std`` are what the family's reference assumes where its file says nothing.
    """

    video_mean: ClassVar[tuple[float, float, float]] = CLIP_MEAN
    video_std: ClassVar[tuple[float, float, float]] = CLIP_STD

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, preprocessor_config)
        self._video_mode = _mode(video_config or {})
        self._video_table = self._normalised_bytes(video_config or {})

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """As ``PatchPreprocessor``; of a video a part for each patch in time. The last frame fills up the last patch,
        as in the reference. Raises MediaError for bytes that can't be decoded, PlanMismatch as there."""
        if not isinstance(plan.header, VideoHeader):
            yield from super().__call__(data, plan)
            return
        size = self._geometry.temporal_patch_size
        seen = _frames(data, plan, plan.header)
        while some := list(itertools.islice(seen, size)):
            some += some[-1:] * (size - len(some))
            yield self._input(self._resize(np.stack(some), plan), self._video_table, plan)

    def _resize(self, pixels: NDArray[np.uint8], plan: ItemPlan) -> NDArray[np.uint8]:
        """uint8 (frames, height, width, channel) in the planned size, by the very kernel that torchvision calls:
        Pillow's differs from it in rounding, by up to 13 of 255, and takes several times as long."""
        from torch import from_numpy  # not with the file: the frontend imports it, and images do without
        from torch.nn.functional import interpolate

        size = plan.resized_height, plan.resized_width
        if pixels.shape[1:3] == size:
            return pixels
        frames_first = from_numpy(pixels).permute(0, 3, 1, 2)
        resized = interpolate(frames_first, size, mode=self._video_mode, antialias=True, align_corners=False)
        return np.ascontiguousarray(resized.permute(0, 2, 3, 1).numpy())

    def _normalised_bytes(self, video_config: dict[str, Any]) -> NDArray[np.float32]:
        """float32 (channel, 256): what each byte becomes, as the reference does it for videos: rescaling is part of
        mean and deviation."""
        values = np.tile(np.arange(256, dtype=np.float32), (CHANNELS, 1))
        factor = rescale_factor(video_config) if video_config.get("do_rescale", True) else 1.0
        if not video_config.get("do_normalize", True):
            return values * np.float32(factor)
        mean = per_channel(video_config, "image_mean", self.video_mean) * np.float32(1 / factor)
        std = per_channel(video_config, "image_std", self.video_std) * np.float32(1 / factor)
        table: NDArray[np.float32] = (values - mean) / std
        return table


def _frames(data: bytes, plan: ItemPlan, header: VideoHeader) -> Iterator[Frame]:
    """The frames that are seen, in order."""
    if header.format != frames.FORMAT:
        return decode_frames(data, header, plan.frames)
    packed = frames.unpack_frames(data).frames
    if max(plan.frames) >= len(packed):
        raise PlanMismatch(f"a list of {len(packed)} frames has no frame {max(plan.frames)}")
    size = header.width, header.height
    return (np.asarray(decode_image(packed[number], f"{number}. frame's", size)) for number in plan.frames)


def _mode(video_config: dict[str, Any]) -> str:
    """The filter, by the name that torch has for it."""
    resample = resampling(video_config)
    if resample not in _MODES:
        raise CheckpointError(f"{FILE}: resample {resample.value} is not served for videos")
    return _MODES[resample]
