"""Qwen3-Next: most layers are gated delta nets, the others attention with a gate at its output, whose heads rotate a
quarter of their values. Norms' weights are stored less 1.

The reference is ``Qwen3NextModel`` in transformers.
"""

from collections.abc import Sequence
from dataclasses import replace

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import DeltaNetSpec, FfnSpec, GatedMLPSpec, LayerSpec, MoESpec, SharedExpertSpec
from triptych.models.backbones.base import (
    COMMON_NAMES,
    FULL,
    MAX_HEAD_VALUES,
    Backbone,
    TextConfig,
    attention,
    check_silu,
    decoder,
    num_layers,
)
from triptych.models.backbones.experts import qwen_experts, qwen_ffns
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting

LINEAR = "linear_attention"
NAMES = replace(COMMON_NAMES, norm_offset=1.0, ignored_modules=("mtp.",))
"""``mtp.`` are layers for multi-token prediction, which aren't served."""
MAX_STATE_VALUES = 2**26
"""State values of a layer's heads together; bounded for the reason of ``MAX_HEAD_VALUES``."""


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    experts = shared_expert(text, qwen_experts(text, norm_topk_prob=True))
    rope = RopeConfig(10_000.0, partial=0.25)
    return hybrid(text, qwen_ffns(text, experts), rope, replace(delta_net(text), is_grouped=True))


def shared_expert(text: TextConfig, experts: MoESpec) -> MoESpec:
    """Return ``experts`` with the expert that every token passes, which a gate scales. Raises CheckpointError."""
    mlp = GatedMLPSpec(setting(text, "shared_expert_intermediate_size", int))
    return replace(experts, shared=SharedExpertSpec("shared_expert", mlp, gate="shared_expert_gate"))


def hybrid(text: TextConfig, ffns: Sequence[FfnSpec], rope: RopeConfig, linear: DeltaNetSpec) -> DecoderConfig:
    """Return the decoder of ``text`` with these ffns; ``rope`` is the default of attention, and ``linear`` the mixer of
    the other layers. Raises CheckpointError."""
    check_silu(text)
    if text.get("attn_output_gate", True) is not True:
        raise CheckpointError("config.json: attn_output_gate must be true: attention without its gate is not served")
    has_bias = setting(text, "attention_bias", bool, default=False)
    heads = attention(text, read_rope(text, rope), head_dim=256)
    full = replace(heads, qk_norm=True, qkv_bias=has_bias, output_bias=has_bias, output_gate=True)
    mixers = [full if kind == FULL else linear for kind in _layer_types(text)]
    layers = [LayerSpec(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return decoder(text, layers, eps=1e-6, names=NAMES)


def delta_net(text: TextConfig) -> DeltaNetSpec:
    """Return the config's gated delta nets. Raises CheckpointError unless key heads divide value heads."""
    spec = DeltaNetSpec(
        key_heads=setting(text, "linear_num_key_heads", int, default=16),
        value_heads=setting(text, "linear_num_value_heads", int, default=32),
        key_dim=setting(text, "linear_key_head_dim", int, default=128),
        value_dim=setting(text, "linear_value_head_dim", int, default=128),
    )
    if spec.value_heads % spec.key_heads:
        raise CheckpointError(
            f"config.json: linear_num_key_heads: {spec.key_heads} key heads don't divide {spec.value_heads} value heads"
        )
    if spec.value_heads * spec.key_dim * spec.value_dim > MAX_STATE_VALUES or spec.channels > MAX_HEAD_VALUES:
        raise CheckpointError(
            "config.json: linear_num_value_heads, linear_key_head_dim or linear_value_head_dim: "
            f"{spec.value_heads} linear heads of {spec.key_dim} x {spec.value_dim} can't be served"
        )
    if (kernel := setting(text, "linear_conv_kernel_dim", int, default=4)) != spec.CONV_TOKENS + 1:
        raise CheckpointError(f"config.json: linear_conv_kernel_dim must be {spec.CONV_TOKENS + 1}, not {kernel}")
    return spec


def _layer_types(text: TextConfig) -> list[str]:
    """Return the kind of each layer, ``FULL`` or ``LINEAR``; by default, it is full in every
    ``full_attention_interval``-th layer. Raises CheckpointError unless at least one is ``FULL``."""
    period = setting(text, "full_attention_interval", int, default=4)
    default = [LINEAR if (index + 1) % period else FULL for index in range(num_layers(text))]
    types = setting(text, "layer_types", list, default=default)
    if len(types) != len(default) or not all(kind in (FULL, LINEAR) for kind in types):
        raise CheckpointError(f"config.json: layer_types {types} must name {FULL} or {LINEAR} per layer")
    if FULL not in types:
        raise CheckpointError(f"config.json: layer_types: a model without a layer of {FULL} is not served")
    return types


QWEN3_NEXT = Backbone("Qwen3-Next (gated delta nets, gated attention), mixture of experts with a shared one", describe)
