"""Turns an image's or a video's bytes into patches for the towers of Kimi-VL and Kimi K2.5, as planned. Runs in encode
workers; numpy, Pillow, PyAV, and torch to resize for K2.5.

Bit-exact with ``KimiVLImageProcessor`` of the published files, which resizes by Pillow, and with
``Kimi_K25ImageProcessor`` in transformers, which resizes by torchvision.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.kimi.geometry import KimiK25Geometry, KimiVLGeometry, settings_of
from triptych.models.kimi.video import FrameGeometry
from triptych.models.shared.frames import decoded_frames, normalised_video_bytes, resized, torch_mode
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.patches import PatchPreprocessor, padded
from triptych.models.shared.video import sampled_frames
from triptych.types import ItemPlan, VideoHeader

HALF = (0.5, 0.5, 0.5)
"""Default of Kimi K2.5's ``image_mean`` and ``image_std``."""


class KimiVLPreprocessor(PatchPreprocessor):
    """``Preprocessor`` of Kimi-VL. Raises CheckpointError for an unsupported setting."""

    image_geometry = KimiVLGeometry


class KimiK25Preprocessor(PatchPreprocessor):
    """``Preprocessor`` of Kimi K2.5. Raises CheckpointError for an unsupported setting."""

    image_geometry = KimiK25Geometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        settings = settings_of(preprocessor_config)
        super().__init__(config, settings)
        self._mode = torch_mode(settings, PREPROCESSOR_FILE)
        self._table = normalised_video_bytes(settings, HALF, HALF)
        self._frames = FrameGeometry.from_configs(config, video_config or {})
        video_settings = settings_of(video_config or {})
        self._video_mode = torch_mode(video_settings)
        self._video_table = normalised_video_bytes(video_settings, HALF, HALF)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield an image as ``PatchPreprocessor`` does, and a video as one part per chunk of frames, whose patches are
        frame by frame. Raises as ``PatchPreprocessor`` does."""
        header = plan.header
        if not isinstance(header, VideoHeader):
            yield from super().__call__(data, plan, parts)
            return
        geometry = self._frames.within(plan.bounds)
        if geometry.resized(header.height, header.width) != (plan.resized_height, plan.resized_width):
            raise PlanMismatch("the plan of a video has frames of another size")
        content = geometry.content(header.height, header.width)
        sampled = decoded_frames(data, sampled_frames(plan, parts), header)
        for number in chosen(plan, parts):
            chunk = list(islice(sampled, len(plan.parts[number].payload)))
            if not chunk:
                raise PlanMismatch("the plan of a video has a chunk without frames")
            yield self._chunk(chunk, content, plan)

    def _chunk(self, frames: Sequence[NDArray[np.uint8]], content: tuple[int, int], plan: ItemPlan) -> EncoderInput:
        """Return the encoder input of frames; ``content`` is their (height, width) before they are padded."""
        scaled = (resized(np.array(frame)[None], content, self._video_mode)[0] for frame in frames)
        size = plan.resized_height, plan.resized_width
        made = [self._input(padded(one, *size)[None], self._video_table, plan) for one in scaled]
        if len(made) == 1:
            return made[0]
        name = blake3("".join(one.name for one in made).encode()).hexdigest()
        return EncoderInput(np.concatenate([one.patches for one in made]), (len(made), *made[0].grid[1:]), name)

    def _scaled(self, image: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = resized(np.array(image)[None], size, self._mode)[0]
        return pixels
