"""Gemma 4's audio tower, a conformer of our own layers: features of a clip in, embeddings out.

The reference is ``Gemma4AudioModel`` in transformers. A token attends to a few tokens before it, so that clips of any
length take memory in proportion to it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import Linear, RMSNorm, frozen
from triptych.layers.pinned import to_device
from triptych.layers.pointwise import Activation
from triptych.models.base import AUDIO
from triptych.models.gemma4.audio_config import Gemma4AudioConfig
from triptych.models.gemma4.clipped import clippable
from triptych.models.gemma4.feature_projector import FeatureProjector
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

MLP_EPS = 1e-6
"""Epsilon of the norms around attention and MLPs; not in the config."""
LONGEST_WAVE = 10_000.0
"""Longest wave of the embeddings of distances."""


class Downsampling(nn.Module):
    """A convolution of stride 2 over time and bands, and a norm over channels."""

    def __init__(self, kernels: Tensor, weight: Tensor, eps: float) -> None:
        """``kernels`` [out, in, 3, 3]; ``weight`` [out] is the norm's."""
        super().__init__()
        self.kernels = frozen(kernels)
        self.weight = frozen(weight)
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:
        """[in, frames, bands] → [out, ⌈frames / 2⌉, ⌈bands / 2⌉]"""
        convolved = F.conv2d(features[None], self.kernels, stride=2, padding=1)[0]
        normed = F.layer_norm(convolved.permute(1, 2, 0), self.weight.shape, self.weight, None, self.eps)
        return F.relu(normed).permute(2, 0, 1)


class ConformerMLP(nn.Module):
    """Adds a part of an MLP's output, normalised before and after."""

    def __init__(
        self,
        before: RMSNorm,
        up: Linear,
        activation: Activation,
        down: Linear,
        after: RMSNorm,
        *,
        weight: float,
        limit: float,
    ) -> None:
        super().__init__()
        self.before, self.up, self.activation, self.down, self.after = before, up, activation, down, after
        self.weight, self.limit = weight, limit

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]"""
        inner = self.activation(self.up(self.before(hidden.clamp(-self.limit, self.limit))))
        made = self.after(self.down(inner).clamp(-self.limit, self.limit))
        return hidden + made * self.weight


class WindowedAttention(nn.Module):
    """Attention to the last few tokens, whose keys have embeddings of their distances added, with soft-capped
    logits."""

    def __init__(self, qkv: Linear, scales: Tensor, distances: Tensor, output: Linear, cap: float) -> None:
        """``scales`` [head_dim], float32, are factors of queries; ``distances`` [window, heads, head_dim], float32, are
        those of the farthest token first."""
        super().__init__()
        self.qkv, self.output, self.cap = qkv, output, cap
        self.scales, self.distances = frozen(scales), frozen(distances)

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]"""
        window, heads, head_dim = self.distances.shape
        query, key, value = self.qkv(hidden).float().unflatten(1, (3, heads, head_dim)).unbind(1)
        query = query * self.scales
        key = key * (math.log(1 + math.e) / math.log(2))  # as the reference scales keys
        keys, values = (F.pad(one, (0, 0, 0, 0, window - 1, 0)).unfold(0, window, 1) for one in (key, value))
        logits = torch.einsum("thd,thdw->thw", query, keys) + torch.einsum("thd,whd->thw", query, self.distances)
        logits = (logits / self.cap).tanh() * self.cap
        places = torch.arange(window, device=hidden.device)
        before_clip = places < window - 1 - torch.arange(len(hidden), device=hidden.device)[:, None]
        weights = logits.masked_fill(before_clip[:, None], -torch.inf).softmax(-1)
        return self.output(torch.einsum("thw,thdw->thd", weights, values).flatten(1).to(hidden.dtype))


class ConformerConvolution(nn.Module):
    """Adds a gated convolution of each channel over the last few tokens."""

    def __init__(
        self,
        norms: tuple[RMSNorm, RMSNorm],
        start: Linear,
        kernels: Tensor,
        activation: Activation,
        end: Linear,
        *,
        limit: float,
    ) -> None:
        """``norms`` are those before the gates and after the convolution; ``kernels`` [hidden, 1, tokens]."""
        super().__init__()
        self.before, self.norm = norms
        self.start, self.activation, self.end = start, activation, end
        self.kernels, self.limit = frozen(kernels), limit

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]"""
        gated = F.glu(self.start(self.before(hidden)), dim=-1)
        padded = F.pad(gated.T[None], (self.kernels.shape[2] - 1, 0))
        convolved = F.conv1d(padded, self.kernels, groups=len(self.kernels))[0].T.contiguous()
        normed = self.norm(convolved.clamp(-self.limit, self.limit))
        return hidden + self.end(self.activation(normed))


class ConformerLayer(nn.Module):
    """MLP, attention, convolution and MLP."""

    def __init__(
        self,
        first: ConformerMLP,
        attention: WindowedAttention,
        convolution: ConformerConvolution,
        second: ConformerMLP,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm],
        *,
        limit: float,
    ) -> None:
        """``norms`` are those before and after attention, and of the output."""
        super().__init__()
        self.first, self.attention, self.convolution, self.second = first, attention, convolution, second
        self.before, self.after, self.last = norms
        self.limit = limit

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]"""
        hidden = self.first(hidden)
        mixed = self.attention(self.before(hidden.clamp(-self.limit, self.limit)))
        hidden = hidden + self.after(mixed.clamp(-self.limit, self.limit))
        hidden = self.second(self.convolution(hidden))
        finished: Tensor = self.last(hidden.clamp(-self.limit, self.limit))
        return finished


class Gemma4AudioTower(nn.Module):
    """``Encoder`` of clips."""

    def __init__(
        self,
        downsampling: Sequence[Downsampling],
        project: Linear,
        layers: Sequence[ConformerLayer],
        output: Linear,
        projector: FeatureProjector,
        *,
        bands: int,
        embedding_width: int,
    ) -> None:
        """``bands`` are the values of a frame of features, up to three fewer."""
        super().__init__()
        self.downsampling, self.project = nn.ModuleList(downsampling), project
        self.layers, self.output, self.projector = nn.ModuleList(layers), output, projector
        self.bands, self.embedding_width = bands, embedding_width
        self.device, self.dtype = downsampling[0].kernels.device, downsampling[0].kernels.dtype

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        return [self._encode(item) for item in inputs]

    def _encode(self, item: PreprocessedPart) -> Tensor:
        if item.grid != (len(item.patches), 1, 1) or -(-item.patches.shape[1] // 4) * 4 != self.bands:
            raise PlanMismatch(f"features of shape {item.patches.shape} don't fill a grid of {item.grid}")
        [features] = to_device([torch.from_numpy(item.patches)], self.device)
        maps = features.to(self.dtype)[None]
        for layer in self.downsampling:
            maps = layer(maps)
        hidden = self.project(maps.permute(1, 2, 0).flatten(1))
        for layer in self.layers:
            hidden = layer(hidden)
        rows: Tensor = self.projector(self.output(hidden))
        return rows


def load_audio_tower(reader: TowerWeights, config: Gemma4AudioConfig, projector: str, width: int) -> Gemma4AudioTower:
    """Load the tower, and the projector of that name, which makes embeddings of ``width``. Raises CheckpointError as
    ``TowerWeights`` does."""
    stem, hidden = f"{AUDIO}.subsample_conv_projection", config.hidden_size
    downsampling = [
        Downsampling(
            reader.parameter(f"{stem}.layer{number}.conv.weight", outputs, inputs, 3, 3),
            reader.parameter(f"{stem}.layer{number}.norm.weight", outputs),
            config.eps,
        )
        for number, (inputs, outputs) in enumerate(((1, config.channels[0]), config.channels))
    ]
    return Gemma4AudioTower(
        downsampling,
        reader.linear([f"{stem}.input_proj_linear"], hidden, config.channels[0] // 4 * config.channels[1], bias=False),
        [_layer(reader, config, f"{AUDIO}.layers.{number}") for number in range(config.num_layers)],
        reader.linear([f"{AUDIO}.output_proj"], config.output_size, hidden),
        FeatureProjector.load(reader, projector, config.output_size, width, config.eps),
        bands=config.bands,
        embedding_width=width,
    )


def _layer(reader: TowerWeights, config: Gemma4AudioConfig, name: str) -> ConformerLayer:
    hidden, limit = config.hidden_size, min(config.limit, torch.finfo(reader.weights.activations).max)
    activation = tower_activation(config.activation, "audio_config.hidden_act")

    def linear(module: str, outputs: int, inputs: int) -> Linear:
        return clippable(reader, [f"{name}.{module}"], outputs, inputs, clips=config.clips)

    def mlp(module: str) -> ConformerMLP:
        return ConformerMLP(
            reader.rms_norm(f"{name}.{module}.pre_layer_norm", hidden, MLP_EPS),
            linear(f"{module}.ffw_layer_1", 4 * hidden, hidden),
            activation,
            linear(f"{module}.ffw_layer_2", hidden, 4 * hidden),
            reader.rms_norm(f"{name}.{module}.post_layer_norm", hidden, MLP_EPS),
            weight=config.residual_weight,
            limit=limit,
        )

    gating, convolved = (
        reader.rms_norm(f"{name}.lconv1d.{norm}", hidden, config.eps) for norm in ("pre_layer_norm", "conv_norm")
    )
    convolution = ConformerConvolution(
        (gating, convolved),
        linear("lconv1d.linear_start", 2 * hidden, hidden),
        reader.parameter(f"{name}.lconv1d.depthwise_conv1d.weight", hidden, 1, config.kernel_size),
        activation,
        linear("lconv1d.linear_end", hidden, hidden),
        limit=limit,
    )
    before, after, last = (
        reader.rms_norm(f"{name}.norm_{place}", hidden, MLP_EPS) for place in ("pre_attn", "post_attn", "out")
    )
    attention = _attention(reader, config, f"{name}.self_attn")
    return ConformerLayer(
        mlp("feed_forward1"), attention, convolution, mlp("feed_forward2"), (before, after, last), limit=limit
    )


def _attention(reader: TowerWeights, config: Gemma4AudioConfig, name: str) -> WindowedAttention:
    hidden, head_dim = config.hidden_size, config.head_dim
    scales = F.softplus(reader.parameter(f"{name}.per_dim_scale", head_dim)).float() * (head_dim**-0.5 / math.log(2))
    of_distances = reader.stored(f"{name}.relative_k_proj", hidden, hidden).dequantized()
    of_distances = of_distances.to(reader.device, reader.weights.activations)
    waves = _waves(config).to(of_distances.device, of_distances.dtype)
    return WindowedAttention(
        clippable(reader, [f"{name}.{kind}_proj" for kind in "qkv"], hidden, hidden, clips=config.clips),
        scales,
        F.linear(waves, of_distances).float().unflatten(1, (config.num_heads, head_dim)),
        clippable(reader, [f"{name}.post"], hidden, hidden, clips=config.clips),
        config.logit_cap,
    )


def _waves(config: Gemma4AudioConfig) -> Tensor:
    """Return the embeddings of distances in a window, float32 [window, hidden], the farthest first: sines, then
    cosines, of wavelengths from 2π to 2π * ``LONGEST_WAVE``."""
    count = config.hidden_size // 2
    step = math.log(LONGEST_WAVE) / max(count - 1, 1)
    frequencies = torch.exp(torch.arange(count) * -step)
    angles = torch.arange(config.window - 1, -1, -1)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
