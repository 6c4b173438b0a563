"""Maps a checkpoint's model type to its family: the only table that names models. Entries are import strings, so that
a process imports only the files of its own stage."""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.identity import model_identity
from triptych.errors import CheckpointError
from triptych.messages.identity import ModelIdentity
from triptych.models.backbones.base import Backbone
from triptych.models.base import ModelConfig


@dataclass(frozen=True)
class Family:
    """The code that serves a model type. ``resolve`` loads the import strings, ``module:attribute``."""

    name: str
    """The models' common name, for documentation."""
    planner: str
    """Import string of the ``Planner`` class."""
    adapter: str
    """Import string of the ``ModelAdapter`` class."""
    backbone: str | None = None
    """Import string of the ``Backbone``; None for that of the text model that ``text_config`` names."""
    preprocessor: str | None = None
    """Import string of the ``Preprocessor`` class; None for text-only models."""
    modalities: tuple[str, ...] = ("text",)
    """Modalities a request may contain."""
    template: str | None = None
    """Import string of the chat template's text for checkpoints without one; None: these can't be served."""
    ignores_tokenizers_template: bool = False
    """Whether ``template`` is used although the tokenizer's files have another one."""

    @property
    def adapter_name(self) -> str:
        """The adapter's class, as part of a model's identity."""
        return self.adapter.partition(":")[2]

    @property
    def takes_media(self) -> bool:
        """Whether requests may contain media, so that the model has an encoder."""
        return len(self.modalities) > 1


BACKBONES = "triptych.models.backbones"


def _text(name: str, backbone: str) -> Family:
    """Return the family of a text-only model; ``backbone`` is a module's name and an attribute."""
    return Family(
        name=name,
        backbone=f"{BACKBONES}.{backbone}",
        planner="triptych.models.text.plan:TextPlanner",
        adapter="triptych.models.text.adapter:TextAdapter",
    )


IMAGES, VIDEOS, ALL = ("text", "image"), ("text", "image", "video"), ("text", "image", "video", "audio")


def _of(name: str, folder: str, classes: str, modalities: tuple[str, ...], backbone: str | None = None) -> Family:
    """Return a family whose classes are in ``models/<folder>/{plan,preprocess,encoder}.py`` and have names that begin
    alike. ``backbone`` is as in ``_text``."""
    return Family(
        name=name,
        backbone=backbone and f"{BACKBONES}.{backbone}",
        planner=f"triptych.models.{folder}.plan:{classes}Planner",
        preprocessor=f"triptych.models.{folder}.preprocess:{classes}Preprocessor",
        adapter=f"triptych.models.{folder}.encoder:{classes}",
        modalities=modalities,
    )


QWEN2_VL = replace(
    _of("Qwen2-VL", "qwen2_vl", "Qwen2VL", VIDEOS, "qwen2:QWEN2_VL"),
    preprocessor="triptych.models.shared.frames:VideoPreprocessor",
)
QWEN3_VL = _of("Qwen3-VL", "qwen3_vl", "Qwen3VL", VIDEOS, "qwen3:QWEN3_VL")
QWEN3_5 = replace(
    QWEN3_VL,
    name="Qwen3.5",
    backbone=f"{BACKBONES}.qwen3_5:QWEN3_5",
    adapter="triptych.models.qwen3_5.encoder:Qwen35",
)
QWEN2_5_OMNI = _of("Qwen2.5-Omni (thinker)", "qwen2_5_omni", "Qwen25Omni", ALL, "qwen2:QWEN2_5_OMNI")
QWEN3_OMNI = _of("Qwen3-Omni-MoE (thinker)", "qwen3_omni", "Qwen3Omni", ALL, "qwen3:QWEN3_OMNI_MOE")
GLM4V = _of("GLM-4.1V, GLM-4.6V-Flash", "glm4v", "Glm4v", VIDEOS, "glm:GLM4V")
LLAVA = _of("LLaVA-1.5", "llava", "Llava", IMAGES)
LLAVA_NEXT = replace(
    LLAVA,
    name="LLaVA-NeXT (1.6)",
    planner="triptych.models.llava.next_plan:LlavaNextPlanner",
    preprocessor="triptych.models.llava.next_preprocess:LlavaNextPreprocessor",
    adapter="triptych.models.llava.encoder:LlavaNext",
)
DEEPSEEK_OCR = replace(
    _of("DeepSeek-OCR, DeepSeek-OCR-2", "deepseek_ocr", "DeepseekOcr", IMAGES, "deepseek:DEEPSEEK_OCR"),
    template="triptych.models.deepseek_ocr.template:TEMPLATE",
)
INTERNVL = _of("InternVL3, InternVL3.5 (-hf)", "internvl", "InternVL", VIDEOS)
PHI4MM = _of("Phi-4-multimodal", "phi4mm", "Phi4MM", ("text", "image", "audio"), "phi3:PHI3")

WITH_TOWER = "+"
FAMILIES = {
    "qwen2": _text("Qwen2, Qwen2.5", "qwen2:QWEN2"),
    "qwen3": _text("Qwen3", "qwen3:QWEN3"),
    "qwen3_moe": _text("Qwen3-MoE", "qwen3:QWEN3_MOE"),
    "qwen3_next": _text("Qwen3-Next", "qwen3_next:QWEN3_NEXT"),
    "qwen3_5_text": _text("Qwen3.5 (text)", "qwen3_5:QWEN3_5"),
    "qwen3_5_moe_text": _text("Qwen3.5-MoE (text)", "qwen3_5:QWEN3_5_MOE"),
    "qwen2_moe": _text("Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe:QWEN2_MOE"),
    "llama": _text("Llama 2, Llama 3, SmolLM2", "llama:LLAMA"),
    "llama4_text": _text("Llama 4 (text): Scout, Maverick", "llama4:LLAMA4"),
    "smollm3": _text("SmolLM3", "llama:SMOLLM3"),
    "mistral": _text("Mistral", "mistral:MISTRAL"),
    "ministral": _text("Ministral", "mistral:MINISTRAL"),
    "ministral3": _text("Ministral 3 (text)", "mistral:MINISTRAL3"),
    "phi3": _text("Phi-3, Phi-4, Phi-4-mini", "phi3:PHI3"),
    "glm": _text("GLM-4-9B", "glm:GLM"),
    "glm4": _text("GLM-4-0414", "glm:GLM4"),
    "glm4_moe": _text("GLM-4.5, GLM-4.6, GLM-4.7", "glm4_moe:GLM4_MOE"),
    "deepseek_v2": _text("DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-V2.5", "deepseek:DEEPSEEK_V2"),
    "deepseek_v3": _text("DeepSeek-V3, DeepSeek-R1, Moonlight", "deepseek:DEEPSEEK_V3"),
    "kimi_k2": _text("Kimi K2 (text)", "deepseek:DEEPSEEK_V3"),
    "internlm2": _text("InternLM2, InternLM2.5", "internlm2:INTERNLM2"),
    "gemma2": _text("Gemma 2", "gemma:GEMMA2"),
    "gemma3_text": _text("Gemma 3 (text)", "gemma:GEMMA3"),
    "gemma4": _text("Gemma 4 (text)", "gemma4:GEMMA4"),
    "gemma4_text": _text("Gemma 4 (text)", "gemma4:GEMMA4"),
    "gpt_oss": _text("gpt-oss", "gpt_oss:GPT_OSS"),
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": replace(
        QWEN2_VL,
        name="Qwen2.5-VL",
        planner="triptych.models.qwen2_5_vl.plan:Qwen25VLPlanner",
        adapter="triptych.models.qwen2_5_vl.encoder:Qwen25VL",
    ),
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": replace(QWEN3_VL, name="Qwen3-VL-MoE", backbone=f"{BACKBONES}.qwen3:QWEN3_VL_MOE"),
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": replace(QWEN3_5, name="Qwen3.5-MoE", backbone=f"{BACKBONES}.qwen3_5:QWEN3_5_MOE"),
    "qwen2_audio": _of("Qwen2-Audio", "qwen2_audio", "Qwen2Audio", ("text", "audio")),
    "qwen2_5_omni": QWEN2_5_OMNI,
    "qwen2_5_omni_thinker": QWEN2_5_OMNI,
    "qwen3_omni_moe": QWEN3_OMNI,
    "qwen3_omni_moe_thinker": QWEN3_OMNI,
    "minicpmv4_6": _of("MiniCPM-V 4.6", "minicpmv", "MiniCPMV46", VIDEOS),
    "minicpmv": replace(
        _of("MiniCPM-V 2.6 and 4.5", "minicpmv", "MiniCPMV", VIDEOS),
        adapter="triptych.models.minicpmv.resampler:MiniCPMV",
    ),
    "glm4v": GLM4V,
    "glm46v": replace(GLM4V, name="GLM-4.6V-Flash"),
    "glm4v_moe": replace(GLM4V, name="GLM-4.5V, GLM-4.6V", backbone=f"{BACKBONES}.glm4_moe:GLM4V_MOE"),
    "gemma4+gemma4_vision": _of("Gemma 4: E2B, E4B, 26B-A4B, 31B", "gemma4", "Gemma4", ALL, "gemma4:GEMMA4"),
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": replace(
        LLAVA_NEXT,
        name="LLaVA-OneVision",
        planner="triptych.models.llava.next_plan:LlavaOneVisionPlanner",
        preprocessor="triptych.models.llava.next_preprocess:LlavaOneVisionPreprocessor",
        modalities=VIDEOS,
    ),
    "llava+pixtral": _of("Pixtral-12B", "pixtral", "Pixtral", IMAGES),
    "mistral3": _of("Mistral Small 3.1 and 3.2, Ministral 3", "mistral3", "Mistral3", IMAGES),
    "llama4": _of("Llama 4: Scout, Maverick", "llama4", "Llama4", IMAGES),
    "gemma3": _of("Gemma 3", "gemma3", "Gemma3", IMAGES),
    "kimi_vl": _of("Kimi-VL", "kimi", "KimiVL", IMAGES),
    "kimi_k25": _of("Kimi K2.5, Kimi K2.6", "kimi", "KimiK25", VIDEOS),
    "idefics3": _of("Idefics3", "idefics3", "Idefics3", IMAGES),
    "smolvlm": replace(
        _of("SmolVLM, SmolVLM2", "idefics3", "SmolVLM", VIDEOS), adapter="triptych.models.idefics3.encoder:Idefics3"
    ),
    "deepseek_vl_v2": DEEPSEEK_OCR,
    "deepseek_ocr2": replace(DEEPSEEK_OCR, name="DeepSeek-OCR-2 (Transformers)"),
    "cogvlm2": replace(
        _of("CogVLM2 (images)", "cogvlm2", "CogVLM2", IMAGES, "cogvlm2:COGVLM2"),
        template="triptych.models.cogvlm2.template:TEMPLATE",
        ignores_tokenizers_template=True,
    ),
    "internvl": INTERNVL,
    "phi4_multimodal": replace(PHI4MM, name="Phi-4-multimodal (transformers' files)"),
    "phi4mm": PHI4MM,
    "internvl_chat": replace(
        INTERNVL,
        name="InternVL2.5, InternVL3, InternVL3.5 (original files)",
        adapter="triptych.models.internvl.encoder:InternVLChat",
    ),
}
"""By ``model_type``. A second name, after ``WITH_TOWER``, is that of ``vision_config``: such models are a family of
their own."""


MODEL_TYPES = {"CogVLMForCausalLM": "cogvlm2"}
"""``model_type`` of configs without one, by their ``architectures``."""


def model_type_of(config: ModelConfig) -> Any:
    """Return a config's model type, of whatever kind it is; None if there is none."""
    match config.get("architectures"):
        case [str(architecture), *_] if config.get("model_type") is None:
            return MODEL_TYPES.get(architecture)
    return config.get("model_type")


def family_of(config: ModelConfig) -> Family:
    """Return the family of a checkpoint's config. Raises CheckpointError for an unsupported model type."""
    model_type, vision = model_type_of(config), config.get("vision_config")
    if not isinstance(model_type, str) or model_type not in FAMILIES or WITH_TOWER in model_type:
        served = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"config.json: model_type {model_type!r} is not served; served are {served}")
    tower = vision.get("model_type") if isinstance(vision, dict) else None
    return FAMILIES.get(f"{model_type}{WITH_TOWER}{tower}", FAMILIES[model_type])


def backbone_of(config: ModelConfig) -> Backbone:
    """Return the backbone of a checkpoint's config: the family's own or, if it has none, that of the text model that
    ``text_config`` names. Raises CheckpointError for an unsupported model type."""
    path = family_of(config).backbone or _text_backbone(config)
    backbone: Backbone = resolve(path)
    return backbone


def _text_backbone(config: ModelConfig) -> str:
    text = config.get("text_config")
    model_type = text.get("model_type") if isinstance(text, dict) else None
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or family.backbone is None or family.takes_media:
        served = ", ".join(sorted(name for name, one in FAMILIES.items() if not one.takes_media))
        raise CheckpointError(f"config.json: text_config.model_type {model_type!r} is not served; served are {served}")
    return family.backbone


def identity_of(folder: Path) -> ModelIdentity:
    """Return the identity of a checkpoint; see ``checkpoint.identity.model_identity``. Raises CheckpointError."""
    return model_identity(folder, family_of(load_config(folder)).adapter_name)


def resolve(import_string: str) -> Any:
    """Import and return the object that ``module:attribute`` names."""
    module, _, attribute = import_string.partition(":")
    return getattr(importlib.import_module(module), attribute)
