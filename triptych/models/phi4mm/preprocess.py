"""Turns an image's bytes into tiles, and audio's into features, for Phi-4-multimodal's towers, as planned. Runs in
encode workers; numpy, Pillow, and torch to resize.

Tiles are bit-exact with the processor in the published files.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

from triptych.errors import PlanMismatch
from triptych.media.audio import decode_audio
from triptych.models.base import AUDIO, EncoderInput, ModelConfig, Parts, chosen
from triptych.models.phi4mm.audio import RATE, STRIDE, LogFilterbank, audio_config
from triptych.models.phi4mm.config import vision_config
from triptych.models.phi4mm.tiles import MOST_TILES, canvas_of, most_tiles
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import CHANNELS, normalised_bytes, padded
from triptych.types import AudioHeader, ImageHeader, ItemPlan

STATISTICS = {"image_mean": 0.5, "image_std": 0.5}
WHITE = 255


class Phi4MMPreprocessor:
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._tile = vision_config(config).clip
        most_tiles(preprocessor_config, self._tile.image_size)  # checks it
        self._filterbank = LogFilterbank(audio_config(config).bands)
        self._table = normalised_bytes(STATISTICS | preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield an image's parts, or a clip's. Raises as these do."""
        if isinstance(plan.header, AudioHeader):
            return self._audio(data, plan, plan.header)
        return self._image(data, plan, parts)

    def _audio(self, data: bytes, plan: ItemPlan, header: AudioHeader) -> Iterator[EncoderInput]:
        """Yield a clip's features, float32 [frames, bands]. Raises MediaError if the bytes can't be decoded, and
        PlanMismatch if the features aren't the planned ones."""
        if [part.payload for part in plan.parts] not in ([(0,)], [(1,)]):
            raise PlanMismatch("the plan of a clip doesn't have one part")
        features = self._filterbank(decode_audio(data, header, RATE))
        if len(features) != plan.parts[0].patches or -(-len(features) // STRIDE) != plan.rows:
            raise PlanMismatch(f"a clip has {len(features)} frames of features, not those of its plan")
        layout = plan.parts[0].payload
        digest = blake3(np.array((*features.shape, *layout)).tobytes())
        digest.update(features.view(np.uint8).data)
        yield EncoderInput(features, (len(features), 1, 1), digest.hexdigest(), AUDIO, layout)

    def _image(self, data: bytes, plan: ItemPlan, parts: Parts) -> Iterator[EncoderInput]:
        """Decode, scale and cut one image; each part's ``patches`` are float32 [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the tiles aren't the planned ones.
        """
        header, side, patch = plan.header, self._tile.image_size, self._tile.patch_size
        assert isinstance(header, ImageHeader)
        payloads = [part.payload for part in plan.parts]
        if [len(payload) for payload in payloads] != [2, 0] or not 0 < min(payloads[0]) <= max(
            payloads[0]
        ) <= MOST_TILES:
            raise PlanMismatch("the plan of an image doesn't have its tiles, and then the whole")
        columns, rows = payloads[0]
        canvas = canvas_of(header.width, header.height, (columns, rows), side, patch)
        if columns * rows > MOST_TILES or canvas.embeddings != plan.parts[0].rows:
            raise PlanMismatch(f"an image of {columns} by {rows} tiles has {canvas.embeddings} rows")
        image = decode_image(data, header.format, (header.width, header.height))
        scaled = np.asarray(image.resize(canvas.scaled, Image.Resampling.BILINEAR))
        pixels = padded(scaled, rows * side, columns * side, WHITE)
        tiles = [
            pixels[y : y + side, x : x + side]
            for y in range(0, rows * side, side)
            for x in range(0, columns * side, side)
        ]
        for number in chosen(plan, parts):
            yield self._whole(pixels) if number else fixed_size_input(tiles, self._table, patch, canvas.layout)

    def _whole(self, pixels: NDArray[np.uint8]) -> EncoderInput:
        """Return the whole of uint8 [height, width, channels] as one tile, scaled after normalisation."""
        side, patch = self._tile.image_size, self._tile.patch_size
        values = torch.from_numpy(self._table.planes(pixels))
        scaled = interpolate(values[None], size=(side, side), mode="bicubic")[0]
        blocks = scaled.view(CHANNELS, side // patch, patch, side // patch, patch).permute(1, 3, 0, 2, 4)
        digest = blake3(np.array((patch, side, *pixels.shape)).tobytes())
        digest.update(self._table.values.tobytes())
        digest.update(np.ascontiguousarray(pixels).data)
        return EncoderInput(
            patches=blocks.reshape(-1, CHANNELS * patch**2).numpy(),
            grid=(1, side // patch, side // patch),
            name=digest.hexdigest(),
        )
