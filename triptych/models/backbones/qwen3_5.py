"""Qwen3.5 and Qwen3.5-MoE: the layers of Qwen3-Next, with projections of their own for each part of a gated delta net,
and interleaved M-RoPE.

The references are ``Qwen3_5TextModel`` and ``Qwen3_5MoeTextModel`` in transformers.
"""

from dataclasses import replace

from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.rope_config import RopeConfig
from triptych.models.backbones.base import Backbone, TextConfig, gated_mlp, num_layers
from triptych.models.backbones.experts import qwen_experts
from triptych.models.backbones.qwen3_next import delta_net, hybrid, shared_expert

ROPE = RopeConfig(10_000.0, (11, 11, 10), interleaved=True, partial=0.25)


def dense(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``. Raises CheckpointError."""
    return hybrid(text, [gated_mlp(text)] * num_layers(text), ROPE, delta_net(text))


def mixture(text: TextConfig) -> DecoderConfig:
    """Return the decoder of ``text``, whose layers are all mixtures of experts. Raises CheckpointError."""
    experts = shared_expert(text, qwen_experts(text, norm_topk_prob=True))
    experts = replace(experts, routing=replace(experts.routing, normalised=True))  # whatever the config says
    return hybrid(text, [experts] * num_layers(text), ROPE, delta_net(text))


QWEN3_5 = Backbone("Qwen3.5 (gated delta nets, gated attention), interleaved M-RoPE", dense)
QWEN3_5_MOE = Backbone(
    "Qwen3.5 (gated delta nets, gated attention), interleaved M-RoPE, mixture of experts with a shared one", mixture
)
