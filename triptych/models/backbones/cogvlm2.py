"""CogVLM2's language model: Llama 3's layers, each with second weights for an image's tokens (*visual experts*).

Its code is published with its checkpoints; transformers has no class for it.
"""

from dataclasses import replace

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig, SecondWeights
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import LayerSpec
from triptych.models.backbones.base import COMMON_NAMES, Backbone, TextConfig, attention, decoder, gated_mlp, num_layers
from triptych.models.backbones.rope import rope_settings
from triptych.models.shared.settings import setting

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
NAMES = replace(
    COMMON_NAMES,
    fused=(("self_attn.language_expert_query_key_value", QKV),),
    renamed=(("self_attn.o_proj", "self_attn.language_expert_dense"), ("mlp.", "mlp.language_mlp.")),
)
SECOND = SecondWeights(
    fused=(("self_attn.vision_expert_query_key_value", QKV),),
    renamed=(("self_attn.o_proj", "self_attn.vision_expert_dense"), ("mlp.", "mlp.vision_mlp.")),
    biased=("self_attn.vision_expert_query_key_value",),
)
ROPE = RopeConfig(500_000.0)
"""The published code has it instead of the config."""


def describe(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    if rope_settings(text):
        raise CheckpointError("config.json: rope_scaling is not served: CogVLM2's code has none")
    mixer = attention({**text, "num_key_value_heads": setting(text, "num_multi_query_heads", int)}, ROPE)
    found = decoder(text, [LayerSpec(mixer, gated_mlp(text))] * num_layers(text), eps=1e-5, names=NAMES)
    return replace(found, second=SECOND)


COGVLM2 = Backbone("Llama 3 with visual experts", describe)
