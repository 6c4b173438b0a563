"""Which model families each kind of test covers. The tests are parametrized with these tables, and
``scripts/models_doc.py`` writes docs/models.md from them."""

import json
from typing import Any

from tests.models.golden.make_videos import FILE
from tests.support.backbones import BACKBONES
from tests.support.released import RELEASED
from tests.support.tiny import OMNI, OWN_TOWERS, TINY
from triptych.models.registry import FAMILIES

WITH_IMAGES = [name for name in TINY if FAMILIES[name].takes_media]
ANSWERED_IMAGES = [*WITH_IMAGES, *OWN_TOWERS]
"""Answers about images are compared."""
REPRESENTATIVE = (
    *("qwen2_vl", "qwen3_5", "glm4v", "llava_next", "internvl"),
    *("gemma4+gemma4_vision", "minicpmv4_6", "phi4_multimodal", "deepseek_vl_v2", "cogvlm2"),
)
"""Of each way to cut media and to pack rows, one. First logits of models that take images are compared, encode
instances lost, and prompts divided into chunks, for these in every run, and for all in the slow suite: in every run,
other tests compare their towers' rows, their backbones' logits and their answers."""
EDGE_MEDIA = [*ANSWERED_IMAGES, "qwen3_vl", "minicpmv", "internvl_chat", "phi4mm"]
"""Thin and huge images, options and bad media are tried: every implementation of a planner and a preprocessor, and
those files whose settings are read otherwise."""
EDGE_ANSWERS = [*ANSWERED_IMAGES, "qwen3_vl"]
"""Answers about thin and huge images are compared, in the slow suite."""
SAME_MEDIA = {
    "qwen3_5_moe": "qwen3_5",
    "glm4v_moe": "glm4v",
    "glm46v": "glm4v",
    **{f"{name}_thinker": name for name in OMNI},
    "internvl_chat": "internvl",
    "phi4mm": "phi4_multimodal",
}
"""Model types whose media become the same as another's, whose code they share: those of mixtures and of parts, and
original files."""
RELEASED_EDGES = [name for name in EDGE_MEDIA if name in RELEASED]
"""The same with the settings of released checkpoints: huge images."""
ONE_IMAGE = ("cogvlm2",)
"""Families that take one image per request."""
BACKBONE_TYPES = {tiny.config["model_type"] for tiny in BACKBONES.values()}
"""Model types of ``tests/support/backbones.py``."""
ANSWERED_BACKBONES = (
    *("phi3", "glm4", "glm4_moe", "deepseek_v3", "gemma2", "gemma3", "gemma4-e", "gpt_oss", "qwen3_5", "qwen3_next"),
)
"""Backbones whose answers are compared in every run. The others differ from Qwen's by what the tests of ``layers``
compare, and are left to the slow suite."""
ONE_INSTANCE = ("qwen2_vl",)
"""Of those with images, the ones that answer in ``1EPD`` in every run; the others do in the slow suite."""
SLOW_ANSWERS = ("qwen3_5_moe", "glm4v_moe", "kimi_k25", "deepseek_ocr2", "idefics3", "llava+pixtral")
"""Answers are compared in the slow suite only: the tower is that of another model, and a mixture one of
``BACKBONES``. DeepSeek-OCR-2 takes images of at least 4,096 patches."""
SAME_VIDEOS = [name for name in SAME_MEDIA if "video" in FAMILIES[name].modalities]
"""Answers about videos are compared, in the slow suite."""
PLAIN = [name for name in TINY if not name.startswith("qwen3_5")]
"""Families all of whose layers have attention without a gate."""
TEXT_ALONE = [name for name in TINY if not FAMILIES[name].takes_media]

LAYOUTS = [(name, layout) for name in TINY for layout in ("published", "saved")] + [("qwen3_moe", "stacked")]
"""Tiny checkpoints whose logits are compared: family and layout of its keys."""

PATCHES = ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_5", "qwen3_omni_moe"]
"""Patches of images are compared with the Pillow processors'."""

VIDEO_CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
"""What transformers' video processors made of seeded videos."""

VIDEO_ANSWERS = ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_5", "qwen3_omni_moe", "glm4v"]
"""Answers about videos are compared."""

FRAME_TILES = ["internvl", "llava_onevision", "smolvlm", "minicpmv4_6"]
"""The same of families whose frames are tiles, or are cut into slices."""

FRAME_PARTS = ["gemma4+gemma4_vision"]
"""The same of families that encode each frame by itself, at any size."""

HEARD_VIDEOS = ["qwen2_5_omni", "qwen3_omni_moe"]
"""Families whose videos are heard."""

ROPE_INDEX = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VL"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "Qwen3VLMoe"),
    "qwen3_5": ("qwen3_5", "Qwen3_5"),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5Moe"),
    "qwen2_5_omni": ("qwen2_5_omni", "Qwen2_5OmniThinker"),
    "qwen3_omni_moe": ("qwen3_omni_moe", "Qwen3OmniMoeThinker"),
    "glm4v": ("glm4v", "Glm4v"),
    "glm4v_moe": ("glm4v_moe", "Glm4vMoe"),
}
"""Positions are compared with ``get_rope_index`` of these: transformers' folder and the prefix of its classes."""

TWO_RANKS = ["qwen2", "qwen3_moe"]
"""Answers of two tensor-parallel ranks are compared."""

SLIDING_WINDOWS = ["qwen2", "qwen3_moe", "qwen2_vl"]
"""Answers with sliding windows are compared."""
