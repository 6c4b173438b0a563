"""Settings of audio towers that are Whisper's encoder with its states averaged in pairs, and how they divide a clip. No
torch.

The references are ``Qwen2AudioEncoder`` and ``Qwen2_5OmniAudioEncoder`` in transformers, which read the same settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import CheckpointError
from triptych.media.log_mel import LogMel
from triptych.models.base import ModelConfig
from triptych.models.shared.audio import Window
from triptych.models.shared.settings import setting

FRAMES_PER_STATE, STATES_PER_ROW = 2, 2
"""The strides of the second convolution and of the average."""


@dataclass(frozen=True)
class WhisperConfig:
    """The ``audio_config`` section. Published files leave out what is a default."""

    bands: int
    """Mel bands."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    activation: str
    positions: int
    """States that have positions."""

    @classmethod
    def from_config(cls, audio: ModelConfig) -> "WhisperConfig":
        """Raises CheckpointError for an invalid value."""
        config = cls(
            bands=setting(audio, "num_mel_bins", int, default=128),
            hidden_size=setting(audio, "d_model", int, default=1280),
            intermediate_size=setting(audio, "encoder_ffn_dim", int, default=5120),
            num_heads=setting(audio, "encoder_attention_heads", int, default=20),
            num_layers=setting(audio, "encoder_layers", int, default=32),
            activation=setting(audio, "activation_function", str, default="gelu"),
            positions=setting(audio, "max_source_positions", int, default=1500),
        )
        if config.hidden_size % (2 * config.num_heads):
            raise CheckpointError(
                f"config.json: audio_config.d_model {config.hidden_size} must be an even number of values for each of "
                f"{config.num_heads} encoder_attention_heads"
            )
        return config

    @property
    def work_per_state(self) -> int:
        """Multiplications of the linear layers for one state."""
        return self.num_layers * (4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size)

    def cost(self, frames: int, embedding_width: int, unit: float) -> float:
        """Return the work of a window of this many frames, in units of ``unit`` multiplications: the convolutions, the
        linear layers and attention of each state, and the projection of each row."""
        states = states_of(frames)
        convolutions = 3 * self.hidden_size * (frames * self.bands + states * self.hidden_size)
        attention = 2 * self.num_layers * self.hidden_size * states**2
        projection = states // STATES_PER_ROW * self.hidden_size * embedding_width
        return (convolutions + states * self.work_per_state + attention + projection) / unit


def states_of(frames: int) -> int:
    """Return the number of the transformer's states for this many frames."""
    return -(-frames // FRAMES_PER_STATE)


@dataclass(frozen=True)
class WindowFrames:
    """Frames of features of a window, whose states attend to one another and to no others."""

    most: int
    """Frames of all windows but a clip's last."""
    more: int = 0
    """Frames after a clip's last whose features the convolutions see; 0 if they see zeros."""

    def given(self, frames: int) -> int:
        """Return the number of frames that the tower gets of a window of this many frames."""
        return min(frames + self.more, self.most)


@dataclass(frozen=True)
class WhisperFraming:
    """``AudioFraming`` for these towers."""

    mel: LogMel
    """Computes the features, one frame per hop."""
    frames: WindowFrames

    @property
    def more(self) -> int:
        """See ``AudioFraming``."""
        return self.frames.more

    def rows(self, frames: int) -> int:
        """Return the number of embeddings of this many frames: an odd state at the end is left out."""
        return states_of(frames) // STATES_PER_ROW

    def windows(self, frames: int) -> Iterator[Window]:
        """Yield the windows. One or two frames at the end become no row, and are left out."""
        for first in range(0, frames, self.frames.most):
            length = min(self.frames.most, frames - first)
            if self.rows(length):
                yield Window(first, length, self.frames.given(length))
