"""How Qwen3-Omni hears: audio becomes frames of features, chunks of frames become tokens, and each window of chunks is
encoded by itself. No torch.

The arithmetic is that of ``WhisperFeatureExtractor``, ``Qwen3OmniMoeProcessor`` and ``Qwen3OmniMoeAudioEncoder`` in
transformers for an item by itself; tests hold it equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.media.log_mel import LogMel
from triptych.models.base import ModelConfig
from triptych.models.shared.settings import setting

STRIDE = 8
"""Frames that become a token: three convolutions, each of stride 2."""
TOKENS_PER_CHUNK = 13
"""Of a whole chunk, whatever its length: the reference's formula says so."""


@dataclass(frozen=True)
class Hearing:
    """``mel`` makes features; ``chunk`` frames of them go through the convolutions together, the last ones of an item
    filled up with zeros; a token attends to those of its ``window`` of frames, whole chunks, and to no others."""

    mel: LogMel
    chunk: int
    window: int

    @classmethod
    def from_configs(cls, audio: ModelConfig, preprocessor_config: dict[str, Any]) -> "Hearing":
        """From the ``audio_config`` section. Raises CheckpointError for a bad value, and where the features aren't what
        the tower takes."""
        bands = setting(audio, "num_mel_bins", int, default=128)
        mel = LogMel.from_config({"feature_size": bands} | preprocessor_config)
        if mel.num_bands != bands:
            raise CheckpointError(
                f"preprocessor_config.json: feature_size is {mel.num_bands}, but audio_config.num_mel_bins of "
                f"config.json is {bands}"
            )
        chunk = 2 * setting(audio, "n_window", int, default=50)
        if -(-chunk // STRIDE) != TOKENS_PER_CHUNK:
            raise CheckpointError(f"config.json: n_window must be 49 to 52, so that {TOKENS_PER_CHUNK} tokens are made")
        window = setting(audio, "n_window_infer", int, default=800) // chunk * chunk
        if not window:
            raise CheckpointError(f"config.json: n_window_infer must be at least a chunk, {chunk} frames")
        return cls(mel, chunk, window)

    def rows(self, frames: int) -> int:
        """How many tokens so many frames become."""
        whole, rest = divmod(frames, self.chunk)
        return TOKENS_PER_CHUNK * whole + -(-rest // STRIDE)

    def parts(self, frames: int) -> Iterator[tuple[int, int, int]]:
        """(first frame, frames, frames with those that fill up the last chunk) of each window. What is shorter than a
        chunk has nothing beside it that it would have to be as long as, and isn't filled up."""
        for first in range(0, frames, self.window):
            length = min(self.window, frames - first)
            yield first, length, length if frames < self.chunk else -(-length // self.chunk) * self.chunk


@dataclass(frozen=True)
class HearingWork:
    """What the audio tower computes, in units of ``unit`` multiplications."""

    hidden_size: int
    intermediate_size: int
    layers: int
    channels: int
    output_size: int
    bands: int
    unit: int

    def cost(self, hearing: Hearing, frames: int) -> float:
        """Work of encoding so many frames: each chunk's convolutions and the layer behind them, each token's linear
        layers, and its attention over its window."""
        chunk = hearing.chunk
        tokens = [hearing.rows(length) for _, length, _ in hearing.parts(frames)]
        linear = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size
        projections = self.hidden_size * (self.hidden_size + self.output_size)
        attention = sum(2 * self.hidden_size * count**2 for count in tokens)
        transformer = sum(tokens) * (self.layers * linear + projections) + self.layers * attention
        return (transformer + self._stem(chunk) * -(-frames // chunk)) / self.unit

    def _stem(self, chunk: int) -> int:
        """Of one chunk: three convolutions of 3 x 3, each of which halves bands and frames."""
        bands, frames, inputs, work = self.bands, chunk, 1, 0
        for _ in range(3):
            bands, frames = -(-bands // 2), -(-frames // 2)
            work += 9 * bands * frames * inputs * self.channels
            inputs = self.channels
        return work + frames * bands * self.channels * self.hidden_size
