"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's layers with mixtures of experts, beside which every token passes a shared expert
that a gate scales.

The reference is ``Qwen2MoeModel`` in transformers.
"""

from dataclasses import replace

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import GatedMLPSpec, LayerSpec, SharedExpertSpec
from triptych.models.backbones.base import Backbone, TextConfig, attention, decoder
from triptych.models.backbones.experts import qwen_experts, qwen_ffns
from triptych.models.backbones.qwen2 import layer_windows
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    heads = attention(text, read_rope(text, RopeConfig(10_000.0)))
    mixer = replace(heads, qkv_bias=setting(text, "qkv_bias", bool, default=True))
    shared_mlp = GatedMLPSpec(setting(text, "shared_expert_intermediate_size", int))
    shared = SharedExpertSpec("shared_expert", shared_mlp, gate="shared_expert_gate")
    ffns = qwen_ffns(text, replace(qwen_experts(text, norm_topk_prob=False), shared=shared))
    windows = layer_windows(text, lambda index, limit: index < limit and index % 2 == 0)
    layers = [LayerSpec(replace(mixer, window=window), ffn) for window, ffn in zip(windows, ffns, strict=True)]
    return decoder(text, layers, eps=1e-6)


QWEN2_MOE = Backbone("Qwen2 (query, key and value biases), mixture of experts with a gated shared expert", describe)
