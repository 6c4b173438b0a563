"""Adapter of GLM-4.1V, GLM-4.5V and GLM-4.6V: vision tower, decoder parameters and tensor names."""

from triptych.models.shared.encoder import MultimodalAdapter
from triptych.models.shared.vision_tower import VisionTowerSpec


class Glm4v(MultimodalAdapter):
    """``ModelAdapter`` for model types ``glm4v``, ``glm4v_moe`` and ``glm46v``."""

    towers = "Glm4vVisionModel"
    spec = VisionTowerSpec(
        {
            "depth": None,
            "hidden_size": 1536,
            "num_heads": 12,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "image_size": 336,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": None,
            "intermediate_size": 13696,
        },
        intermediate="out_hidden_size",
        rms_norms=True,
        output_bias=False,
        positions="embeddings.position_embedding",
        mlp=("gate_proj", "up_proj", "down_proj"),
        mlp_bias=False,
        gated_merger=True,
    )
