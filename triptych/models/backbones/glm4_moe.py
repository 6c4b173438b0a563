"""GLM-4.5, GLM-4.6 and GLM-4.7: half of a head's values are rotated, and DeepSeek-V3's mixtures of experts follow the
first, dense layers.

The reference is ``Glm4MoeModel`` in transformers.
"""

from dataclasses import replace
from functools import partial

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import LayerSpec
from triptych.models.backbones.base import COMMON_NAMES, Backbone, TextConfig, attention, decoder
from triptych.models.backbones.experts import deepseek_ffns, next_token_layers, sigmoid_routing
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting

ROPE = RopeConfig(10_000.0, partial=0.5)


def describe(text: TextConfig, *, rope: RopeConfig, qkv_bias: bool) -> DecoderConfig:
    """Return the decoder of ``text``; the others are defaults. Raises CheckpointError."""
    heads = attention(text, read_rope(text, rope), num_kv_heads=8)
    mixer = replace(
        heads,
        qkv_bias=setting(text, "attention_bias", bool, default=qkv_bias),
        qk_norm=setting(text, "use_qk_norm", bool, default=False),
    )
    routing = sigmoid_routing(text, groups=1, kept_groups=1, scale=1.0)
    ffns = deepseek_ffns(text, routing, shared=1, dense=1)
    names = replace(COMMON_NAMES, ignored_modules=next_token_layers(text))
    return decoder(text, [LayerSpec(mixer, ffn) for ffn in ffns], eps=1e-5, names=names)


GLM4_MOE = Backbone(
    "GLM-4.5 (half of each head rotated, sigmoid routing with a shared expert)",
    partial(describe, rope=ROPE, qkv_bias=False),
)
GLM4V_MOE = Backbone(
    "GLM-4.5 with M-RoPE", partial(describe, rope=replace(ROPE, mrope_section=(8, 12, 12)), qkv_bias=True)
)
