"""gpt-oss: attention with sinks, every second layer with a sliding window, and mixtures of experts with biases and a
clamped activation.

The reference is ``GptOssModel`` in transformers, whose layout ``save_pretrained`` writes. Experts are published in
MXFP4 (``layers/stored/mxfp4.py``).
"""

from dataclasses import replace

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import ClampedSwiGLU, LayerSpec, MoESpec, RoutingSpec
from triptych.models.backbones.base import FULL, SLIDING, Backbone, TextConfig, alternating_types, attention, decoder
from triptych.models.backbones.rope import read_rope, rope_settings
from triptych.models.shared.settings import positive_number, setting

ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Used if the config has no rotary settings."""


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    rope = read_rope({**text, "rope_parameters": rope_settings(text) or ROPE}, RopeConfig(150_000.0))
    has_bias = setting(text, "attention_bias", bool, default=True)
    heads = attention(text, rope, head_dim=64, num_kv_heads=8)
    mixer = replace(heads, qkv_bias=has_bias, output_bias=has_bias, has_sinks=True)
    experts = MoESpec(
        setting(text, "num_local_experts", int),
        setting(text, "intermediate_size", int),
        RoutingSpec(setting(text, "num_experts_per_tok", int)),
        router="router",
        has_biases=True,
        activation=ClampedSwiGLU(
            positive_number(text, "swiglu_limit", 7.0), positive_number(text, "swiglu_alpha", 1.702)
        ),
        alternating=True,
    )
    windows = {FULL: None, SLIDING: setting(text, "sliding_window", int, default=128)}
    layers = [LayerSpec(replace(mixer, window=windows[kind]), experts) for kind in alternating_types(text, 2)]
    return decoder(text, layers, eps=1e-5)


GPT_OSS = Backbone("gpt-oss (sinks, alternating windows, mixture of experts with biases)", describe)
