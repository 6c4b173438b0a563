"""Qwen3 and Qwen3-MoE, also as the language model of Qwen3-VL and Qwen3-Omni: queries and keys are normalised per head.

The references are ``Qwen3Model`` and ``Qwen3MoeModel`` in transformers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import AttentionSpec, FfnSpec, LayerSpec
from triptych.models.backbones.base import Backbone, TextConfig, attention, decoder, gated_mlp, num_layers
from triptych.models.backbones.experts import qwen_experts, qwen_ffns
from triptych.models.backbones.qwen2 import layer_windows, window_if_enabled
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting

TEXT = RopeConfig(10_000.0)
VISION = RopeConfig(500_000.0, (24, 20, 20), interleaved=True)
OMNI = RopeConfig(1_000_000.0, (24, 20, 20), interleaved=True)


def dense(text: TextConfig, *, rope: RopeConfig, has_windows: bool) -> DecoderConfig:
    """Return the decoder of ``text``; ``rope`` is the default. Raises CheckpointError."""
    mixer, mlp = _attention(text, rope, head_dim=128), gated_mlp(text)
    windows = layer_windows(text) if has_windows else [None] * num_layers(text)
    return decoder(text, _layers(mixer, windows, [mlp] * len(windows)), eps=1e-6)


def mixture(text: TextConfig, *, rope: RopeConfig, norm_topk_prob: bool, has_windows: bool) -> DecoderConfig:
    """Return the decoder of ``text``, whose layers are mixtures of experts unless the config makes them dense; ``rope``
    and ``norm_topk_prob`` are defaults. Raises CheckpointError."""
    mixer, window = _attention(text, rope), window_if_enabled(text) if has_windows else None
    ffns = qwen_ffns(text, qwen_experts(text, norm_topk_prob=norm_topk_prob))
    return decoder(text, _layers(mixer, [window] * len(ffns), ffns), eps=1e-6)


def _attention(text: TextConfig, rope: RopeConfig, head_dim: int | None = None) -> AttentionSpec:
    has_bias = setting(text, "attention_bias", bool, default=False)
    heads = attention(text, read_rope(text, rope), head_dim=head_dim)
    return replace(heads, qk_norm=True, qkv_bias=has_bias, output_bias=has_bias)


def _layers(mixer: AttentionSpec, windows: Sequence[int | None], ffns: Sequence[FfnSpec]) -> list[LayerSpec]:
    return [LayerSpec(replace(mixer, window=window), ffn) for window, ffn in zip(windows, ffns, strict=True)]


QWEN3 = Backbone("Qwen3 (normalised queries and keys)", partial(dense, rope=TEXT, has_windows=True))
QWEN3_MOE = Backbone(
    "Qwen3 (normalised queries and keys), mixture of experts",
    partial(mixture, rope=TEXT, norm_topk_prob=False, has_windows=True),
)
QWEN3_VL = Backbone(
    "Qwen3 (normalised queries and keys), interleaved M-RoPE", partial(dense, rope=VISION, has_windows=False)
)
QWEN3_VL_MOE = Backbone(
    "Qwen3 (normalised queries and keys), mixture of experts, interleaved M-RoPE",
    partial(mixture, rope=VISION, norm_topk_prob=True, has_windows=False),
)
QWEN3_OMNI_MOE = replace(QWEN3_VL_MOE, describe=partial(mixture, rope=OMNI, norm_topk_prob=True, has_windows=False))
