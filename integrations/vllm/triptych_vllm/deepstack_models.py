"""vLLM's models with buffers for deepstack features, also without a tower."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration


def _add_buffers(model: Any, vllm_config: VllmConfig) -> None:
    """Do what the constructor does for a model that has its tower."""
    levels = len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
    if model.use_deepstack or not levels:
        return
    model.use_deepstack, model.deepstack_num_level = True, levels
    model.multiscale_dim = model.visual_dim * levels
    size = vllm_config.scheduler_config.max_num_batched_tokens, model.config.text_config.hidden_size
    model.deepstack_input_embeds = [torch.zeros(size) for _ in range(levels)]
    model.deepstack_input_embeds_num_tokens = 0


class Qwen3VL(Qwen3VLForConditionalGeneration):  # type: ignore[misc]  # vLLM isn't installed where types are checked
    """Qwen3-VL."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _add_buffers(self, vllm_config)


class Qwen3VLMoe(Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-VL with experts."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _add_buffers(self, vllm_config)


class Qwen3OmniMoe(Qwen3OmniMoeThinkerForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-Omni's thinker."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _add_buffers(self, vllm_config)
