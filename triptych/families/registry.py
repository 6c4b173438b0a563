"""Which family serves a checkpoint: the one table that names models. Entries are import strings, so that a
process loads only the files of its own stage."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import CheckpointError
from triptych.families.base import ModelConfig


@dataclass(frozen=True)
class Family:
    """Import strings (``module:attribute``) of a family's three files."""

    planner: str
    preprocessor: str
    tower: str


QWEN3_VL = Family(
    planner="triptych.families.qwen3_vl.plan:Qwen3VLPlanner",
    preprocessor="triptych.families.qwen3_vl.preprocess:Qwen3VLPreprocessor",
    tower="triptych.families.qwen3_vl.tower:Qwen3VL",
)

FAMILIES = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": replace(QWEN3_VL, tower="triptych.families.qwen3_vl.tower:Qwen3VLMoe"),
}


def family_of(config: ModelConfig) -> Family:
    """The family of a checkpoint's config. Raises CheckpointError for a model type that isn't served."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        served = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"config.json: model_type {model_type!r} is not served; served are {served}")
    return FAMILIES[model_type]


def resolve(import_string: str) -> Any:
    """The object that ``module:attribute`` names."""
    module, _, attribute = import_string.partition(":")
    return getattr(importlib.import_module(module), attribute)
