"""Log-mel features of audio, as Whisper's: the logarithm of the energy in mel bands, one frame per hop. Numpy only.

The arithmetic follows ``WhisperFeatureExtractor`` in transformers for a single item, with ``padding="longest"`` or, if
clips are padded with silence, ``"max_length"``; tests compare the two.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge

_MAX_FREQUENCY = 8000.0
_FLOOR = 1e-10
_RANGE = 8.0
"""Dynamic range in powers of ten: quieter values are raised to this far below the loudest."""
_FRAMES_AT_A_TIME = 1024

_CHUNK_LENGTH = 30
"""Seconds; the reference's default."""

_KEYS = {"num_bands": "feature_size", "rate": "sampling_rate", "hop": "hop_length", "window": "n_fft"}
_MOST = {"feature_size": 1024, "n_fft": 2**14}
"""A table has as many values as bands times half of a window. Models have 80 or 128 bands, and windows of 400."""

# Slaney's mel scale: linear up to 1000 Hz, logarithmic above.
_LINEAR_STEP, _BREAK_HERTZ, _BREAK_MEL = 200.0 / 3, 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0


@dataclass(frozen=True)
class LogMel:
    """Log-mel feature extractor."""

    num_bands: int = 128
    """Mel bands."""
    rate: int = 16_000
    """Samples per second."""
    hop: int = 160
    """Samples between two frames."""
    window: int = 400
    """Samples of a frame's window."""
    padded_to: int | None = None
    """Samples that clips are padded to with silence, and may not exceed; None if they aren't padded."""
    _filters: NDArray[np.float32] = field(init=False, repr=False)
    _hann: NDArray[np.float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_filters", mel_filters(self.num_bands, self.rate, self.window))
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        object.__setattr__(self, "_hann", hann.astype(np.float32))

    @classmethod
    def from_config(cls, config: dict[str, Any], is_padded: bool = False) -> "LogMel":
        """Read the settings of a ``preprocessor_config.json``; ``is_padded`` pads clips to ``chunk_length``. Raises
        CheckpointError for an invalid value."""
        settings = {name: _positive(config, key, getattr(cls, name)) for name, key in _KEYS.items()}
        for key, most in _MOST.items():
            if config.get(key, 0) > most:
                raise CheckpointError(f"preprocessor_config.json: {key} must be at most {most}")
        if config.get("dither", 0.0):
            raise CheckpointError("preprocessor_config.json: dither makes features random; only 0 is supported")
        if is_padded:
            settings["padded_to"] = _positive(config, "chunk_length", _CHUNK_LENGTH) * settings["rate"]
            if settings["padded_to"] % settings["hop"]:
                raise CheckpointError(
                    "preprocessor_config.json: chunk_length must be whole hops, of hop_length samples"
                )
        return cls(**settings)

    def num_frames(self, samples: int) -> int:
        """Return the number of frames of ``samples`` samples. Raises BadMediaSize for fewer than a window, and
        MediaTooLarge for more than ``padded_to``."""
        if samples < self.window:
            raise BadMediaSize(f"the audio is shorter than {1000 * self.window / self.rate:g} ms")
        if self.padded_to is None:
            return samples // self.hop
        if samples > self.padded_to:
            longest = self.padded_to // self.rate
            raise MediaTooLarge(f"the audio is {samples / self.rate:.2f} s long; the model takes at most {longest} s")
        return -(-samples // self.hop)  # the last one may be partly silence

    def __call__(self, samples: NDArray[np.float32], more: int = 0) -> NDArray[np.float32]:
        """Return float32 features of shape (frames, bands), and those of up to ``more`` frames of the silence that
        follows. Raises as ``num_frames`` does."""
        num_frames = wanted = self.num_frames(len(samples))
        if self.padded_to is not None:
            longest = self.padded_to // self.hop
            wanted = min(wanted + more, longest)
            # features are relative to the loudest frame, which may be one that begins after the clip's end
            num_frames = max(wanted, min(-(-(len(samples) + self.window // 2) // self.hop), longest))
            silence = min(self.padded_to - len(samples), (more + 2) * self.hop + self.window)
            samples = np.pad(samples, (0, silence))
        padded = np.pad(samples, self.window // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop][:num_frames]
        logs = np.empty((num_frames, self.num_bands), dtype=np.float32)
        for first in range(0, num_frames, _FRAMES_AT_A_TIME):
            spectrum = np.fft.rfft(windows[first : first + _FRAMES_AT_A_TIME] * self._hann)
            power = spectrum.real**2 + spectrum.imag**2
            np.matmul(power, self._filters, out=logs[first : first + _FRAMES_AT_A_TIME])
        np.log10(np.maximum(logs, np.float32(_FLOOR), out=logs), out=logs)
        np.maximum(logs, logs.max() - np.float32(_RANGE), out=logs)
        logs += np.float32(4)
        logs /= np.float32(4)
        return logs[:wanted]


def _positive(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"preprocessor_config.json: {key} must be a positive integer, not {value!r}")
    return value


def mel_filters(num_bands: int, rate: int, window: int) -> NDArray[np.float32]:
    """Return float32 filters of shape (window / 2 + 1, bands): triangles of equal area on Slaney's mel scale."""
    frequencies = np.linspace(0, rate / 2, window // 2 + 1)
    edges = _hertz(np.linspace(0.0, _mel(min(_MAX_FREQUENCY, rate / 2)), num_bands + 2))
    filters: NDArray[np.float32] = (triangles(frequencies, edges) * (2.0 / (edges[2:] - edges[:-2]))).astype(np.float32)
    return filters


def triangles(frequencies: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights [frequencies, bands] that rise from 0 at an edge to 1 at the next one, and fall to 0 at the one
    after that; there are two edges more than bands."""
    widths = np.diff(edges)
    distances = edges[None, :] - frequencies[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    weights: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return weights


def _mel(hertz: float) -> float:
    if hertz < _BREAK_HERTZ:
        return hertz / _LINEAR_STEP
    return float(_BREAK_MEL + np.log(hertz / _BREAK_HERTZ) / _LOG_STEP)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_STEP, _BREAK_HERTZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL)))
