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


QWEN2_VL = Family(
    name="Qwen2-VL",
    backbone=f"{BACKBONES}.qwen2:QWEN2_VL",
    planner="triptych.models.qwen2_vl.plan:Qwen2VLPlanner",
    preprocessor="triptych.models.shared.frames:VideoPreprocessor",
    adapter="triptych.models.qwen2_vl.encoder:Qwen2VL",
    modalities=("text", "image", "video"),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    name="Qwen2.5-VL",
    planner="triptych.models.qwen2_5_vl.plan:Qwen25VLPlanner",
    adapter="triptych.models.qwen2_5_vl.encoder:Qwen25VL",
)
QWEN3_VL = Family(
    name="Qwen3-VL",
    backbone=f"{BACKBONES}.qwen3:QWEN3_VL",
    planner="triptych.models.qwen3_vl.plan:Qwen3VLPlanner",
    preprocessor="triptych.models.qwen3_vl.preprocess:Qwen3VLPreprocessor",
    adapter="triptych.models.qwen3_vl.encoder:Qwen3VL",
    modalities=("text", "image", "video"),
)
QWEN3_5 = replace(
    QWEN3_VL,
    name="Qwen3.5",
    backbone=f"{BACKBONES}.qwen3_5:QWEN3_5",
    adapter="triptych.models.qwen3_5.encoder:Qwen35",
)
GLM4V = Family(
    name="GLM-4.1V, GLM-4.6V-Flash",
    backbone=f"{BACKBONES}.glm:GLM4V",
    planner="triptych.models.glm4v.plan:Glm4vPlanner",
    preprocessor="triptych.models.glm4v.preprocess:Glm4vPreprocessor",
    adapter="triptych.models.glm4v.encoder:Glm4v",
    modalities=("text", "image", "video"),
)
QWEN3_OMNI = Family(
    name="Qwen3-Omni-MoE (thinker)",
    backbone=f"{BACKBONES}.qwen3:QWEN3_OMNI_MOE",
    planner="triptych.models.qwen3_omni.plan:Qwen3OmniPlanner",
    preprocessor="triptych.models.qwen3_omni.preprocess:Qwen3OmniPreprocessor",
    adapter="triptych.models.qwen3_omni.encoder:Qwen3Omni",
    modalities=("text", "image", "video", "audio"),
)
QWEN2_5_OMNI = Family(
    name="Qwen2.5-Omni (thinker)",
    backbone=f"{BACKBONES}.qwen2:QWEN2_5_OMNI",
    planner="triptych.models.qwen2_5_omni.plan:Qwen25OmniPlanner",
    preprocessor="triptych.models.qwen2_5_omni.preprocess:Qwen25OmniPreprocessor",
    adapter="triptych.models.qwen2_5_omni.encoder:Qwen25Omni",
    modalities=("text", "image", "video", "audio"),
)
QWEN2_AUDIO = Family(
    name="Qwen2-Audio",
    planner="triptych.models.qwen2_audio.plan:Qwen2AudioPlanner",
    preprocessor="triptych.models.qwen2_audio.preprocess:Qwen2AudioPreprocessor",
    adapter="triptych.models.qwen2_audio.encoder:Qwen2Audio",
    modalities=("text", "audio"),
)
LLAVA = Family(
    name="LLaVA-1.5",
    planner="triptych.models.llava.plan:LlavaPlanner",
    preprocessor="triptych.models.llava.preprocess:LlavaPreprocessor",
    adapter="triptych.models.llava.encoder:Llava",
    modalities=("text", "image"),
)
LLAVA_NEXT = replace(
    LLAVA,
    name="LLaVA-NeXT (1.6)",
    planner="triptych.models.llava.next_plan:LlavaNextPlanner",
    preprocessor="triptych.models.llava.next_preprocess:LlavaNextPreprocessor",
    adapter="triptych.models.llava.encoder:LlavaNext",
)
MISTRAL3 = Family(
    name="Mistral Small 3.1 and 3.2, Ministral 3",
    planner="triptych.models.mistral3.plan:Mistral3Planner",
    preprocessor="triptych.models.mistral3.preprocess:Mistral3Preprocessor",
    adapter="triptych.models.mistral3.encoder:Mistral3",
    modalities=("text", "image"),
)
PIXTRAL = Family(
    name="Pixtral-12B",
    planner="triptych.models.pixtral.plan:PixtralPlanner",
    preprocessor="triptych.models.pixtral.preprocess:PixtralPreprocessor",
    adapter="triptych.models.pixtral.encoder:Pixtral",
    modalities=("text", "image"),
)
KIMI_VL = Family(
    name="Kimi-VL",
    planner="triptych.models.kimi.plan:KimiVLPlanner",
    preprocessor="triptych.models.kimi.preprocess:KimiVLPreprocessor",
    adapter="triptych.models.kimi.encoder:KimiVL",
    modalities=("text", "image"),
)
IDEFICS3 = Family(
    name="Idefics3",
    planner="triptych.models.idefics3.plan:Idefics3Planner",
    preprocessor="triptych.models.idefics3.preprocess:Idefics3Preprocessor",
    adapter="triptych.models.idefics3.encoder:Idefics3",
    modalities=("text", "image"),
)
LLAMA4 = Family(
    name="Llama 4: Scout, Maverick",
    planner="triptych.models.llama4.plan:Llama4Planner",
    preprocessor="triptych.models.llama4.preprocess:Llama4Preprocessor",
    adapter="triptych.models.llama4.encoder:Llama4",
    modalities=("text", "image"),
)
GEMMA3 = Family(
    name="Gemma 3",
    planner="triptych.models.gemma3.plan:Gemma3Planner",
    preprocessor="triptych.models.gemma3.preprocess:Gemma3Preprocessor",
    adapter="triptych.models.gemma3.encoder:Gemma3",
    modalities=("text", "image"),
)
MINICPMV4_6 = Family(
    name="MiniCPM-V 4.6",
    planner="triptych.models.minicpmv.plan:MiniCPMV46Planner",
    preprocessor="triptych.models.minicpmv.preprocess:MiniCPMV46Preprocessor",
    adapter="triptych.models.minicpmv.encoder:MiniCPMV46",
    modalities=("text", "image", "video"),
)
MINICPMV = replace(
    MINICPMV4_6,
    name="MiniCPM-V 2.6 and 4.5",
    planner="triptych.models.minicpmv.plan:MiniCPMVPlanner",
    preprocessor="triptych.models.minicpmv.preprocess:MiniCPMVPreprocessor",
    adapter="triptych.models.minicpmv.resampler:MiniCPMV",
)
DEEPSEEK_OCR = Family(
    name="DeepSeek-OCR, DeepSeek-OCR-2",
    backbone=f"{BACKBONES}.deepseek:DEEPSEEK_OCR",
    planner="triptych.models.deepseek_ocr.plan:DeepseekOcrPlanner",
    preprocessor="triptych.models.deepseek_ocr.preprocess:DeepseekOcrPreprocessor",
    adapter="triptych.models.deepseek_ocr.encoder:DeepseekOcr",
    modalities=("text", "image"),
    template="triptych.models.deepseek_ocr.template:TEMPLATE",
)
COGVLM2 = Family(
    name="CogVLM2 (images)",
    backbone=f"{BACKBONES}.cogvlm2:COGVLM2",
    planner="triptych.models.cogvlm2.plan:CogVLM2Planner",
    preprocessor="triptych.models.cogvlm2.preprocess:CogVLM2Preprocessor",
    adapter="triptych.models.cogvlm2.encoder:CogVLM2",
    modalities=("text", "image"),
    template="triptych.models.cogvlm2.template:TEMPLATE",
    ignores_tokenizers_template=True,
)
GEMMA4 = Family(
    name="Gemma 4: E2B, E4B, 26B-A4B, 31B",
    backbone=f"{BACKBONES}.gemma4:GEMMA4",
    planner="triptych.models.gemma4.plan:Gemma4Planner",
    preprocessor="triptych.models.gemma4.preprocess:Gemma4Preprocessor",
    adapter="triptych.models.gemma4.encoder:Gemma4",
    modalities=("text", "image", "video", "audio"),
)
INTERNVL = Family(
    name="InternVL3, InternVL3.5 (-hf)",
    planner="triptych.models.internvl.plan:InternVLPlanner",
    preprocessor="triptych.models.internvl.preprocess:InternVLPreprocessor",
    adapter="triptych.models.internvl.encoder:InternVL",
    modalities=("text", "image", "video"),
)

PHI4MM = Family(
    name="Phi-4-multimodal",
    backbone=f"{BACKBONES}.phi3:PHI3",
    planner="triptych.models.phi4mm.plan:Phi4MMPlanner",
    preprocessor="triptych.models.phi4mm.preprocess:Phi4MMPreprocessor",
    adapter="triptych.models.phi4mm.encoder:Phi4MM",
    modalities=("text", "image", "audio"),
)

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
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": replace(QWEN3_VL, name="Qwen3-VL-MoE", backbone=f"{BACKBONES}.qwen3:QWEN3_VL_MOE"),
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": replace(QWEN3_5, name="Qwen3.5-MoE", backbone=f"{BACKBONES}.qwen3_5:QWEN3_5_MOE"),
    "qwen2_audio": QWEN2_AUDIO,
    "qwen2_5_omni": QWEN2_5_OMNI,
    "qwen2_5_omni_thinker": QWEN2_5_OMNI,
    "qwen3_omni_moe": QWEN3_OMNI,
    "qwen3_omni_moe_thinker": QWEN3_OMNI,
    "minicpmv4_6": MINICPMV4_6,
    "minicpmv": MINICPMV,
    "glm4v": GLM4V,
    "glm46v": replace(GLM4V, name="GLM-4.6V-Flash"),
    "glm4v_moe": replace(GLM4V, name="GLM-4.5V, GLM-4.6V", backbone=f"{BACKBONES}.glm4_moe:GLM4V_MOE"),
    "gemma4+gemma4_vision": GEMMA4,
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": replace(
        LLAVA_NEXT,
        name="LLaVA-OneVision",
        planner="triptych.models.llava.next_plan:LlavaOneVisionPlanner",
        preprocessor="triptych.models.llava.next_preprocess:LlavaOneVisionPreprocessor",
        modalities=("text", "image", "video"),
    ),
    "llava+pixtral": PIXTRAL,
    "mistral3": MISTRAL3,
    "llama4": LLAMA4,
    "gemma3": GEMMA3,
    "kimi_vl": KIMI_VL,
    "kimi_k25": replace(
        KIMI_VL,
        name="Kimi K2.5, Kimi K2.6",
        planner="triptych.models.kimi.plan:KimiK25Planner",
        preprocessor="triptych.models.kimi.preprocess:KimiK25Preprocessor",
        adapter="triptych.models.kimi.encoder:KimiK25",
        modalities=("text", "image", "video"),
    ),
    "idefics3": IDEFICS3,
    "smolvlm": replace(
        IDEFICS3,
        name="SmolVLM, SmolVLM2",
        planner="triptych.models.idefics3.plan:SmolVLMPlanner",
        preprocessor="triptych.models.idefics3.preprocess:SmolVLMPreprocessor",
        modalities=("text", "image", "video"),
    ),
    "deepseek_vl_v2": DEEPSEEK_OCR,
    "deepseek_ocr2": replace(DEEPSEEK_OCR, name="DeepSeek-OCR-2 (Transformers)"),
    "cogvlm2": COGVLM2,
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
