"""Adapter of GLM-4.1V, GLM-4.5V and GLM-4.6V: vision tower, decoder parameters and tensor names."""

from triptych.models.shared.encoder import MultimodalAdapter, TowerSpec


class Glm4v(MultimodalAdapter):
    """``ModelAdapter`` for model types ``glm4v``, ``glm4v_moe`` and ``glm46v``."""

    specs = (
        TowerSpec(
            module="transformers.models.glm4v.modeling_glm4v:Glm4vVisionModel",
            config="transformers.models.glm4v.configuration_glm4v:Glm4vVisionConfig",
            width="out_hidden_size",
            replaced=("Glm4VisionMlp", "Glm4vRMSNorm", "Glm4vVisionAttention", "Glm4vVisionBlock"),
        ),
    )
