"""Llama 2 and 3, and the many models that share its layers: SmolLM2, Vicuna, Yi, TinyLlama, …

The reference is ``LlamaModel`` in transformers.
"""

from dataclasses import replace

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import LayerSpec
from triptych.models.backbones.base import Backbone, TextConfig, attention, decoder, gated_mlp, num_layers
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    has_bias = setting(text, "attention_bias", bool, default=False)
    heads = attention(text, read_rope(text, RopeConfig(10_000.0)))
    mixer = replace(heads, qkv_bias=has_bias, output_bias=has_bias)
    mlp = replace(gated_mlp(text), bias=setting(text, "mlp_bias", bool, default=False))
    return decoder(text, [LayerSpec(mixer, mlp)] * num_layers(text), eps=1e-6)


LLAMA = Backbone("Llama", describe)
