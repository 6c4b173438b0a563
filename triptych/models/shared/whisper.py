"""Whisper's encoder of our own layers, with its states averaged in pairs and projected.

The references are ``Qwen2AudioEncoder`` and ``Qwen2_5OmniAudioEncoder`` in transformers, which compute padding as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.pinned import to_device
from triptych.layers.tower_layer import TowerLayer
from triptych.models.base import AUDIO
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.whisper_config import STATES_PER_ROW, WhisperConfig, WindowFrames, states_of

EPS = 1e-5
"""Epsilon of all norms; not in the config."""
MAX_TIMESCALE = 10_000
KERNEL = 3
"""Frames that a convolution sees."""


@dataclass(frozen=True)
class WhisperNames:
    """The names of tensors in which checkpoints differ; the others are named by ``AUDIO`` and a dot."""

    norm: str
    """Name of the norm after the layers."""
    projection: str
    positions: str | None = None
    """Name of the table of positions; None if it isn't stored."""


class WhisperTower(nn.Module):
    """``Encoder`` of windows of log-mel features. Windows don't attend to each other."""

    def __init__(
        self,
        frames: WindowFrames,
        convolutions: Sequence[tuple[Tensor, Tensor]],
        positions: Tensor,
        layers: Sequence[TowerLayer],
        *,
        norm: LayerNorm,
        projection: Linear,
        embedding_width: int,
    ) -> None:
        """``convolutions`` are weight [hidden, inputs, 3] and bias [hidden] of both, and ``positions`` [states, hidden]
        are added to a window's states. ``norm`` and ``projection`` follow the average."""
        super().__init__()
        self.frames = frames
        self.weights = nn.ParameterList(frozen(weight) for weight, _ in convolutions)
        self.biases = nn.ParameterList(frozen(bias) for _, bias in convolutions)
        self.positions = frozen(positions)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.projection = projection
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        for item in inputs:
            if not 0 < item.grid[0] <= self.frames.most or len(item.patches) != self.frames.given(item.grid[0]):
                raise PlanMismatch(f"{len(item.patches)} frames don't fill a window of {item.grid}")
        states = [states_of(item.grid[0]) for item in inputs]
        hidden = self._embedded([torch.from_numpy(item.patches) for item in inputs], states)
        boundaries = torch.tensor([0, *states]).cumsum(0)
        for layer in self.layers:
            hidden = layer(hidden, boundaries, None)
        counts = [count // STATES_PER_ROW for count in states]
        windows = zip(torch.split(hidden, states), counts, strict=True)
        pairs = torch.cat([window[: count * STATES_PER_ROW] for window, count in windows])
        averaged = pairs.view(-1, STATES_PER_ROW, hidden.shape[1]).mean(1)
        rows: Tensor = self.projection(self.norm(averaged))
        return list(torch.split(rows, counts))

    def _embedded(self, windows: Sequence[Tensor], states: Sequence[int]) -> Tensor:
        """Return the transformer's input [states of all windows, hidden] for features [frames, bands]. To a window's
        convolutions all beyond its frames is zero."""
        device, dtype = self.positions.device, self.positions.dtype
        lengths = torch.tensor([len(window) for window in windows])
        padded, lengths = to_device([pad_sequence(list(windows), batch_first=True), lengths], device)
        within = torch.arange(padded.shape[1], device=device) < lengths[:, None]  # [windows, frames]
        features = padded.to(dtype).transpose(1, 2)  # [windows, bands, frames]
        first = F.gelu(F.conv1d(features, self.weights[0], self.biases[0], padding=1)) * within[:, None]
        second = F.gelu(F.conv1d(first, self.weights[1], self.biases[1], stride=2, padding=1)).transpose(1, 2)
        each = zip(second, states, strict=True)
        return torch.cat([window[:count] + self.positions[:count] for window, count in each])


def load_whisper(
    reader: TowerWeights, config: WhisperConfig, frames: WindowFrames, names: WhisperNames, embedding_width: int
) -> WhisperTower:
    """Load a tower whose embeddings have ``embedding_width`` values. Raises CheckpointError as ``TowerWeights`` does,
    and for an activation that isn't served."""
    hidden = config.hidden_size
    convolutions = [
        (
            reader.parameter(f"{AUDIO}.{name}.weight", hidden, inputs, KERNEL),
            reader.parameter(f"{AUDIO}.{name}.bias", hidden),
        )
        for name, inputs in (("conv1", config.bands), ("conv2", hidden))
    ]
    if names.positions is None:
        positions = sinusoids(config.positions, hidden).to(reader.device, reader.weights.activations)
    else:
        positions = reader.parameter(names.positions, config.positions, hidden)
    return WhisperTower(
        frames,
        convolutions,
        positions,
        [
            load_whisper_layer(reader, config, f"{AUDIO}.layers.{number}", [True, False, True])
            for number in range(config.num_layers)
        ],
        norm=reader.layer_norm(names.norm, hidden, EPS),
        projection=reader.linear([names.projection], embedding_width, hidden),
        embedding_width=embedding_width,
    )


def sinusoids(length: int, channels: int) -> Tensor:
    """Return float32 positions [length, channels]: sines, then cosines, of geometrically spaced frequencies."""
    # the reference's operations, in its order and precision: small differences grow with the place
    step = math.log(MAX_TIMESCALE) / max(channels // 2 - 1, 1)
    frequencies = torch.exp(-step * torch.arange(channels // 2).float())
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def load_whisper_layer(reader: TowerWeights, config: WhisperConfig, name: str, biases: Sequence[bool]) -> TowerLayer:
    """Load the layer of this name; ``biases`` say which of the layers of queries, keys and values have biases. Raises
    CheckpointError as ``load_whisper`` does."""
    hidden, attention = config.hidden_size, f"{name}.self_attn"
    qkv = [f"{attention}.{kind}_proj" for kind in "qkv"]
    return TowerLayer(
        reader.layer_norm(f"{attention}_layer_norm", hidden, EPS),
        reader.attention(qkv, f"{attention}.out_proj", hidden, config.num_heads, (biases, True)),
        reader.layer_norm(f"{name}.final_layer_norm", hidden, EPS),
        reader.mlp(
            [f"{name}.fc1", f"{name}.fc2"],
            (hidden, config.intermediate_size, hidden),
            tower_activation(config.activation, "audio_config.activation_function"),
        ),
    )
