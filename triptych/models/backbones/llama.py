"""Llama 2 and 3, and the many models that share its layers: SmolLM2, Vicuna, Yi, TinyLlama, …; SmolLM3, of which every
fourth layer has no positions.

The references are ``LlamaModel`` and ``SmolLM3Model`` in transformers.
"""

from collections.abc import Sequence
from dataclasses import replace

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import NO_POSITIONS, RopeConfig
from triptych.layers.specs import LayerSpec
from triptych.models.backbones.base import (
    Backbone,
    TextConfig,
    attention,
    decoder,
    gated_mlp,
    has_positions,
    num_layers,
)
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    return _decoder(text, [True] * num_layers(text))


def smollm3(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    if text.get("use_sliding_window"):
        raise CheckpointError("config.json: use_sliding_window is not served for this model")
    return _decoder({"rope_theta": 2e6, "num_key_value_heads": 4, **text}, has_positions(text))


def _decoder(text: TextConfig, rotates: Sequence[bool]) -> DecoderConfig:
    """``rotates`` says which layers have positions."""
    has_bias = setting(text, "attention_bias", bool, default=False)
    heads = attention(text, read_rope(text, RopeConfig(10_000.0)))
    mixer = replace(heads, qkv_bias=has_bias, output_bias=has_bias)
    still = replace(mixer, rope=NO_POSITIONS)
    mlp = replace(gated_mlp(text), bias=setting(text, "mlp_bias", bool, default=False))
    return decoder(text, [LayerSpec(mixer if rotated else still, mlp) for rotated in rotates], eps=1e-6)


LLAMA = Backbone("Llama", describe)
SMOLLM3 = Backbone("SmolLM3 (layers without positions)", smollm3, ties_embeddings=True)
