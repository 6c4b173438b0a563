"""A plugin of vLLM: models whose decoders take deepstack features take them although their tower isn't loaded.

Without a tower (``--language-model-only``, or limits of 0), vLLM switches these features off: rows that carry them end
the engine. ``upstream/deepstack-without-tower.patch`` is the same for vLLM's own sources.
"""

ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": "Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoe",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoe",
}
"""vLLM's names, and the classes in ``deepstack_models`` that replace theirs."""


def register() -> None:
    """Replace the models. vLLM calls this in each of its processes."""
    from vllm import ModelRegistry

    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"triptych_vllm.deepstack_models:{name}")
