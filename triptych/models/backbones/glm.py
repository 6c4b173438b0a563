"""GLM-4-9B, GLM-4-0414 and GLM-4.1V: half of a head's values are rotated, neighbours together, and gate and up are
stored as one tensor. The latter two also normalise what attention and MLP return.

The references are ``GlmModel`` (model type ``glm``), ``Glm4Model`` and ``Glm4vTextModel`` in transformers.
"""

from dataclasses import replace
from functools import partial

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import PRE_NORMS, LayerSpec, NormNames
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

NAMES = replace(COMMON_NAMES, fused=(("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),))
ROPE = RopeConfig(10_000.0, partial=0.5, pairs=True)
FOUR_NORMS = NormNames(after_mixer="post_self_attn_layernorm", after_ffn="post_mlp_layernorm")


def describe(
    text: TextConfig, *, norms: NormNames, rope: RopeConfig = ROPE, head_dim: int | None = 128, eps: float = 1.5625e-7
) -> DecoderConfig:
    """Return the decoder of ``text``; the others are defaults. Raises CheckpointError."""
    heads = attention(text, read_rope(text, rope), head_dim=head_dim, num_kv_heads=2)
    mixer = replace(heads, qkv_bias=setting(text, "attention_bias", bool, default=True))
    layer = LayerSpec(mixer, gated_mlp(text), norms)
    return decoder(text, [layer] * num_layers(text), eps=eps, names=NAMES)


GLM = Backbone("GLM-4 (neighbours rotate together)", partial(describe, norms=PRE_NORMS))
GLM4 = Backbone(
    "GLM-4 (neighbours rotate together, four norms)",
    partial(describe, norms=FOUR_NORMS),
)
GLM4V = Backbone(
    "GLM-4 (neighbours rotate together, four norms) with M-RoPE",
    partial(describe, norms=FOUR_NORMS, rope=replace(ROPE, mrope_section=(8, 12, 12)), head_dim=None, eps=1e-5),
)
