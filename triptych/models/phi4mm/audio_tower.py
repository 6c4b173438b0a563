"""Phi-4-multimodal's audio tower of our own layers: a conformer, and one of two projectors. The reference is
``Phi4MultimodalAudioModel`` in transformers."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.mlp import GatedMLP
from triptych.layers.pinned import to_device
from triptych.layers.pointwise import Activation, gate_and_mul
from triptych.models.base import AUDIO
from triptych.models.phi4mm.audio import Phi4AudioConfig
from triptych.models.shared.tower_weights import TowerWeights

RENAMED = (
    (r"audio_projection\.(speech|vision)\.0\.", r"up_proj_for_\1."),
    (r"audio_projection\.(speech|vision)\.2\.", r"down_proj_for_\1."),
    (r"proj_for_vision\.", r"proj_for_vision_speech."),
    (r"feed_forward_(in|out)\.net\.0\.linear\.", r"feed_forward_\1.gate_up_proj."),
    (r"feed_forward_(in|out)\.net\.2\.", r"feed_forward_\1.down_proj."),
    (r"self_attn\.linear_([qkv])\.", r"self_attn.\1_proj."),
    (r"self_attn\.linear_out\.", r"self_attn.o_proj."),
)
"""Patterns of published names, and transformers'."""
PROJECTORS = ("speech", "vision_speech")
"""Projectors of requests without images, and with."""
WINDOW = 500
"""Embeddings of a window, which attend to one another and to no others."""
EPS = 1e-5
"""Epsilon of all norms; not in the config."""


class Kernel(nn.Module):
    """A convolution's weight and bias."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = frozen(weight), frozen(bias)

    def forward(self, inputs: Tensor, *, stride: int = 1, padding: int = 0, groups: int = 1) -> Tensor:
        """[N, channels, …] → [N, outputs, …]"""
        convolve = F.conv2d if self.weight.dim() == 4 else F.conv1d
        return convolve(inputs, self.weight, self.bias, stride=stride, padding=padding, groups=groups)


class Subsampling(nn.Module):
    """Convolutions over times and bands, each of stride 2, and a layer: eight frames become a state."""

    def __init__(self, first: Kernel, others: Sequence[tuple[Kernel, Linear]], output: Linear) -> None:
        """The first convolution makes the channels, of which each of the others takes one, before a layer over all."""
        super().__init__()
        self.kernels = nn.ModuleList([first, *(kernel for kernel, _ in others)])
        self.layers = nn.ModuleList(layer for _, layer in others)
        self.output = output

    def forward(self, features: Tensor) -> Tensor:
        """``features`` [frames, bands] → [states, hidden]."""
        found = F.relu(self._convolved(features[None, None], 0, 1))
        for number, layer in enumerate(self.layers, start=1):
            convolved = self._convolved(found, number, found.shape[1]).permute(0, 2, 3, 1)
            found = F.relu(layer(convolved.flatten(0, 2))).view(convolved.shape).permute(0, 3, 1, 2)
        states: Tensor = self.output(found[0].transpose(0, 1).flatten(1))
        return states

    def _convolved(self, inputs: Tensor, number: int, groups: int) -> Tensor:
        convolved: Tensor = self.kernels[number](inputs, stride=2, padding=1, groups=groups)
        return convolved


class CausalConvolution(nn.Module):
    """The convolution of a conformer's layer: a gated layer, a convolution of each channel, and two layers."""

    def __init__(self, norm: LayerNorm, gated: Linear, kernel: Kernel, layers: tuple[Linear, Linear]) -> None:
        """``gated`` makes the gates and their factors."""
        super().__init__()
        self.norm = norm
        self.gated = gated
        self.kernel = kernel
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """[windows, states, hidden] → the same. A state sees those before it, and zeros before a window."""
        gated = gate_and_mul(self.gated(self.norm(hidden).flatten(0, 1)), Activation.SILU).view_as(hidden)
        channels, _, size = self.kernel.weight.shape
        convolved = self.kernel(F.pad(gated.transpose(1, 2), (size - 1, 0)), groups=channels)
        convolved = convolved.transpose(1, 2).flatten(0, 1)
        output: Tensor = self.layers[1](Activation.SILU(self.layers[0](convolved)))
        return output.view_as(hidden)


class Phi4AudioLayer(nn.Module):
    """Half of an MLP, attention, a convolution and the other half, each added to the residual stream; and a norm."""

    def __init__(  # noqa: PLR0917 (what it is made of)
        self,
        mlps: Sequence[tuple[LayerNorm, GatedMLP]],
        attention_norm: LayerNorm,
        qkv: Linear,
        output: Linear,
        convolution: CausalConvolution,
        norm: LayerNorm,
    ) -> None:
        super().__init__()
        self.mlp_norms, self.mlps = nn.ModuleList(one for one, _ in mlps), nn.ModuleList(one for _, one in mlps)
        self.attention_norm = attention_norm
        self.qkv = qkv
        self.output = output
        self.convolution = convolution
        self.norm = norm

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """[windows, states, hidden] → the same; ``bias`` [heads, states, states] is added to scores of attention."""
        hidden = hidden + self._half(hidden, 0)
        flat = self.qkv(self.attention_norm(hidden).flatten(0, 1))
        query, key, value = flat.view(*hidden.shape[:2], 3, len(bias), -1).permute(2, 0, 3, 1, 4)
        found = (
            F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            .transpose(1, 2)
            .reshape(-1, hidden.shape[2])
        )
        hidden = hidden + self.output(found).view_as(hidden)
        hidden = hidden + self.convolution(hidden)
        output: Tensor = self.norm(hidden + self._half(hidden, 1))
        return output

    def _half(self, hidden: Tensor, number: int) -> Tensor:
        return 0.5 * self.mlps[number](self.mlp_norms[number](hidden).flatten(0, 1)).view_as(hidden)


class Phi4AudioTower(nn.Module):
    """``Encoder`` of clips. Each goes through the tower by itself, in windows that the last one is filled up to with
    zeros, as in transformers with a clip alone."""

    def __init__(  # noqa: PLR0917 (what a tower is made of)
        self,
        mean: Tensor,
        scale: Tensor,
        subsampling: Subsampling,
        biases: Tensor,
        layers: Sequence[Phi4AudioLayer],
        projectors: Sequence[nn.Module],
        width: int,
    ) -> None:
        """``mean`` and ``scale`` [bands] normalise features. ``biases`` [2 * distance, heads] are those of attention,
        by the distance between states. ``projectors`` are those of ``PROJECTORS``."""
        super().__init__()
        self.mean, self.scale, self.biases = frozen(mean), frozen(scale), frozen(biases)
        self.subsampling = subsampling
        self.layers = nn.ModuleList(layers)
        self.projectors = nn.ModuleList(projectors)
        self.embedding_width = width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        return [self._rows(item) for item in inputs]

    def _rows(self, item: PreprocessedPart) -> Tensor:
        if item.layout not in ((0,), (1,)) or item.grid[0] != len(item.patches):
            raise PlanMismatch(f"{len(item.patches)} frames of features don't fill a grid of {item.grid}")
        [features] = to_device([torch.from_numpy(item.patches)], self.mean.device)
        states = self.subsampling((features.to(self.mean.dtype) - self.mean) * self.scale)
        count, length = len(states), min(len(states), WINDOW)
        hidden = F.pad(states, (0, 0, 0, -count % length)).unflatten(0, (-1, length))
        bias = self._bias(length)
        for layer in self.layers:
            hidden = layer(hidden, bias)
        rows: Tensor = self.projectors[item.layout[0]](hidden.flatten(0, 1)[:count])
        return rows

    def _bias(self, length: int) -> Tensor:
        """Return the biases [heads, length, length] of attention from states to states."""
        places, most = torch.arange(length, device=self.biases.device), len(self.biases) // 2
        distances = (places - places[:, None]).clamp(-most, most - 1)
        return self.biases[distances + most].permute(2, 0, 1).contiguous()


def audio_name(name: str) -> str:
    """Return transformers' name of an audio tower's tensor."""
    for published, own in RENAMED:
        name = re.sub(published, own, name)
    return name


def load_audio(reader: TowerWeights, config: Phi4AudioConfig, width: int) -> Phi4AudioTower:
    """Load the tower with embeddings of ``width`` values. Raises CheckpointError as ``TowerWeights`` does."""
    tower, hidden = f"{AUDIO}.encoder", config.hidden_size
    return Phi4AudioTower(
        reader.parameter(f"{tower}.encoder_embedding.global_mean", config.bands),
        reader.parameter(f"{tower}.encoder_embedding.global_invstd", config.bands),
        _subsampling(reader, config, f"{tower}.embed"),
        reader.parameter(
            f"{tower}.relative_attention_bias_layer.bias_values.weight", 2 * config.max_distance, config.num_heads
        ),
        [_layer(reader, config, f"{tower}.encoders.{number}") for number in range(config.num_layers)],
        [
            reader.mlp(
                [f"{AUDIO}.{part}_proj_for_{name}" for part in ("up", "down")], (hidden, width, width), Activation.GELU
            )
            for name in PROJECTORS
        ],
        width,
    )


def _subsampling(reader: TowerWeights, config: Phi4AudioConfig, name: str) -> Subsampling:
    channels, bands = config.channels, config.bands
    kernels = [_kernel(reader, f"{name}.conv.{place}", channels, 1, 3, 3) for place in (0, 2, 5)]
    layers = [_pointwise(reader, f"{name}.conv.{place}", channels, channels, 1, 1) for place in (3, 6)]
    for _ in kernels:
        bands = -(-bands // 2)
    output = reader.linear([f"{name}.out"], config.hidden_size, channels * bands)
    return Subsampling(kernels[0], list(zip(kernels[1:], layers, strict=True)), output)


def _layer(reader: TowerWeights, config: Phi4AudioConfig, name: str) -> Phi4AudioLayer:
    hidden = config.hidden_size
    mlps = [f"{name}.feed_forward_{side}" for side in ("in", "out")]
    return Phi4AudioLayer(
        [(reader.layer_norm(f"{mlp}.layer_norm", hidden, EPS), _mlp(reader, config, mlp)) for mlp in mlps],
        reader.layer_norm(f"{name}.layer_norm_att", hidden, EPS),
        reader.linear([f"{name}.self_attn.{kind}_proj" for kind in "qkv"], hidden, hidden),
        reader.linear([f"{name}.self_attn.o_proj"], hidden, hidden),
        _convolution(reader, config, f"{name}.conv"),
        reader.layer_norm(f"{name}.layer_norm", hidden, EPS),
    )


def _mlp(reader: TowerWeights, config: Phi4AudioConfig, name: str) -> GatedMLP:
    """Load an MLP whose gates are in the files after their factors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    stored, bias = reader.stored(f"{name}.gate_up_proj", 2 * inner, hidden), f"{name}.gate_up_proj.bias"
    order = (slice(inner, None), slice(inner))
    gates = reader.linear_of([stored.rows(part) for part in order], reader.tensor(bias, 2 * inner).roll(inner))
    return GatedMLP(gates, reader.linear([f"{name}.down_proj"], hidden, inner))


def _convolution(reader: TowerWeights, config: Phi4AudioConfig, name: str) -> CausalConvolution:
    hidden, glu = config.hidden_size, f"{name}.glu"
    weight = reader.tensor(f"{glu}.ext_pw_conv_1d.weight", 2 * hidden, hidden, 1).flatten(1)
    more = [reader.tensor(f"{glu}.{part}", 1, hidden, 1).float().flatten() for part in ("b1", "b2")]
    bias = reader.tensor(f"{glu}.ext_pw_conv_1d.bias", 2 * hidden).float() + torch.cat(more)
    gated = reader.weights.linear(weight.roll(hidden, 0), bias.roll(hidden), reader.device)  # gates first
    return CausalConvolution(
        reader.layer_norm(f"{name}.layer_norm", hidden, EPS),
        gated,
        _kernel(reader, f"{name}.dw_sep_conv_1d.dw_conv", hidden, 1, config.kernel),
        (
            _pointwise(reader, f"{name}.dw_sep_conv_1d.pw_conv", hidden, hidden, 1),
            _pointwise(reader, f"{name}.ext_pw_conv_1d", hidden, hidden, 1),
        ),
    )


def _kernel(reader: TowerWeights, name: str, *shape: int) -> Kernel:
    """Load a convolution [outputs, …]."""
    return Kernel(reader.parameter(f"{name}.weight", *shape), reader.parameter(f"{name}.bias", shape[0]))


def _pointwise(reader: TowerWeights, name: str, *shape: int) -> Linear:
    """Load a convolution [outputs, inputs, 1, …], which sees one place, as a layer."""
    weight, bias = reader.tensor(f"{name}.weight", *shape), reader.tensor(f"{name}.bias", shape[0])
    return reader.weights.linear(weight.flatten(1), bias, reader.device)
