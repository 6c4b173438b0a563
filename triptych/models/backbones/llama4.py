"""Llama 4's language model: attention in chunks with rotated neighbours, among layers that attend to everything without
positions; experts that take weighted inputs, beside one that all tokens share.

The reference is ``Llama4TextModel`` in transformers.
"""

from dataclasses import replace

from triptych.errors import CheckpointError
from triptych.layers.cache_spec import ChunkWindow, Window
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import (
    NO_POSITIONS,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
)
from triptych.layers.specs import (
    AttentionSpec,
    FfnSpec,
    GatedMLPSpec,
    LayerSpec,
    MoESpec,
    QueryScaling,
    RoutingSpec,
    Score,
    SharedExpertSpec,
)
from triptych.models.backbones.base import (
    CHUNKED,
    COMMON_NAMES,
    FULL,
    Backbone,
    TextConfig,
    attention,
    decoder,
    gated_mlp,
    has_positions,
    layer_types,
    listed_layers,
    num_layers,
)
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import positive_number, setting


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    rotated, unrotated = _mixers(text)
    rotates = has_positions(text)
    types = layer_types(text, (FULL, CHUNKED)) or [CHUNKED if one else FULL for one in rotates]
    windows: dict[str, Window | None] = {
        FULL: None,
        CHUNKED: ChunkWindow(setting(text, "attention_chunk_size", int, default=8192)),
    }
    mixers = [
        replace(rotated if is_rotated else unrotated, window=windows[kind])
        for is_rotated, kind in zip(rotates, types, strict=True)
    ]
    layers = [LayerSpec(mixer, ffn) for mixer, ffn in zip(mixers, _ffns(text), strict=True)]
    return decoder(text, layers, eps=1e-5, names=replace(COMMON_NAMES, renamed=((".mlp.", ".feed_forward."),)))


def _mixers(text: TextConfig) -> tuple[AttentionSpec, AttentionSpec]:
    """Return attention with positions and without, both to all tokens."""
    rope = read_rope(text, RopeConfig(500_000.0, pairs=True))
    has_bias = setting(text, "attention_bias", bool, default=False)
    heads = replace(attention(text, rope, head_dim=128, num_kv_heads=8), qkv_bias=has_bias, output_bias=has_bias)
    scaling = None
    if text.get("attn_temperature_tuning", True):  # a number in older files
        scaling = QueryScaling(
            positive_number(text, "attn_scale", 0.1), setting(text, "floor_scale", int, default=8192), offset=1
        )
    has_norm = setting(text, "use_qk_norm", bool, default=True)
    keeps_size = isinstance(rope.scaling, None | LinearScaling | Llama3Scaling | DynamicScaling) or (
        isinstance(rope.scaling, LongRopeScaling) and rope.scaling.attention_factor == 1
    )
    if has_norm and not keeps_size:
        # Queries and keys are normalised after their rotation, which we do before. That is the same only if the
        # rotation keeps their size.
        raise CheckpointError(
            "config.json: use_qk_norm is served with rope types default, linear, llama3 and dynamic only"
        )
    rotated = replace(heads, qk_norm=has_norm, qk_norm_weights=False)
    return rotated, replace(heads, rope=NO_POSITIONS, query_scaling=scaling)


def _ffns(text: TextConfig) -> list[FfnSpec]:
    """Return each layer's ffn: a mixture of experts, or dense."""
    expert = gated_mlp(text)
    dense = GatedMLPSpec(setting(text, "intermediate_size_mlp", int, default=16384), expert.activation)
    experts = MoESpec(
        setting(text, "num_local_experts", int, default=16),
        expert.intermediate_size,
        RoutingSpec(setting(text, "num_experts_per_tok", int, default=1), Score.SIGMOID, normalised=False),
        router="router",
        shared=SharedExpertSpec("shared_expert", expert),
        weighs_inputs=True,
        activation=expert.activation,
    )
    layers = range(num_layers(text))
    if "moe_layers" in text and text["moe_layers"] is not None:
        mixed = listed_layers(text, "moe_layers")
    else:
        step = setting(text, "interleave_moe_layer_step", int, default=1)
        mixed = [index for index in layers if (1 + index) % step == 0]
    return [experts if index in mixed else dense for index in layers]


LLAMA4 = Backbone("Llama 4 (attention in chunks, layers without positions, top-1 mixture of experts)", describe)
