"""Mistral and Ministral: Llama's layers, with a sliding window in all layers or in some.

Mistral has one window for all layers, or none; Ministral names each layer's kind; Ministral 3 lets queries grow with
their position beyond the original context. The references are ``MistralModel``, ``MinistralModel`` and
``Ministral3Model`` in transformers.
"""

from dataclasses import replace
from functools import partial

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig, YarnScaling
from triptych.layers.specs import AttentionSpec, LayerSpec, QueryScaling
from triptych.models.backbones.base import (
    FULL,
    SLIDING,
    Backbone,
    TextConfig,
    attention,
    decoder,
    gated_mlp,
    layer_types,
    num_layers,
)
from triptych.models.backbones.rope import read_rope, rope_settings
from triptych.models.shared.settings import positive_number, setting

ROPE = RopeConfig(10_000.0)
WINDOW = 4096
"""Used if the config doesn't mention a window; null means none."""


def mistral(text: TextConfig, *, eps: float, window: int | None) -> DecoderConfig:
    """Return the decoder of ``text``; ``eps`` and ``window`` are defaults. Raises CheckpointError."""
    heads = attention(text, read_rope(text, ROPE))
    mixer = replace(heads, window=_window(text, window), query_scaling=_query_scaling(text, heads))
    return decoder(text, [LayerSpec(mixer, gated_mlp(text))] * num_layers(text), eps=eps)


def ministral(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    mixer, mlp, window = attention(text, read_rope(text, ROPE)), gated_mlp(text), _window(text, WINDOW)
    types = layer_types(text) or [FULL if window is None else SLIDING] * num_layers(text)
    if window is None and SLIDING in types:
        raise CheckpointError("config.json: layer_types has sliding_attention, but there is no sliding_window")
    windows = [window if kind == SLIDING else None for kind in types]
    return decoder(text, [LayerSpec(replace(mixer, window=one), mlp) for one in windows], eps=1e-6)


def _window(text: TextConfig, default: int | None) -> int | None:
    if text.get("sliding_window", default) is None:
        return None
    return setting(text, "sliding_window", int, default=default)


def _query_scaling(text: TextConfig, heads: AttentionSpec) -> QueryScaling | None:
    """Return how queries are scaled, if the rope settings say so."""
    rope = rope_settings(text)
    if not rope.get("llama_4_scaling_beta"):
        return None
    if not isinstance(heads.rope.scaling, YarnScaling):
        raise CheckpointError("config.json: llama_4_scaling_beta is served with rope type 'yarn' only")
    return QueryScaling(positive_number(rope, "llama_4_scaling_beta"), heads.rope.scaling.original_length)


MISTRAL = Backbone("Llama with a sliding window", partial(mistral, eps=1e-6, window=WINDOW))
MINISTRAL = Backbone("Llama with sliding windows in some layers", ministral)
MINISTRAL3 = Backbone("Llama, queries scaled by position", partial(mistral, eps=1e-5, window=None))
