"""Turns an image's or a video's bytes into patches for a tower that takes any grid of them, as planned. Runs in encode
workers; numpy, Pillow, PyAV, and torch only to resize videos. Videos are bit-exact with transformers'
``Qwen2VLVideoProcessor`` and ``Qwen3VLVideoProcessor``, which differ in their defaults."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import CheckpointError, PlanMismatch
from triptych.media import frames
from triptych.media.video import Frame, decode_frames
from triptych.models.base import EncoderInput, ModelConfig, Parts
from triptych.models.shared.byte_table import ByteTable
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
from triptych.models.shared.video import FILE, sampled_frames
from triptych.sandbox.libraries import import_library
from triptych.types import ItemPlan, VideoHeader

_MODES = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
    Image.Resampling.LANCZOS: "lanczos",
}


class VideoPreprocessor(PatchPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting.

    Subclasses set the defaults of the family's reference processor.
    """

    video_mean: ClassVar[tuple[float, float, float]] = CLIP_MEAN
    """Default ``image_mean`` for videos."""
    video_std: ClassVar[tuple[float, float, float]] = CLIP_STD
    """Default ``image_std`` for videos."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, preprocessor_config)
        self._video_mode = torch_mode(video_config or {})
        self._video_table = normalised_video_bytes(video_config or {}, self.video_mean, self.video_std)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield an image as ``PatchPreprocessor`` does, and a video as one part per temporal patch.

        The last temporal patch is padded with the last frame, as in the reference. Raises MediaError if the bytes
        can't be decoded, and PlanMismatch if the result isn't what was planned.
        """
        if not isinstance(plan.header, VideoHeader):
            yield from super().__call__(data, plan, parts)
            return
        size = self._geometry.temporal_patch_size
        sampled = decoded_frames(data, sampled_frames(plan, parts), plan.header)
        resized_to = plan.resized_height, plan.resized_width
        while some := list(itertools.islice(sampled, size)):
            some += some[-1:] * (size - len(some))
            yield self._input(resized(np.stack(some), resized_to, self._video_mode), self._video_table, plan)


def resized(pixels: NDArray[np.uint8], size: tuple[int, int], mode: str) -> NDArray[np.uint8]:
    """Resize frames, uint8 [frames, height, width, channels], to (height, width); ``mode`` is that of ``torch_mode``.

    Uses the kernel that torchvision calls: Pillow's is slower and rounds differently.
    """
    if pixels.shape[1:3] == size:
        return pixels
    torch = import_library("torch")  # here, because the frontend imports this file, and most images don't need torch
    # numpy gives the axis of a single frame a stride of 0, for which torch would take a slower way
    dense = torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1)).view(pixels.shape)
    made = torch.nn.functional.interpolate(
        dense.permute(0, 3, 1, 2), size, mode=mode, antialias=True, align_corners=False
    )
    return np.ascontiguousarray(made.permute(0, 2, 3, 1).numpy())


def normalised_video_bytes(
    video_config: dict[str, Any], mean: tuple[float, float, float], std: tuple[float, float, float]
) -> ByteTable:
    """Return the normalised value of each byte. As in the reference's video processor, rescaling is folded into mean
    and standard deviation, whose defaults are ``mean`` and ``std``. Raises CheckpointError."""
    values = np.tile(np.arange(256, dtype=np.float32), (CHANNELS, 1))
    factor = rescale_factor(video_config) if video_config.get("do_rescale", True) else 1.0
    if not video_config.get("do_normalize", True):
        return ByteTable(values * np.float32(factor))
    means = per_channel(video_config, "image_mean", mean) * np.float32(1 / factor)
    stds = per_channel(video_config, "image_std", std) * np.float32(1 / factor)
    return ByteTable((values - means) / stds)


def decoded_frames(data: bytes, numbers: Sequence[int], header: VideoHeader) -> Iterator[Frame]:
    """Yield the frames with these numbers in order. Raises MediaError if the bytes can't be decoded, and PlanMismatch
    if there are no numbers, or if the video has other frames than planned."""
    if not numbers:
        raise PlanMismatch("the plan of a video has no frames")
    if header.format != frames.FORMAT:
        return decode_frames(data, header, numbers)
    packed = frames.unpack_frames(data).frames
    if max(numbers) >= len(packed):
        raise PlanMismatch(f"a list of {len(packed)} frames has no frame {max(numbers)}")
    size = header.width, header.height
    return (np.asarray(decode_image(packed[number], f"{number}. frame's", size)) for number in numbers)


def torch_mode(config: dict[str, Any], file: str = FILE) -> str:
    """Return torch's name of the resampling filter in a processor's settings, those of ``file``. Raises CheckpointError
    for one that isn't served."""
    resample = resampling(config)
    if resample not in _MODES:
        raise CheckpointError(f"{file}: resample {resample.value} is not served; 1, 2 and 3 are")
    return _MODES[resample]
