"""Prompts with families' own placeholders, and what their templates have around them, from published files and
descriptions of them. Elsewhere most tests use one made-up template like Qwen's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.image_cases import picture, png
from tests.support.minicpm import make_minicpm
from tests.support.published_files import ORIGINALS
from tests.support.sounds import sound, tone
from tests.support.tiny import HEARING, OWN_TOWERS, SHARED, TINY, Tiny, write_settings
from tests.support.video_cases import listed, user
from triptych.models.registry import FAMILIES
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder

CHAT = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
TAGS = ("[INST]", "[/INST]")
QUESTION = ("USER: ", " ASSISTANT:")
IMAGES = [png(picture(60, 40, 1300 + number)) for number in range(2)]
VIDEO, AUDIO = listed([0, 1, 2, 3], 1.0), sound("wav", tone(1.0, 16_000))
LOOKALIKES = (
    *("<image>", "<video>", "<start_of_image>", "<image_soft_token>", "<|image_pad|>", "<|image|>", "<|media_pad|>"),
    *("<IMG_CONTEXT>", "[IMG]", "<|image_1|>", "<|AUDIO|>", "<|patch|>", "<|begin_of_image|>"),
)
"""Placeholders of some family. What isn't a family's own is a user's text for it."""


@dataclass(frozen=True)
class Own:
    """What a family writes for its items."""

    image: str = ""
    """What an image of 60 by 40 pixels becomes, with one placeholder for each run of rows."""
    video: str = ""
    """The same of a video of four frames, one a second."""
    audio: str = ""
    template: Mapping[str, str] | None = None
    """What the template has for an item, by modality, if that is something else."""
    around: tuple[str, str] = CHAT
    """Before and after the user's content."""
    names: Mapping[str, str] | None = None
    """Tokens of the tiny checkpoint that have other names here."""
    more: tuple[str, ...] = ()
    """Further tokens."""
    media_first: bool = False
    """Whether the template has all images first, then all videos, and then the texts."""
    lines: bool = False
    """Whether the template takes texts alone, in which each part is a line."""
    own_template: bool = False
    """Whether the template is the family's, because the published files have none."""
    config: Callable[[Mapping[str, int]], dict[str, Any]] = lambda _: {}
    """Settings, given the tokens' ids."""

    def of(self, modality: str) -> str:
        """What the template has for an item."""
        own: str = getattr(self, modality)
        return own if self.template is None else self.template.get(modality, own)


def glm_markers(ids: Mapping[str, int]) -> dict[str, int]:
    return {
        f"{kind}_{part}_token_id": ids[f"<|{word}_of_{kind}|>"]
        for kind in ("image", "video")
        for part, word in (("start", "begin"), ("end", "end"))
    }


def glm(time: str) -> Own:
    frame = "<|begin_of_image|><|image|><|end_of_image|>"
    return Own(
        image=frame,
        video="<|begin_of_video|>" + "".join(frame + time.format(second) for second in (0, 2)) + "<|end_of_video|>",
        template={"video": "<|begin_of_video|><|video|><|end_of_video|>"},
        around=("[gMASK]<sop><|user|>\n", "<|assistant|>\n"),
        names={"<|image_pad|>": "<|image|>", "<|video_pad|>": "<|video|>"},
        more=tuple(f"<|{word}_of_{kind}|>" for kind in ("image", "video") for word in ("begin", "end")),
        config=glm_markers,
    )


def idefics3(tiles: str, **video: Any) -> Own:
    end = "<end_of_utterance>\nAssistant:"
    return Own(
        image=f"{tiles}\n<fake_token_around_image><global-img><image><fake_token_around_image>",
        template={"image": "<image>", "video": "<video>"},
        around=("<|im_start|>User:", end),
        names={"<|image_pad|>": "<image>"},
        **video,
    )


TILES = "".join(
    "".join(f"<fake_token_around_image><row_{row}_col_{column}><image>" for column in (1, 2, 3)) + "\n"
    for row in (1, 2)
)
SMOL_FRAMES = "".join(
    f"\nFrame from 00:0{second}:<fake_token_around_image><global-img><image><fake_token_around_image>"
    for second in range(4)
)
SMOL_VIDEO = f"You are provided the following series of four frames from a 0:00:04 [H:MM:SS] video.\n{SMOL_FRAMES}\n\n"
LLAVA = Own(image="<image>\n", around=QUESTION, names={"<|image_pad|>": "<image>"}, media_first=True)
PIXTRAL = Own(template={"image": "[IMG]"}, around=TAGS, names={"<|image_pad|>": "[IMG]"})
INTERNVL_FRAMES = "\n".join(f"Frame{number}: <img><IMG_CONTEXT></img>" for number in range(1, 5)) + "\n"
OMNI = {f"<|{kind}_pad|>": f"<|{kind.upper()}|>" for kind in ("image", "video", "audio")}
OMNI |= {f"<|vision_{part}|>": f"<|vision_{new}|>" for part, new in (("start", "bos"), ("end", "eos"))}
OMNI |= {f"<|audio_{part}|>": f"<|audio_{new}|>" for part, new in (("start", "bos"), ("end", "eos"))}
HEARD = "<|audio_bos|><|AUDIO|><|audio_eos|>"
GEMMA = "00:0{} <|image><|video|><image|>"

OWN = {
    "qwen2_vl": Own("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"),
    "qwen2_5_omni": Own(
        image="<|vision_bos|><|IMAGE|><|vision_eos|>",
        video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        audio=HEARD,
        names=OMNI,
    ),
    "qwen2_audio": Own(audio=HEARD, names=OMNI),
    "glm4v": glm("{}"),
    "glm4v_moe": glm("{}"),
    "glm46v": glm("{}.0 seconds"),
    "llava": LLAVA,
    "llava_next": replace(LLAVA, around=TAGS),
    "llava_onevision": replace(
        LLAVA, video="<video>\n", around=CHAT, names={"<|image_pad|>": "<image>", "<|video_pad|>": "<video>"}
    ),
    "llava+pixtral": replace(PIXTRAL, image="[IMG][IMG_BREAK]" * 4 + "[IMG][IMG_END]"),
    "mistral3": replace(PIXTRAL, image="[IMG][IMG_BREAK]" * 4 + "[IMG][IMG_END]"),
    "llama4": Own(
        image="<|image_start|><|patch|><|tile_x_separator|><|patch|><|tile_y_separator|><|image|><|patch|><|image_end|>",
        template={"image": "<|image|>"},
        around=("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
        names={"<|image_pad|>": "<|patch|>"},
    ),
    "gemma3": Own(
        image="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        template={"image": "<start_of_image>"},
        around=("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    ),
    "gemma4+gemma4_vision": Own(
        image="<|image><|image|><image|>",
        video=" ".join(GEMMA.format(second) for second in range(4)),
        audio="<|audio><|audio|><audio|>",
        template={"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"},
        around=("<|turn>user\n", "<turn|>\n<|turn>model\n"),
        names={f"<|{kind}_pad|>": f"<|{kind}|>" for kind in ("image", "video", "audio")},
    ),
    "kimi_vl": Own(
        image="<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        around=("<|im_user|>user<|im_middle|>", "<|im_end|><|im_assistant|>assistant<|im_middle|>"),
        names={"<|image_pad|>": "<|media_pad|>"},
    ),
    "kimi_k25": Own(
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        video="00:00:00.000<|media_begin|>video<|media_content|><|media_pad|><|media_end|>",
        template={"video": "<|kimi_k25_video_placeholder|>"},
        around=("<|im_user|>user<|im_middle|>", "<|im_end|><|im_assistant|>assistant<|im_middle|>"),
        names={"<|image_pad|>": "<|media_pad|>"},
    ),
    "deepseek_vl_v2": Own(image="<image>\n", around=("", ""), own_template=True),
    "deepseek_ocr2": Own(image="<image>\n", around=("", ""), names={"<|image_pad|>": "<image>"}, own_template=True),
    "idefics3": idefics3(TILES),
    "smolvlm": idefics3(TILES, video=SMOL_VIDEO),
    "internvl": Own(
        image="<img><IMG_CONTEXT></img>\n",
        video=INTERNVL_FRAMES,
        template={"image": "<IMG_CONTEXT>\n", "video": "<video>\n"},
        names={"<|image_pad|>": "<IMG_CONTEXT>"},
        more=("<img>", "</img>"),
    ),
    "internvl_chat": Own(
        image="<img><IMG_CONTEXT></img>\n",
        video=INTERNVL_FRAMES,
        template={"image": "<image>\n", "video": "<video>\n"},
    ),
    "phi4mm": Own(
        image="<|endoftext10|>", audio="<|endoftext11|>", around=("<|user|>", "<|im_end|><|assistant|>"), lines=True
    ),
    "minicpmv": Own(
        image="<image_id>{}</image_id><image><unk></image><slice><unk></slice><slice><unk></slice>",
        lines=True,
        own_template=True,
    ),
}
LEFT_OUT = ("qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe", "minicpmv4_6", "cogvlm2")
"""Qwen's are spelled as in the template of most tests. What MiniCPM-V 4.6 and CogVLM2 write is compared in
``tests/models/test_minicpm.py`` and ``tests/models/test_cogvlm2.py``."""


def folder_of(family: str, own: Own, folder: Path) -> Path:
    """Writes what a prompt builder reads."""
    if family == "minicpmv":
        return make_minicpm(folder, 2.6)
    if family in ORIGINALS:
        ORIGINALS[family](folder)
    else:
        tiny = SHARED[family][0] if family in SHARED else (TINY | OWN_TOWERS | HEARING)[family]
        write_settings(folder, renamed(tiny, own))
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors")  # items' keys have the weights' digest
    if own.own_template:
        (folder / "chat_template.jinja").unlink()
    elif not own.lines:
        (folder / "chat_template.jinja").write_text(template_of(own))
    return folder


def renamed(tiny: Tiny, own: Own) -> Tiny:
    ids = {(own.names or {}).get(name, name): number for name, number in tiny.ids.items()}
    first = max(ids.values()) + 1
    ids |= {name: first + number for number, name in enumerate(own.more)}
    return replace(tiny, ids=ids, config=tiny.config | own.config(ids), image_text="", video_text="")


def template_of(own: Own) -> str:
    kinds = [kind for kind in ("image", "video", "audio") if getattr(own, kind)]
    shown = {kind: "{{- " + json.dumps(own.of(kind)) + " -}}" for kind in kinds}
    shown["text"] = "{{- part.text -}}"
    parts = [f'{{%- if part.type == "{kind}" -%}}{text}{{%- endif -%}}' for kind, text in shown.items()]
    loops = parts if own.media_first else ["".join(parts)]
    content = "".join(f"{{%- for part in message.content -%}}{one}{{%- endfor -%}}" for one in loops)
    before, after = ("{{- " + json.dumps(text) + " -}}" for text in own.around)
    return f"{{%- for message in messages -%}}{before}{content}{after}{{%- endfor -%}}"


def shown(builder: PromptBuilder, prompt: PlannedPrompt) -> str:
    """A prompt's text, with one placeholder for each run of rows."""
    tokens, copied = list[int](), 0
    for span in sorted((span for item in prompt.items for span in item.placement.spans), key=lambda one: one.start):
        assert len(set(prompt.tokens[span.start : span.end])) == 1
        tokens += prompt.tokens[copied : span.start + 1]
        copied = span.end
    return builder.tokenizer.decode(tokens + prompt.tokens[copied:], skip_special_tokens=False)


@pytest.mark.parametrize("family", OWN)
def test_items_in_a_familys_own_spelling(tmp_path: Path, family: str) -> None:
    """Each is where the template has it, whatever is said around it; what only looks like a placeholder is text."""
    own = OWN[family]
    builder = PromptBuilder(folder_of(family, own, tmp_path / "model"))
    media = {"image": IMAGES, "video": [VIDEO], "audio": [AUDIO]}
    mine = "".join((*own.around, *(getattr(own, kind) + own.of(kind) for kind in media)))
    said = " ".join(text for text in LOOKALIKES if text not in mine)
    parts: list[str | dict[str, Any]] = ["Look: "]
    for kind, files in media.items():
        if kind in FAMILIES[family].modalities and getattr(own, kind):
            for data in files:
                parts += [{"type": kind, "data": data}, f" {said} or "]
    prompt = builder.build(user(*reversed(parts)))
    order = list(reversed(parts))
    if own.media_first:
        order.sort(key=lambda part: ("image", "video", "text").index("text" if isinstance(part, str) else part["type"]))
    assert [item.data for item in prompt.items] == [part["data"] for part in order if not isinstance(part, str)]
    assert all(sum(span.length for span in item.placement.spans) == item.plan.rows for item in prompt.items)
    texts, number = list[str](), 0
    for part in order:
        texts.append(part if isinstance(part, str) else getattr(own, part["type"]).replace("{}", str(number)))
        number += not isinstance(part, str)
    before, after = own.around
    assert shown(builder, prompt) == before + ("\n" if own.lines else "").join(texts) + after


def test_each_planner_is_tried() -> None:
    planners = {name: family.planner for name, family in FAMILIES.items() if family.takes_media}
    own, left_out = ({planners[name] for name in names} for names in (OWN, LEFT_OUT))
    assert own.isdisjoint(left_out)
    assert own | left_out == set(planners.values())


def test_items_keep_their_places_in_the_request(tmp_path: Path) -> None:
    """Also where the template has another order: plans have the request's."""
    builder = PromptBuilder(folder_of("llava_onevision", OWN["llava_onevision"], tmp_path / "model"))
    prompt = builder.build(user({"type": "video", "data": VIDEO}, "Look:", {"type": "image", "data": IMAGES[0]}))
    assert [(item.number, item.plan.modality) for item in prompt.items] == [(1, "image"), (0, "video")]
