"""Gemma 4, text: heads, windows and rotary embeddings differ between two types of layers, the last layers read earlier
ones' keys and values, tokens have embeddings per layer, or experts run beside each MLP.

The reference is ``Gemma4TextModel`` in transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig, PerLayerSpec
from triptych.layers.specs import AttentionSpec, DenseAndExpertsSpec, FfnSpec, LayerSpec, MoESpec, RoutingSpec
from triptych.models.backbones.base import (
    COMMON_NAMES,
    FULL,
    SLIDING,
    Backbone,
    TextConfig,
    alternating_types,
    attention,
    decoder,
    gated_mlp,
    layers_up_to,
)
from triptych.models.backbones.gemma import NORMS, ropes_by_type, softcap
from triptych.models.shared.settings import setting

ROPES: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Used without ``rope_parameters``."""
VISION_SPANS = "vision"
"""``use_bidirectional_attention`` of models where, in layers with a window, images attend to themselves."""
HEADS = {"head_dim", "num_key_value_heads"}
"""What may differ between layers."""


def gemma4(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    if (bidirectional := text.get("use_bidirectional_attention")) not in (None, VISION_SPANS):
        raise CheckpointError(f"config.json: use_bidirectional_attention {bidirectional!r} is not served")
    types = [*alternating_types(text, 6)[:-1], FULL]  # of the last layer, whatever the config says
    text = {**text, "hidden_act": text.get("hidden_activation", "gelu_pytorch_tanh")}
    mixers = _mixers(text, types)
    shared = layers_up_to(text, "num_kv_shared_layers", 0)
    sources = _sources(types, mixers, len(types) - shared)
    layers = [
        LayerSpec(mixer, _ffn(text, is_wide=source is not None), NORMS, cache_of=source, factor="layer_scalar")
        for mixer, source in zip(mixers, sources, strict=True)
    ]
    unread = [
        f"layers.{index}.self_attn.{name}."
        for index, source in enumerate(sources)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        if source is not None
    ]
    found = decoder(text, layers, eps=1e-6, names=replace(COMMON_NAMES, ignored_modules=tuple(unread)))
    return replace(
        found,
        embedding_scale=found.hidden_size**0.5,
        logit_softcap=softcap(text, "final_logit_softcapping"),
        per_layer=_per_layer(text, found.vocab_size),
    )


def _mixers(text: TextConfig, types: Sequence[str]) -> list[AttentionSpec]:
    """Return each layer's attention. Published files have settings for all layers without a window, files that
    transformers saved for each layer."""
    ropes = ropes_by_type({**text, "rope_parameters": text.get("rope_parameters") or ROPES})
    windows = {FULL: None, SLIDING: setting(text, "sliding_window", int, default=512)}
    k_is_v = setting(text, "attention_k_eq_v", bool, default=False)
    has_bias = setting(text, "attention_bias", bool, default=False)
    has_spans = text.get("use_bidirectional_attention") == VISION_SPANS
    heads_of_full = {"head_dim": setting(text, "global_head_dim", int, default=512)}
    if k_is_v and text.get("num_global_key_value_heads") is not None:
        heads_of_full["num_key_value_heads"] = setting(text, "num_global_key_value_heads", int)
    by_layer: dict[str, Any] = setting(text, "per_layer_config", dict, default={})
    if strays := by_layer.keys() - set(map(str, range(len(types)))):
        raise CheckpointError(f"config.json: per_layer_config has no layers {sorted(strays)}, of {len(types)}")
    mixers = []
    for index, kind in enumerate(types):
        heads: Mapping[str, Any] = by_layer.get(str(index), {}) if by_layer else heads_of_full if kind == FULL else {}
        if not isinstance(heads, dict) or heads.keys() - HEADS:
            raise CheckpointError(f"config.json: per_layer_config may only set {sorted(HEADS)}, not {heads!r}")
        mixers.append(
            replace(
                attention({**text, **heads}, ropes[kind], head_dim=256, num_kv_heads=4),
                qkv_bias=has_bias,
                output_bias=has_bias,
                qk_norm=True,
                v_norm=True,
                k_is_v=k_is_v and kind == FULL,
                window=windows[kind],
                spans=has_spans and kind == SLIDING,
                scale=1.0,
            )
        )
    return mixers


def _sources(types: Sequence[str], mixers: Sequence[AttentionSpec], num_own: int) -> list[int | None]:
    """Return the layer whose keys and values each layer reads; None for its own, which the first ``num_own`` layers
    have. The source is the last one of them that has the layer's type."""
    if num_own <= 0:
        raise CheckpointError("config.json: num_kv_shared_layers leaves no layer with keys and values of its own")
    last = {kind: index for index, kind in enumerate(types[:num_own])}
    sources: list[int | None] = [None] * num_own
    for index, kind in enumerate(types[num_own:], start=num_own):
        source = last.get(kind)
        if source is None or mixers[source] != mixers[index]:
            raise CheckpointError(
                f"config.json: num_kv_shared_layers: layer {index} has no earlier layer of the same type, {kind}, and "
                "heads, whose keys and values it could read"
            )
        sources.append(source)
    return sources


def _ffn(text: TextConfig, *, is_wide: bool) -> FfnSpec:
    """``is_wide``: the layer reads an earlier one's keys and values."""
    dense = gated_mlp(text)
    if is_wide and setting(text, "use_double_wide_mlp", bool, default=False):
        dense = replace(dense, intermediate_size=2 * dense.intermediate_size)
    if not setting(text, "enable_moe_block", bool, default=False):
        return dense
    experts = MoESpec(
        setting(text, "num_experts", int),
        setting(text, "moe_intermediate_size", int),
        RoutingSpec(setting(text, "top_k_experts", int)),
        router="router.proj",
        expert_scales="router.per_expert_scale",
        activation=dense.activation,
    )
    return DenseAndExpertsSpec(
        dense,
        experts,
        before_experts="pre_feedforward_layernorm_2",
        after_dense="post_feedforward_layernorm_1",
        after_experts="post_feedforward_layernorm_2",
        router_scale="router.scale",
    )


def _per_layer(text: TextConfig, vocab_size: int) -> PerLayerSpec | None:
    if text.get("hidden_size_per_layer_input") == 0:
        return None
    spec = PerLayerSpec(
        vocab_size=setting(text, "vocab_size_per_layer_input", int, default=262_144),
        size=setting(text, "hidden_size_per_layer_input", int, default=256),
        activation=gated_mlp(text).activation,
    )
    if spec.vocab_size < vocab_size:
        raise CheckpointError(
            f"config.json: vocab_size_per_layer_input {spec.vocab_size} is less than vocab_size {vocab_size}"
        )
    return spec


GEMMA4 = Backbone(
    "Gemma 4 (two types of layers, keys and values read by later layers, embeddings per layer, experts beside MLPs)",
    gemma4,
    ties_embeddings=True,
)
