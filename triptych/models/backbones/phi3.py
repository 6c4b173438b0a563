"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's layers, whose projections are stored as one tensor.

The reference is ``Phi3Model`` in transformers.
"""

from dataclasses import replace

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import LayerSpec
from triptych.models.backbones.base import (
    COMMON_NAMES,
    Backbone,
    TextConfig,
    attention,
    decoder,
    gated_mlp,
    num_layers,
)
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting

NAMES = replace(
    COMMON_NAMES,
    fused=(
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ),
)


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    window = None if text.get("sliding_window") is None else setting(text, "sliding_window", int)
    mixer = replace(attention(text, read_rope(text, RopeConfig(10_000.0))), window=window)
    return decoder(text, [LayerSpec(mixer, gated_mlp(text))] * num_layers(text), eps=1e-5, names=NAMES)


PHI3 = Backbone("Llama with fused projections, LongRoPE", describe)
