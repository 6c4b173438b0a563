"""Settings of language models that published multimodal configs leave out, because transformers' classes have them."""

from collections.abc import Mapping
from typing import Any

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}
"""Those of ``LlamaConfig``, ``Gemma3TextConfig``, ``MistralConfig`` and ``Qwen2Config``, by ``model_type``."""


def completed(text: Mapping[str, Any], default_type: str) -> Mapping[str, Any]:
    """Return a ``text_config`` with its defaults; ``default_type`` is its ``model_type`` if it has none."""
    text = {"model_type": default_type, **text}
    kind = text["model_type"]
    return {**TEXT_DEFAULTS.get(kind, {}), **text} if isinstance(kind, str) else text
