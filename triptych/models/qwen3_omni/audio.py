"""How Qwen3-Omni divides audio: samples become feature frames, chunks of frames become tokens, and each window of
chunks is encoded independently. No torch.

The arithmetic is that of ``WhisperFeatureExtractor``, ``Qwen3OmniMoeProcessor`` and ``Qwen3OmniMoeAudioEncoder`` in
transformers for an item by itself; tests check that they agree.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from triptych.errors import CheckpointError
from triptych.media.log_mel import LogMel
from triptych.models.base import ModelConfig
from triptych.models.shared.audio import Window, mel_of_tower
from triptych.models.shared.settings import setting

STRIDE = 8
"""Frames per token: three convolutions, each of stride 2."""
TOKENS_PER_CHUNK = 13
"""Tokens of a whole chunk, which the reference's formula fixes whatever the chunk's length."""


@dataclass(frozen=True)
class ChunkFraming:
    """``AudioFraming`` of windows of whole chunks of feature frames."""

    mel: LogMel
    """Computes the features, one frame per hop."""
    chunk: int
    """Frames that pass through the convolutions together; an item's last chunk is padded with zeros."""
    window: int
    """Frames, in whole chunks, whose tokens attend to one another and to no others."""
    more: ClassVar[int] = 0
    """See ``AudioFraming``: what follows a clip's last frame are zeros."""

    @classmethod
    def from_configs(cls, audio: ModelConfig, preprocessor_config: dict[str, Any]) -> "ChunkFraming":
        """Read the ``audio_config`` section. Raises CheckpointError for an invalid value, and if the processor's
        features aren't those that the tower takes."""
        mel = mel_of_tower(audio, preprocessor_config)
        chunk = 2 * setting(audio, "n_window", int, default=50)
        if -(-chunk // STRIDE) != TOKENS_PER_CHUNK:
            raise CheckpointError(f"config.json: n_window must be 49 to 52, for {TOKENS_PER_CHUNK} tokens per chunk")
        window = setting(audio, "n_window_infer", int, default=800) // chunk * chunk
        if not window:
            raise CheckpointError(f"config.json: n_window_infer must be at least a chunk, {chunk} frames")
        return cls(mel, chunk, window)

    def rows(self, frames: int) -> int:
        """Return the number of tokens for this many frames."""
        whole, rest = divmod(frames, self.chunk)
        return TOKENS_PER_CHUNK * whole + -(-rest // STRIDE)

    def windows(self, frames: int) -> Iterator[Window]:
        """Yield the windows, the last one filled up with zeros to whole chunks.

        A clip shorter than one chunk isn't padded, since there is no other chunk whose length it must match.
        """
        for first in range(0, frames, self.window):
            length = min(self.window, frames - first)
            yield Window(first, length, length if frames < self.chunk else -(-length // self.chunk) * self.chunk)


@dataclass(frozen=True)
class AudioCostModel:
    """Estimates the audio tower's work from its dimensions."""

    hidden_size: int
    intermediate_size: int
    layers: int
    channels: int
    """Channels of the convolutions."""
    output_size: int
    bands: int
    """Mel bands of the input."""
    unit: int
    """Multiplications per unit of cost."""

    def cost(self, framing: ChunkFraming, frames: int) -> float:
        """Return the work of encoding this many frames: the convolutions and projection of each chunk, and the linear
        layers and windowed attention of each token."""
        chunk = framing.chunk
        tokens = [framing.rows(length) for _, length, _ in framing.windows(frames)]
        linear = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size
        projections = self.hidden_size * (self.hidden_size + self.output_size)
        attention = sum(2 * self.hidden_size * count**2 for count in tokens)
        transformer = sum(tokens) * (self.layers * linear + projections) + self.layers * attention
        return (transformer + self._stem(chunk) * -(-frames // chunk)) / self.unit

    def _stem(self, chunk: int) -> int:
        """Return the multiplications for one chunk up to the transformer: three 3 x 3 convolutions, each of which
        halves bands and frames, and a projection."""
        bands, frames, inputs, work = self.bands, chunk, 1, 0
        for _ in range(3):
            bands, frames = -(-bands // 2), -(-frames // 2)
            work += 9 * bands * frames * inputs * self.channels
            inputs = self.channels
        return work + frames * bands * self.channels * self.hidden_size
