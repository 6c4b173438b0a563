"""GLM-4-9B and GLM-4-0414: half of a head's values are rotated, neighbours together, and gate and up are stored as one
tensor. GLM-4-0414 also normalises what attention and MLP return.

The references are ``GlmModel`` (model type ``glm``) and ``Glm4Model`` in transformers.
"""

from dataclasses import replace
from functools import partial

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import PRE_NORMS, LayerSpec, NormNames
from triptych.models.backbones.base import (
    INV_FREQ_IGNORED,
    Backbone,
    TextConfig,
    attention,
    decoder,
    gated_mlp,
    num_layers,
)
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting

NAMES = replace(INV_FREQ_IGNORED, fused=(("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),))
ROPE = RopeConfig(10_000.0, partial=0.5, pairs=True)


def describe(text: TextConfig, *, norms: NormNames) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    heads = attention(text, read_rope(text, ROPE), head_dim=128, num_kv_heads=2)
    mixer = replace(heads, qkv_bias=setting(text, "attention_bias", bool, default=True))
    layer = LayerSpec(mixer, gated_mlp(text), norms)
    return decoder(text, [layer] * num_layers(text), eps=1.5625e-7, names=NAMES)


GLM = Backbone("GLM-4 (neighbours rotate together)", partial(describe, norms=PRE_NORMS))
GLM4 = Backbone(
    "GLM-4 (neighbours rotate together, four norms)",
    partial(describe, norms=NormNames(after_mixer="post_self_attn_layernorm", after_ffn="post_mlp_layernorm")),
)
