"""Writes docs/models.md and docs/models: which families there are, from the registry, and what is checked of each, from
the tests themselves. A test fails when a page is out of date.

    .venv/bin/python -m scripts.models_doc
"""

from collections.abc import Mapping
from pathlib import Path

from scripts.family_pages import FOLDER, PAGES, pages, spelled
from scripts.generated import table
from scripts.model_checks import Check
from tests.support import families
from tests.support.backbones import BACKBONES, MORE_BACKBONES
from tests.support.tiny import HEARING, OMNI, OWN_TOWERS, SHARED, TINY, Tiny
from triptych.models.registry import FAMILIES
from triptych.models.shared.planner import MAX_ASPECT_RATIO, MAX_SOURCE_PIXELS
from triptych.models.shared.settings import text_section

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
QWEN3_VL = {"qwen3_vl", "qwen3_vl_moe"}
"""Families that tests/parity/conftest.py and tests/layers/test_parity.py run, in more topologies than the others."""

RECORDED_IMAGES = {"llama4", "kimi_k25"}
"""Families whose image processors need torchvision: images are compared with what these made."""
WRITTEN_IMAGES = {"cogvlm2", "kimi_vl", "deepseek_vl_v2", "phi4_multimodal"}
"""Families whose images are compared with those of implementations in the tests."""
PILLOW_IMAGES = {*families.PATCHES, *QWEN3_VL, *OWN_TOWERS, "glm4v"} - RECORDED_IMAGES - WRITTEN_IMAGES
"""Families whose images are compared with those of Pillow processors in Transformers."""
ANSWERED_FAMILIES = {*TINY, "qwen3_vl", *OWN_TOWERS, *HEARING}.difference(families.SLOW_ANSWERS)
"""Families whose answers are compared in every run."""
FIRST_LOGITS = {*families.REPRESENTATIVE, *families.TEXT_ALONE, *HEARING, "qwen3_vl"}
"""Families whose first logits are compared in every run, after a transfer of embeddings if they take media."""
ANSWERED = {BACKBONES[name].config["model_type"] for name in families.ANSWERED_BACKBONES}


def types_of(tinies: Mapping[str, Tiny], setting: str) -> set[str]:
    """Return the model types that have a setting."""
    return {tiny.config["model_type"] for tiny in tinies.values() if text_section(tiny.config).get(setting)}


WINDOWED = types_of(BACKBONES, "sliding_window")
MORE_TYPES = {tiny.config["model_type"] for tiny in MORE_BACKBONES.values()}
TWO_RANKS = {
    tiny.config["model_type"]
    for tiny in MORE_BACKBONES.values()
    if text_section(tiny.config)["num_key_value_heads"] % 2 == 0
}
CHECKS = (
    Check("plans and patches of images", PILLOW_IMAGES, ("plan", "pixels")),
    Check("plans and patches of images whose processors need torchvision", RECORDED_IMAGES, ("plan", "pixels")),
    Check("plans and patches of images, written out in the tests", WRITTEN_IMAGES, ("plan", "pixels")),
    Check("plans of clips of Qwen2-Audio", {"qwen2_audio"}, ("plan",)),
    Check("media of model types that share their code", families.SAME_MEDIA, ("plan", "pixels", "embeddings")),
    Check("embeddings", {*families.ANSWERED_IMAGES, *QWEN3_VL, *HEARING}, ("embeddings",)),
    Check(
        "logits",
        {*(name for name, _ in families.LAYOUTS), *QWEN3_VL, *families.BACKBONE_TYPES, "qwen3_omni_moe_thinker"},
        ("logits",),
    ),
    Check("logits of models that Transformers lacks", {"internlm2"}, ("logits",)),
    Check("answers", ANSWERED_FAMILIES, ("answers", "split", "split P/D")),
    Check("answers of Qwen3-VL's mixture", {"qwen3_vl_moe"}, ("answers", "split", "split P/D")),
    Check("first logits", FIRST_LOGITS, ("logits",)),
    Check(
        "first logits of other models", ANSWERED_FAMILIES - FIRST_LOGITS | {"qwen3_vl_moe"}, ("logits",), in_ci=False
    ),
    Check(
        "models of images and videos that Transformers lacks",
        {"minicpmv"},
        ("plan", "pixels", "embeddings", "logits", "answers", "video", "split", "split P/D"),
    ),
    Check("videos of Kimi K2.5", {"kimi_k25"}, ("video",)),
    Check("answers of model types that share their code", SHARED, ("logits", "answers", "split", "split P/D")),
    Check("answers from original files", {"internvl_chat"}, ("logits", "answers", "split", "split P/D")),
    Check("answers of requests with LoRAs", {"phi4mm", "phi4_multimodal"}, ("logits", "answers", "split", "split P/D")),
    Check("answers of other models", families.SLOW_ANSWERS, ("logits", "answers", "split", "split P/D"), in_ci=False),
    Check("recovery", {*families.REPRESENTATIVE, "qwen3_vl", "minicpmv"}, ("recovery",)),
    Check(
        "recovery of other models",
        {*families.ANSWERED_IMAGES, *SHARED, "qwen3_vl_moe", "internvl_chat", "phi4mm"}.difference(
            families.REPRESENTATIVE
        ),
        ("recovery",),
        in_ci=False,
    ),
    Check(
        "recovery of videos and audio",
        {
            *(*families.VIDEO_ANSWERS, *families.FRAME_TILES, *families.FRAME_PARTS, *HEARING, *OMNI),
            *("qwen3_vl", "kimi_k25", "minicpmv", "phi4mm"),
        },
        ("recovery",),
        in_ci=False,
    ),
    Check(
        "answers about videos",
        {*families.VIDEO_ANSWERS, *families.FRAME_TILES, *families.FRAME_PARTS, "qwen3_vl"},
        ("video",),
    ),
    Check("answers about videos of model types that share their code", families.SAME_VIDEOS, ("video",), in_ci=False),
    Check(
        "audio",
        {
            *(name for name in TINY | HEARING if "audio" in FAMILIES[name].modalities),
            *("phi4mm", "phi4_multimodal", "gemma4+gemma4_vision"),
        },
        ("audio",),
    ),
    Check("audio of thinkers by themselves", {f"{name}_thinker" for name in OMNI}, ("audio", "recovery"), in_ci=False),
    Check("answers to text", ANSWERED, ("answers", "split P/D")),
    Check("answers to text in more ways", MORE_TYPES, ("answers", "split P/D"), in_ci=False),
    Check(
        "answers to text of models that Transformers lacks",
        {"internlm2", "kimi_k2"},
        ("answers", "split P/D"),
        in_ci=False,
    ),
    Check("tensor parallelism", {*families.TWO_RANKS, *QWEN3_VL}, ("two ranks",)),
    Check("tensor parallelism of other models", TWO_RANKS, ("two ranks",), in_ci=False),
    Check("sliding windows", {*families.SLIDING_WINDOWS, *ANSWERED & WINDOWED}, ("windows",)),
    Check("attention in chunks", {BACKBONES["llama4"].config["model_type"]}, ("windows",)),
    Check(
        "sliding windows of other models",
        types_of(MORE_BACKBONES, "sliding_window") - (ANSWERED & WINDOWED),
        ("windows",),
        in_ci=False,
    ),
)


MEDIA_COLUMNS = (
    "plan",
    "pixels",
    "embeddings",
    "logits",
    "answers",
    "video",
    "audio",
    "split",
    "split P/D",
    "recovery",
)
TEXT_COLUMNS = ("logits", "answers", "split P/D", "two ranks", "windows")
INPUTS = {"video": "video", "audio": "audio"}
"""Columns that stand for an input, which some families don't take."""
MEANINGS = {
    "plan, pixels": "numbers of embeddings, placeholders and patches equal the image processor's bit by bit, except "
    "16-bit grey, which Pillow's processors clip",
    "embeddings": "differences from the reference are at most 1e-5 of the largest value",
    "logits": "differences are at most 1e-4, for whole prompts and in chunks",
    "answers": "32 greedy tokens equal the reference's, in one instance or with each stage on its own",
    "video, audio": "the same for answers about videos and clips",
    "split, split P/D": "the same when an instance of its own encodes, and when prefill and decode are apart",
    "recovery": "the same answer when an encode instance is lost in the middle of an item",
    "two ranks": "the same answers with `--tensor-parallel-size 2`",
    "windows": "the same answers with sliding windows or chunks of attention",
}
"""What the kinds of checks compare."""


def page() -> str:
    """The index's Markdown."""
    lines = [
        "# Models",
        "",
        "This page is generated by `scripts/models_doc.py` from the registry and the tests.",
        "`triptych doctor MODEL` says whether a checkpoint is served, and whether it fits into memory.",
        "",
        "## Models with media",
        "",
        _families_with_media(),
        "",
        "Each page has a family's options, and the embeddings that images become with the settings of one checkpoint; "
        "each embedding takes the place of one token.",
        f"An image has at most {MAX_SOURCE_PIXELS // 10**6} million pixels, and its sides differ at most "
        f"{MAX_ASPECT_RATIO}-fold; [Media](media.md) has the formats and other limits.",
        "",
        "## Text models",
        "",
        "Text models run without an encode instance: `1PD`, `1P1D` and so on.",
        "",
        _text_families(),
        "",
        "gpt-oss is published with experts in MXFP4, which are dequantized when they are loaded.",
        "Quantized checkpoints of any family are served in [these formats](quantization.md#quantized-checkpoints).",
        "",
        "## RoPE scaling",
        "",
        "All kinds in Transformers are served: `linear`, `llama3`, `yarn`, `proportional`, `dynamic` and `longrope`; "
        "the last two not with M-RoPE.",
        "`longrope` and `dynamic` choose frequencies by the length of the prompt and `max_tokens` together, and a "
        "request keeps them.",
        "Above `original_max_position_embeddings`, `longrope` uses its second set.",
        "Above `max_position_embeddings`, `dynamic` has a base for each length, up to `factor` times that context.",
        "A chat without `max_tokens` ends at the original length if its prompt is shorter.",
        "If the prompt is longer, `dynamic` uses the base for the service's whole context, so set `max_tokens`.",
        "",
        "## What is checked",
        "",
        "Tests compare each `model_type` with Transformers in float32.",
        "CogVLM2, InternLM2, Kimi-VL, MiniCPM-V 2.6 and 4.5, and the processors of DeepSeek-OCR and Phi-4-multimodal "
        "have no class in Transformers: tests contain a reference implementation of each.",
        "Checkpoints are tiny and random, with every special feature of a family switched on.",
        "",
        "Two models were compared with released weights: SmolLM2-135M-Instruct (`llama`) and Gemma-3-270M "
        "(`gemma3_text`), 64 greedy tokens after each of 50 prompts, in `1PD` and `1P1D`.",
        "All tokens were equal in float32 (`tests/parity/test_released_weights.py`, run by hand).",
        "No released weights of a model with media have been loaded.",
        "",
        table(["check", "what is compared"], [[name, meaning] for name, meaning in MEANINGS.items()]),
        "",
        "All checks run for all model types and their inputs, in every run of the tests, except these:",
        "",
        _exceptions(),
    ]
    return "\n".join(lines) + "\n"


def _families_with_media() -> str:
    rows = []
    for name, page in PAGES.items():
        families = [FAMILIES[model_type] for model_type in page.model_types]
        inputs = {modality: None for family in families for modality in family.modalities}
        types = ", ".join(map(spelled, page.model_types))
        rows.append([f"[{page.title}](models/{name}.md)", types, ", ".join(inputs)])
    return table(["models", "`model_type`", "input"], rows)


def _text_families() -> str:
    rows = [[family.name, f"`{name}`"] for name, family in FAMILIES.items() if not family.takes_media]
    return table(["models", "`model_type`"], rows)


def _exceptions() -> str:
    """A row for each model type without some check in every run. Raises ValueError for a check of a model type that
    isn't in the registry."""
    for check in CHECKS:
        if unknown := set(check.families) - set(FAMILIES):
            raise ValueError(f"{check.what}: {unknown} are no families")
    types: dict[tuple[str, str], list[str]] = {}
    for name, family in FAMILIES.items():
        kinds: tuple[str, ...] = MEDIA_COLUMNS if family.takes_media else TEXT_COLUMNS
        columns = [column for column in kinds if INPUTS.get(column, "text") in family.modalities]
        found = {column: _found(name, column) for column in columns}
        slow = ", ".join(column for column in columns if found[column] == {False})
        missing = ", ".join(column for column in columns if not found[column])
        if slow or missing:
            types.setdefault((slow, missing), []).append(spelled(name))
    rows = [[", ".join(names), slow, missing] for (slow, missing), names in types.items()]
    return table(["`model_type`", "in the slow suite alone (`scripts/test --slow`)", "not checked"], rows)


def _found(name: str, column: str) -> set[bool]:
    """Whether checks of the column are in every run or in the slow suite alone."""
    return {check.in_ci for check in CHECKS if column in check.columns and name in check.families}


def main() -> None:
    """Write the index and the families' pages."""
    PAGE.write_text(page())
    FOLDER.mkdir(exist_ok=True)
    for name, markdown in pages().items():
        (FOLDER / name).write_text(markdown)


if __name__ == "__main__":
    main()
