"""No text of a user may have what surrounds media in any family's prompts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import DENSE
from tests.support.minicpm import make_minicpm
from tests.support.prompt_parts import user
from tests.support.published_files import ORIGINALS
from tests.support.random_checkpoint import write_settings as write_qwen3_vl
from tests.support.random_checkpoint import write_tokenizer
from tests.support.tiny import HEARING, OWN_TOWERS, TINY, write_settings
from triptych.errors import InvalidRequest
from triptych.models.base import MediaToken
from triptych.models.registry import FAMILIES
from triptych.prompt.prompt import PromptBuilder
from triptych.types import AudioHeader, ImageHeader, ItemContext, MediaHeader, VideoHeader

WITH_MEDIA = [name for name, family in FAMILIES.items() if family.takes_media]
HEADERS: dict[str, MediaHeader] = {
    "image": ImageHeader("PNG", 300, 200),
    "video": VideoHeader("MP4", 90, 60, 8, 2.0),
    "audio": AudioHeader("WAV", 16_000, 1, 48_000),
}
VISION = ("<|vision_start|>", "<|vision_end|>")
IN_TEMPLATES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), VISION),
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), VISION),
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), (*VISION, "<|audio_start|>", "<|audio_eos|>")),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), (*VISION, "<|audio_start|>", "<|audio_end|>")),
    "qwen2_audio": ("<|audio_bos|>", "<|audio_eos|>"),
    "kimi_vl": ("<|media_start|>", "<|media_content|>", "<|media_end|>"),
    "kimi_k25": ("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
}
"""Markers that templates have, not planners, by the names in the tiny checkpoints' tokenizers and in published ones."""
MARKER = re.compile(r"<[^<>\s]+>|\[\w+\]")


def folder_of(name: str, folder: Path) -> Path:
    """Writes what a prompt builder reads."""
    if name in ORIGINALS:
        return ORIGINALS[name](folder)
    if name == "minicpmv":
        return make_minicpm(folder, 2.6)
    if name.startswith("qwen3_vl"):
        sizes = replace(DENSE, experts=4) if name.endswith("moe") else DENSE
        write_qwen3_vl(folder, sizes)
        write_tokenizer(folder, sizes.vocabulary)
        return folder
    stored = {"glm46v": "glm4v"}.get(name, name.removesuffix("_thinker"))
    tiny = (TINY | OWN_TOWERS | HEARING)[stored]
    if name.endswith("_thinker"):
        tiny = replace(tiny, config=tiny.config["thinker_config"] | {"model_type": name})
    write_settings(folder, tiny)
    return folder


@pytest.mark.parametrize("name", WITH_MEDIA)
def test_markers_are_refused(tmp_path: Path, name: str) -> None:
    builder = PromptBuilder(folder_of(name, tmp_path))
    planner = builder.planner

    def spelling(token: MediaToken) -> str:
        return token if isinstance(token, str) else str(builder.tokenizer.token_of(token))

    markers = set(IN_TEMPLATES.get(name, ()))
    for modality in set(FAMILIES[name].modalities) - {"text"}:
        plan = planner.plan(HEADERS[modality], ItemContext())
        markers.update(MARKER.findall(planner.label(plan, ItemContext()) + planner.placeholder(plan, spelling)))
    assert markers
    for marker in sorted(markers):
        text = {"type": "text", "text": f"This {marker} is no image."}
        halves = [{"type": "text", "text": half} for half in (marker[:4], marker[4:])]
        for content in ([text], halves):
            with pytest.raises(InvalidRequest, match=f"may not contain {re.escape(marker)}"):
                builder.build([user(*content)])
        for prompt in (marker, [token] if (token := builder.tokenizer.id_of(marker)) is not None else marker):
            with pytest.raises(InvalidRequest, match="may not contain"):
                builder.build_text(prompt)
