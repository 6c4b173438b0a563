"""Which family serves a checkpoint: the one table that names models. Entries are import strings, so that a
process loads only the files of its own stage."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig


@dataclass(frozen=True)
class Family:
    """``name`` is what people call its models. Then the import strings (``module:attribute``) of its files, and what
    requests may be made of."""

    name: str
    planner: str
    tower: str
    preprocessor: str | None = None
    modalities: tuple[str, ...] = ("text",)

    @property
    def takes_media(self) -> bool:
        """Whether there is anything to encode."""
        return len(self.modalities) > 1


QWEN2 = Family(
    name="Qwen2, Qwen2.5",
    planner="triptych.models.text.plan:TextPlanner",
    tower="triptych.models.text.adapter:Qwen2",
)

QWEN2_VL = Family(
    name="Qwen2-VL",
    planner="triptych.models.qwen2_vl.plan:Qwen2VLPlanner",
    preprocessor="triptych.models.shared.frames:VideoPreprocessor",
    tower="triptych.models.qwen2_vl.encoder:Qwen2VL",
    modalities=("text", "image", "video"),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="Qwen2.5-VL",
    planner="triptych.models.qwen2_5_vl.plan:Qwen25VLPlanner",
    tower="triptych.models.qwen2_5_vl.encoder:Qwen25VL",
)
QWEN3_VL = Family(
    name="Qwen3-VL",
    planner="triptych.models.qwen3_vl.plan:Qwen3VLPlanner",
    preprocessor="triptych.models.qwen3_vl.preprocess:Qwen3VLPreprocessor",
    tower="triptych.models.qwen3_vl.encoder:Qwen3VL",
    modalities=("text", "image", "video"),
)

QWEN3_OMNI = Family(
    name="Qwen3-Omni-MoE (thinker)",
    planner="triptych.models.qwen3_omni.plan:Qwen3OmniPlanner",
    preprocessor="triptych.models.qwen3_omni.preprocess:Qwen3OmniPreprocessor",
    tower="triptych.models.qwen3_omni.encoder:Qwen3Omni",
    modalities=("text", "image", "video", "audio"),
)

FAMILIES = {
    "qwen2": QWEN2,
    "qwen3": replace(QWEN2, name="Qwen3", tower="triptych.models.text.adapter:Qwen3"),
    "qwen3_moe": replace(QWEN2, name="Qwen3-MoE", tower="triptych.models.text.adapter:Qwen3Moe"),
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": replace(QWEN3_VL, name="Qwen3-VL-MoE", tower="triptych.models.qwen3_vl.encoder:Qwen3VLMoe"),
    "qwen3_omni_moe": QWEN3_OMNI,
    "qwen3_omni_moe_thinker": QWEN3_OMNI,
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
