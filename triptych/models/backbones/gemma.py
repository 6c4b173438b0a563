"""Gemma 2 and Gemma 3, text only: four norms per layer, whose weights are stored less 1, scaled embeddings and, in most
layers, a sliding window. Gemma 2 limits scores and logits softly; Gemma 3 normalises queries and keys, and layers with
a window have a rotary embedding of their own.

The references are ``Gemma2Model`` and ``Gemma3TextModel`` in transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import LongRopeScaling, RopeConfig
from triptych.layers.specs import LayerSpec, NormNames
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
)
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import positive_number, setting

NAMES = replace(COMMON_NAMES, norm_offset=1.0)
NORMS = NormNames(
    before_ffn="pre_feedforward_layernorm",
    after_mixer="post_attention_layernorm",
    after_ffn="post_feedforward_layernorm",
)


def gemma2(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    rope = read_rope(text, RopeConfig(10_000.0))
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **text}
    return _gemma(caps, {FULL: rope, SLIDING: rope}, period=2, qk_norm=False)


def gemma3(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    period = setting(text, "sliding_window_pattern", int, default=6)
    return _gemma(text, ropes_by_type(text), period=period, qk_norm=True)


def _gemma(text: TextConfig, ropes: Mapping[str, RopeConfig], *, period: int, qk_norm: bool) -> DecoderConfig:
    """``ropes`` are those of each type of layer; by default, every ``period``-th layer has no window."""
    if text.get("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not served")
    windows = {FULL: None, SLIDING: setting(text, "sliding_window", int, default=4096)}
    heads = attention(text, ropes[FULL], head_dim=256, num_kv_heads=4)
    has_bias = setting(text, "attention_bias", bool, default=False)
    mixer = replace(
        heads,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=qk_norm,
        spans=True,  # only images are spans, which Gemma 2 has none of
        scale=positive_number(text, "query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=softcap(text, "attn_logit_softcapping"),
    )
    mlp = gated_mlp({**text, "hidden_act": text.get("hidden_activation", "gelu_pytorch_tanh")})
    layers = [
        LayerSpec(replace(mixer, rope=ropes[kind], window=windows[kind]), mlp, NORMS)
        for kind in alternating_types(text, period)
    ]
    found = decoder(text, layers, eps=1e-6, names=NAMES)
    cap = softcap(text, "final_logit_softcapping")
    return replace(found, embedding_scale=found.hidden_size**0.5, logit_softcap=cap)


def softcap(text: TextConfig, name: str) -> float | None:
    """Return a soft cap; None if there is none. Raises CheckpointError."""
    return None if text.get(name) is None else positive_number(text, name)


def ropes_by_type(text: TextConfig) -> dict[str, RopeConfig]:
    """Return the rotary embedding of each type of layer. Published files scale that of layers without a window, whose
    base is ``rope_theta``; ``save_pretrained`` writes settings for each type. Raises CheckpointError."""
    by_type: dict[str, Any] = setting(text, "rope_parameters", dict, default={})
    if by_type.keys() - {FULL, SLIDING}:
        raise CheckpointError(f"config.json: rope_parameters must be settings of {FULL} and {SLIDING}, not {by_type}")
    length = {"max_position_embeddings": text.get("max_position_embeddings")}
    everywhere = {"rope_theta": text.get("rope_theta"), "rope_scaling": text.get("rope_scaling")}
    ropes = {
        FULL: read_rope(length | everywhere | {"rope_parameters": by_type.get(FULL)}, RopeConfig(1_000_000.0)),
        SLIDING: read_rope(
            length | {"rope_theta": text.get("rope_local_base_freq"), "rope_parameters": by_type.get(SLIDING)},
            RopeConfig(10_000.0),
        ),
    }
    if any(isinstance(rope.scaling, LongRopeScaling) for rope in ropes.values()):
        raise CheckpointError("config.json: rope type 'longrope' is not served for this model")
    return ropes


GEMMA2 = Backbone("Gemma 2 (soft caps of scores and logits, four norms)", gemma2, ties_embeddings=True)
GEMMA3 = Backbone("Gemma 3 (sliding windows with a rotary embedding of their own, four norms)", gemma3, True)
