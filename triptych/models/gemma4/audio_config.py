"""The settings of Gemma 4's audio tower, as ``Gemma4AudioConfig`` in transformers completes them."""

from dataclasses import dataclass

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.tower_limits import MAX_LAYERS

AUDIO_TOWER = "gemma4_audio"
INVALID = -1e6
"""Logits below it have no weight in float32."""


@dataclass(frozen=True)
class Gemma4AudioConfig:
    """The audio tower's parameters."""

    hidden_size: int
    num_layers: int
    num_heads: int
    activation: str
    channels: tuple[int, int]
    """Channels of the two convolutions over features."""
    kernel_size: int
    """Tokens that a layer's convolution reads."""
    window: int
    """Tokens that a token attends to: itself and those before it."""
    logit_cap: float
    residual_weight: float
    """Factor of what an MLP adds."""
    clips: bool
    """Whether inputs and outputs of linear layers are clipped."""
    limit: float
    """Bound of values between modules."""
    eps: float
    output_size: int

    @property
    def bands(self) -> int:
        """Values of a frame of features. The convolutions reduce them to a quarter, rounded up."""
        return self.channels[0] // 4 * 4

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.hidden_size // self.num_heads

    def cost(self, frames: int, unit: float) -> float:
        """Return the work of encoding this many frames of features, in units of ``unit`` multiplications."""
        first, second = self.channels
        tokens, hidden = -(-frames // 4), self.hidden_size
        # an MLP of four times the width before and after attention and convolution
        layer = hidden**2 * (16 + 4 + 3) + hidden * (3 * self.window + self.kernel_size)
        stem = 9 * first * second * first // 4 + 9 * first * 4 * first // 2 + first // 4 * second * hidden
        return tokens * (self.num_layers * layer + stem + hidden * self.output_size) / unit


def has_audio(config: ModelConfig) -> bool:
    """Return whether the model has an audio tower."""
    return config.get("audio_config") is not None


def audio_config(config: ModelConfig) -> Gemma4AudioConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    audio = setting(config, "audio_config", dict)
    if (kind := audio.get("model_type", AUDIO_TOWER)) != AUDIO_TOWER:
        raise CheckpointError(f"config.json: audio_config.model_type {kind!r} is not served; only {AUDIO_TOWER!r} is")
    channels = audio.get("subsampling_conv_channels", [128, 32])
    if (
        not isinstance(channels, list)
        or len(channels) != 2
        or not all(type(n) is int and 4 <= n <= 2**16 for n in channels)
    ):
        raise CheckpointError(f"config.json: audio_config.subsampling_conv_channels {channels!r} is not served")
    found = Gemma4AudioConfig(
        hidden_size=_size(config, "hidden_size", 1024),
        num_layers=_size(config, "num_hidden_layers", 12),
        num_heads=_size(config, "num_attention_heads", 8),
        activation=setting(audio, "hidden_act", str, default="silu"),
        channels=(channels[0], channels[1]),
        kernel_size=_size(config, "conv_kernel_size", 5),
        window=_window(config),
        logit_cap=positive_number(audio, "attention_logit_cap", 50.0),
        residual_weight=positive_number(audio, "residual_weight", 0.5),
        clips=setting(audio, "use_clipped_linears", bool, default=True),
        limit=positive_number(audio, "gradient_clipping", 1e10),
        eps=positive_number(audio, "rms_norm_eps", 1e-6),
        output_size=_size(config, "output_proj_dims", 1536),
    )
    if found.hidden_size % found.num_heads or found.hidden_size % 2:
        raise CheckpointError(f"config.json: audio_config has {found.num_heads} heads of {found.hidden_size} values")
    if max(found.num_layers, found.kernel_size, found.window) > MAX_LAYERS:
        raise CheckpointError(f"config.json: audio_config has more than {MAX_LAYERS} layers or tokens of a window")
    return found


def check_bands(audio: Gemma4AudioConfig, bands: int) -> None:
    """Raise CheckpointError for a processor of features that don't fit the tower: it takes a fourth of ``bands``,
    rounded up."""
    if -(-bands // 4) * 4 != audio.bands:
        raise CheckpointError(
            f"preprocessor_config.json: feature_size is {bands}, but audio_config.subsampling_conv_channels of "
            f"config.json are {list(audio.channels)}, for {audio.bands}"
        )


def _window(config: ModelConfig) -> int:
    """Return the number of tokens that a token attends to. Of the reference's settings, only those are served by which
    each of them has an embedding of its distance."""
    left = _size(config, "attention_context_left", 13)
    chunk = _size(config, "attention_chunk_size", 12)
    right = config["audio_config"].get("attention_context_right", 0)
    if right != 0 or chunk != left - 1:
        raise CheckpointError(
            f"config.json: audio_config: attention_context_left {left}, attention_context_right {right!r} and "
            f"attention_chunk_size {chunk} are not served; served are one more than the last, 0, and any"
        )
    if setting(config, "audio_config.attention_invalid_logits_value", float, default=-1e9) > INVALID:
        raise CheckpointError(f"config.json: audio_config.attention_invalid_logits_value must be below {INVALID:g}")
    return chunk


def _size(config: ModelConfig, name: str, default: int) -> int:
    return setting(config, f"audio_config.{name}", int, default=default)
