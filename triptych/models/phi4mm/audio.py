"""How Phi-4-multimodal divides audio: samples become frames of log-mel features, and eight frames an embedding. Numpy
only.

The references are ``Phi4MultimodalFeatureExtractor`` in transformers and the extractor in the published files, for a
clip by itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.phi4mm.config import is_published
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_limits import check_heads, check_layers

STRIDE = 8
"""Frames per embedding: three convolutions, each of stride 2."""
EXTRACTOR: Mapping[str, Any] = {
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 512,
    "win_length": 400,
    "preemphasis": 0.97,
    "audio_compression_rate": STRIDE,
    "audio_downsample_rate": 1,
    "audio_feat_stride": 1,
    "mel_min_frequency": 0,
    "mel_max_frequency": 7690,
}
"""What is served of the processor's settings: the defaults."""
RATE, HOP, FFT, WINDOW = 16_000, 160, 512, 400
EMPHASIS, LOWEST, HIGHEST = 0.97, 0.0, 7690.0
SCALE = 32_768
"""Factor of samples, which are from -1 to 1."""
FRAMES_AT_A_TIME = 1024
RENAMED = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}
"""Published names of settings, and transformers'."""
NESTED = {
    "nemo_conv_channels": "nemo_conv_settings.conv_channels",
    "bias_max_distance": "relative_attention_bias_args.t5_bias_max_distance",
}
DROPPED = frozenset(
    (
        *("activation_checkpointing", "cnn_layer_norm", "input_layer", "encoder_embedding_config"),
        *("nemo_conv_settings", "relative_attention_bias_args"),
    )
)
SERVED: Mapping[str, Any] = {
    "chunk_size": -1,
    "time_reduction": STRIDE,
    "downsample_rate": 1,
    "bias_symmetric": False,
    "activation": "swish",
    "conv_activation": "swish",
    "conv_glu_type": "swish",
    "nemo_activation": "relu",
    "depthwise_multiplier": 1,
}
SERVED_AS_PUBLISHED: Mapping[str, Any] = {"causal": True, "batch_norm": False, "bias_in_glu": True}


@dataclass(frozen=True)
class Phi4AudioConfig:
    """The settings of the audio tower."""

    bands: int
    """Mel bands."""
    channels: int
    """Channels of the first convolutions."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    kernel: int
    """Embeddings that a layer's convolution sees."""
    max_distance: int
    """Distance from which on all have the same bias."""


def audio_config(config: ModelConfig) -> Phi4AudioConfig:
    """Return the settings of the audio tower. Raises CheckpointError for an invalid value, and for those that aren't
    served."""
    if is_published(config):
        published = setting(config, "audio_processor.config", dict)
        found: dict[str, Any] = {
            RENAMED.get(name, str(name)): value for name, value in published.items() if name not in DROPPED
        }
        found |= {name: setting(published, path, int) for name, path in NESTED.items()}
    else:
        found = dict(setting(config, "audio_config", dict, default={}))
    for name, served in {**SERVED, **SERVED_AS_PUBLISHED}.items():
        if found.get(name, served) != served:
            raise CheckpointError(f"config.json: the audio tower's {name} must be {served}, not {found[name]!r}")
    section = {"audio_config": found}

    def number(name: str, default: int) -> int:
        return setting(section, f"audio_config.{name}", int, default=default)

    hidden, layers, heads = number("hidden_size", 1024), number("num_blocks", 24), number("num_attention_heads", 16)
    check_layers(layers, "audio_config")
    check_heads(hidden, heads, "audio_config")
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if number(name, 1024) != hidden:
            raise CheckpointError(f"config.json: the audio tower's {name} must be {hidden}, not {number(name, 1024)}")
    return Phi4AudioConfig(
        bands=number("input_size", 80),
        channels=number("nemo_conv_channels", 1024),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", 1536),
        num_heads=heads,
        num_layers=layers,
        kernel=number("kernel_size", 3),
        max_distance=number("bias_max_distance", 1000),
    )


def check_extractor(preprocessor_config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for features other than the defaults."""
    for name, served in EXTRACTOR.items():
        if preprocessor_config.get(name, served) != served:
            raise CheckpointError(f"preprocessor_config.json: {name} must be {served}")


@dataclass(frozen=True)
class LogFilterbank:
    """Logarithms of the energy in mel bands of windows with pre-emphasis."""

    num_bands: int

    @cached_property
    def filters(self) -> NDArray[np.float32]:
        """float32 [frequencies, bands]: triangles on the mel scale of Kaldi."""
        frequencies = 1127.0 * np.log(1.0 + np.arange(FFT // 2 + 1) * (RATE / FFT) / 700.0)
        lowest, highest = (1127.0 * math.log(1.0 + hertz / 700.0) for hertz in (LOWEST, HIGHEST))
        points = np.linspace(lowest, highest, self.num_bands + 2)
        widths, distances = np.diff(points), points[None] - frequencies[:, None]
        rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
        filters: NDArray[np.float32] = np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)
        return filters

    @staticmethod
    def num_frames(samples: int) -> int:
        """Return the number of frames of ``samples`` samples. Raises BadMediaSize for fewer than a window."""
        if samples < WINDOW:
            raise BadMediaSize(f"the audio is shorter than {1000 * WINDOW / RATE:g} ms")
        return (samples - WINDOW) // HOP + 1

    def __call__(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return float32 [frames, bands]. Raises as ``num_frames`` does."""
        frames = self.num_frames(len(samples))
        windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP][:frames]
        hamming, logs = np.hamming(WINDOW), np.empty((frames, self.num_bands), dtype=np.float32)
        for first in range(0, frames, FRAMES_AT_A_TIME):
            some = windows[first : first + FRAMES_AT_A_TIME]
            before = np.concatenate((some[:, :1], some[:, :-1]), axis=1)
            emphasised = (some - np.float32(EMPHASIS) * before) * np.float32(SCALE)
            spectrum = np.abs(np.fft.rfft(hamming * emphasised, FFT).astype(np.complex64))
            np.matmul(spectrum**2, self.filters, out=logs[first : first + FRAMES_AT_A_TIME])
        np.log(np.maximum(logs, np.float32(1.0), out=logs), out=logs)
        return logs
