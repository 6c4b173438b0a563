"""Qwen3-Omni's audio tower of our own layers: windows of features in, embeddings out. The reference is
``Qwen3OmniMoeAudioEncoder`` in transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.pinned import to_device
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.base import ModelConfig
from triptych.models.qwen3_omni.audio import STRIDE
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.whisper import EPS, load_whisper_layer, sinusoids
from triptych.models.shared.whisper_config import WhisperConfig

CONVOLUTIONS = 3
CHUNKS = 500
"""Chunks that pass through the convolutions together, whose memory it bounds."""


@dataclass(frozen=True)
class AudioTowerConfig:
    """The ``audio_config`` section."""

    layers: WhisperConfig
    channels: int
    """Channels of the convolutions."""
    chunk: int
    """Frames that pass through the convolutions together."""
    output_size: int

    @classmethod
    def from_config(cls, audio: ModelConfig) -> "AudioTowerConfig":
        """Raises CheckpointError for an invalid value."""
        layers = WhisperConfig.from_config(audio)
        tower_activation(layers.activation, "audio_config.activation_function")  # checks it
        return cls(
            layers=layers,
            channels=setting(audio, "downsample_hidden_size", int, default=480),
            chunk=2 * setting(audio, "n_window", int, default=50),
            output_size=setting(audio, "output_dim", int),
        )


class AudioTower(nn.Module):
    """``Encoder`` that turns windows of log-mel features into embeddings. Windows don't attend to each other.

    The reference pads chunks to the longest one of a call, so that an item's embeddings depend on the rest of its
    batch. Here the preprocessor has padded the chunks as for an item by itself.
    """

    def __init__(  # noqa: PLR0917 (what a tower is made of)
        self,
        chunk: int,
        convolutions: Sequence[tuple[Tensor, Tensor]],
        features: Linear,
        layers: Sequence[TowerLayer],
        norm: LayerNorm,
        projector: MLP,
        *,
        embedding_width: int,
    ) -> None:
        """``convolutions`` are weight [channels, inputs, 3, 3] and bias [channels] of each, of stride 2; ``features``
        makes a state of what they make of a time."""
        super().__init__()
        self.chunk = chunk
        self.weights = nn.ParameterList(frozen(weight) for weight, _ in convolutions)
        self.biases = nn.ParameterList(frozen(bias) for _, bias in convolutions)
        self.features = features
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.projector = projector
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``. Inputs shorter than a chunk are batched by equal length."""
        chunks = [min(len(item.patches), self.chunk) for item in inputs]
        rows: dict[int, Tensor] = {}
        for chunk in sorted(set(chunks)):
            numbers = [number for number, length in enumerate(chunks) if length == chunk]
            rows |= zip(numbers, self._encode([inputs[number] for number in numbers], chunk), strict=True)
        return [rows[number] for number in range(len(inputs))]

    def _encode(self, inputs: Sequence[PreprocessedPart], chunk: int) -> list[Tensor]:
        """Return the embeddings of inputs that consist of whole chunks of ``chunk`` frames."""
        states_per_chunk = -(-chunk // STRIDE)
        valid: list[Tensor] = []
        slots = 0
        for item in inputs:
            whole, rest = divmod(item.grid[0], chunk)
            if len(item.patches) != (whole + (rest > 0)) * chunk:
                raise PlanMismatch(
                    f"{len(item.patches)} frames, {item.grid[0]} of which are valid, aren't whole chunks of {chunk}"
                )
            # only the last chunk can end in padding
            valid.append(torch.arange(slots, slots + states_per_chunk * whole + -(-rest // STRIDE)))
            slots += states_per_chunk * len(item.patches) // chunk
        lengths = [len(one) for one in valid]
        weight = self.norm.weight
        together = torch.cat([torch.from_numpy(item.patches) for item in inputs])
        features, index = to_device([together, torch.cat(valid)], weight.device)
        chunks = features.to(weight.dtype).view(-1, 1, chunk, features.shape[1]).transpose(2, 3)
        hidden = torch.cat([self._states(some) for some in chunks.split(CHUNKS)]).flatten(0, 1)[index]
        boundaries = torch.tensor([0, *accumulate(lengths)])
        for layer in self.layers:
            hidden = layer(hidden, boundaries, None)
        return list(torch.split(self.projector(self.norm(hidden)), lengths))

    def _states(self, chunks: Tensor) -> Tensor:
        """Return the first layer's input [chunks, times, hidden] for ``chunks`` [chunks, 1, bands, frames]."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            chunks = F.gelu(F.conv2d(chunks, weight, bias, stride=2, padding=1))
        states: Tensor = self.features(chunks.permute(0, 3, 1, 2).flatten(2).flatten(0, 1))
        states = states.unflatten(0, (len(chunks), -1))
        positions = sinusoids(states.shape[1], states.shape[2]).to(states.device, states.dtype)
        return states + positions


def load_audio_tower(reader: TowerWeights, config: AudioTowerConfig, tower: str) -> AudioTower:
    """Load the tower of this name. Raises CheckpointError as ``TowerWeights`` does."""
    hidden, channels, bands = config.layers.hidden_size, config.channels, config.layers.bands
    for _ in range(CONVOLUTIONS):
        bands = -(-bands // 2)
    convolutions = [
        (
            reader.parameter(f"{tower}.conv2d{number}.weight", channels, channels if number > 1 else 1, 3, 3),
            reader.parameter(f"{tower}.conv2d{number}.bias", channels),
        )
        for number in range(1, CONVOLUTIONS + 1)
    ]
    return AudioTower(
        config.chunk,
        convolutions,
        reader.linear([f"{tower}.conv_out"], hidden, channels * bands, bias=False),
        [
            load_whisper_layer(reader, config.layers, f"{tower}.layers.{number}", [True] * 3)
            for number in range(config.layers.num_layers)
        ],
        reader.layer_norm(f"{tower}.ln_post", hidden, EPS),
        reader.mlp(
            [f"{tower}.proj1", f"{tower}.proj2"],
            (hidden, hidden, config.output_size),
            tower_activation(config.layers.activation, "audio_config.activation_function"),
        ),
        embedding_width=config.output_size,
    )
