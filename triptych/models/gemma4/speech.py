"""Gemma 4's features of audio: logarithms of magnitudes in mel bands. Numpy only.

The arithmetic follows ``Gemma4AudioFeatureExtractor`` in transformers for a single clip; tests compare the two.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge
from triptych.media.log_mel import triangles
from triptych.models.shared.audio import Window
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.settings import setting

MAX_SAMPLES = 480_000
"""Samples of a clip; the reference drops the rest."""
MAX_SIZE = 2**20
"""Number of bands, and samples of a frame's window. Bounds what a damaged config can make a process allocate."""
STRIDE = 4
"""Frames per embedding: two convolutions, each of stride 2."""


@dataclass(frozen=True)
class SpeechFeatures:
    """``AudioFeatures`` of this family."""

    num_bands: int = 128
    rate: int = 16_000
    window: int = 320
    """Samples of a frame's window; half of the first one's precede the clip."""
    hop: int = 160
    """Samples between two frames."""
    lowest: float = 0.0
    highest: float = 8000.0
    """Bounds of the bands in Hz."""
    floor: float = 1e-3
    """Added before the logarithm."""
    fft: int = 512
    """Length of the Fourier transform."""
    scale: float = 1.0
    """Factor of samples."""
    means: NDArray[np.float64] | None = None
    deviations: NDArray[np.float64] | None = None
    """Means and deviations of each band, by which features are normalised."""
    filters: NDArray[np.float64] = field(init=False, repr=False)
    hann: NDArray[np.float32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        frequencies = np.linspace(0, self.rate // 2, self.fft // 2 + 1)
        low, high = (2595.0 * np.log10(1.0 + hertz / 700.0) for hertz in (self.lowest, self.highest))
        edges = 700.0 * (np.power(10, np.linspace(low, high, self.num_bands + 2) / 2595.0) - 1.0)
        object.__setattr__(self, "filters", triangles(frequencies, edges))
        object.__setattr__(self, "hann", np.hanning(self.window + 1)[:-1].astype(np.float32))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SpeechFeatures":
        """Read the settings of a ``preprocessor_config.json``. Raises CheckpointError for one that is invalid or not
        served."""
        for name, only in (("dither", 0.0), ("preemphasis", 0.0), ("padding_value", 0.0)):
            if config.get(name, only) != only:
                raise CheckpointError(f"{PREPROCESSOR_FILE}: {name} {config[name]!r} is not served; only {only} is")
        bands, rate = (
            _size(config, name, default) for name, default in (("feature_size", 128), ("sampling_rate", 16_000))
        )
        window, hop = (
            round(rate * _number(config, f"{name}_ms", default, 1e6) / 1000)
            for name, default in (("frame_length", 20.0), ("hop_length", 10.0))
        )
        if not 2 <= window <= MAX_SIZE or not 1 <= hop <= MAX_SIZE:
            raise CheckpointError(
                f"{PREPROCESSOR_FILE}: frame_length_ms and hop_length_ms give {window} and {hop} samples"
            )
        overdrive = setting(config, "fft_overdrive", bool, default=False, file=PREPROCESSOR_FILE)
        lowest, highest = _number(config, "min_frequency", 0.0, rate), _number(config, "max_frequency", 8000.0, rate)
        if lowest >= highest:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: min_frequency {lowest} isn't below max_frequency {highest}")
        floor, scale = _number(config, "mel_floor", 1e-3, 1.0), _number(config, "input_scale_factor", 1.0, 1e6)
        if not floor or not scale:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: mel_floor and input_scale_factor may not be 0")
        return cls(
            *(bands, rate, window, hop, lowest, highest, floor),
            2 ** math.ceil(math.log2(window)) * (2 if overdrive else 1),
            scale,
            _by_band(config, "per_bin_mean", bands),
            _by_band(config, "per_bin_stddev", bands),
        )

    def num_frames(self, samples: int) -> int:
        """Return the number of frames whose windows end within ``samples`` samples. Raises BadMediaSize if there is
        none, and MediaTooLarge for more than ``MAX_SAMPLES``."""
        if samples > MAX_SAMPLES:
            longest = MAX_SAMPLES / self.rate
            raise MediaTooLarge(f"the audio is {samples / self.rate:.2f} s long; the model takes at most {longest:g} s")
        # a frame takes one sample more than its window
        frames = -(-(samples - self.window + self.window // 2) // self.hop)
        if frames < 1:
            raise BadMediaSize(f"the audio is shorter than {500 * self.window / self.rate:g} ms")
        return frames

    def __call__(self, samples: NDArray[np.float32], more: int = 0) -> NDArray[np.float32]:
        """Return float32 features of shape (frames, bands). Raises as ``num_frames`` does. ``more`` must be 0."""
        num_frames = self.num_frames(len(samples))
        padded = np.pad(samples if self.scale == 1 else samples * self.scale, (self.window // 2, 0))
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop][:num_frames]
        magnitudes = np.abs(np.fft.rfft(windows * self.hann, n=self.fft))
        logs = np.log(np.matmul(magnitudes, self.filters) + self.floor)
        if self.means is not None:
            logs -= self.means
        if self.deviations is not None:
            logs /= self.deviations
        features: NDArray[np.float32] = logs.astype(np.float32)
        return features


@dataclass(frozen=True)
class WholeClip:
    """``AudioFraming`` of clips that are encoded whole."""

    mel: SpeechFeatures
    more: ClassVar[int] = 0
    """See ``AudioFraming``."""

    def rows(self, frames: int) -> int:
        """Return the number of embeddings for this many frames."""
        return -(-frames // STRIDE)

    def windows(self, frames: int) -> Iterator[Window]:
        """Yield the only one."""
        yield Window(0, frames, frames)


def _size(config: dict[str, Any], name: str, default: int) -> int:
    value = setting(config, name, int, default=default, file=PREPROCESSOR_FILE)
    if value > MAX_SIZE:
        raise CheckpointError(f"{PREPROCESSOR_FILE}: {name} must be at most {MAX_SIZE}, not {value}")
    return value


def _number(config: dict[str, Any], name: str, default: float, most: float) -> float:
    value = setting(config, name, float, default=default, file=PREPROCESSOR_FILE)
    if not 0 <= value <= most:
        raise CheckpointError(f"{PREPROCESSOR_FILE}: {name} must be from 0 to {most:g}, not {value}")
    return value


def _by_band(config: dict[str, Any], name: str, bands: int) -> NDArray[np.float64] | None:
    values = config.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != bands or not all(type(one) in (int, float) for one in values):
        raise CheckpointError(f"{PREPROCESSOR_FILE}: {name} must be {bands} numbers")
    return np.array(values, dtype=np.float64)
