"""InternLM2: Llama's layers by other names, with queries, keys and values in one tensor, kv head by kv head.

Its code is published with its checkpoints; transformers has no class for it.
"""

from dataclasses import replace

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import LayerSpec, NormNames
from triptych.models.backbones.base import COMMON_NAMES, Backbone, TextConfig, attention, decoder, gated_mlp, num_layers
from triptych.models.backbones.rope import read_rope
from triptych.models.shared.settings import setting

NAMES = replace(
    COMMON_NAMES,
    fused=(("attention.wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),),
    fused_by_kv_head=True,
    renamed=(
        ("embed_tokens", "tok_embeddings"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
    ),
    head="output.weight",
)
NORMS = NormNames("attention_norm", "ffn_norm")


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    has_bias = setting(text, "bias", bool, default=True)
    heads = attention(text, read_rope(text, RopeConfig(10_000.0)))
    mixer = replace(heads, qkv_bias=has_bias, output_bias=has_bias)
    return decoder(text, [LayerSpec(mixer, gated_mlp(text), NORMS)] * num_layers(text), eps=1e-6, names=NAMES)


INTERNLM2 = Backbone("Llama by other names, queries, keys and values fused by kv head", describe)
