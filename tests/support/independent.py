"""Models that transformers has no class for: written for the tests from the published descriptions, apart from
Triptych's code."""

from typing import Any

import transformers

from tests.support.cogvlm2 import CogVLM2
from tests.support.kimi import KimiVL

MODELS: dict[str, Any] = {"CogVLMForCausalLM": CogVLM2, "KimiVLForConditionalGeneration": KimiVL}
"""By ``architectures``. A class has ``config_class``, ``from_pretrained`` and ``generate`` as transformers' have."""


def model_class(architecture: str) -> Any:
    """The class of the reference."""
    return MODELS.get(architecture) or getattr(transformers, architecture)
