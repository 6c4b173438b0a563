"""Writes docs/models.md: which families there are, from the registry, and what is checked of each, from the tests
themselves. A test fails when the page is out of date.

    .venv/bin/python -m scripts.models_doc
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tests.models.golden.make_videos import family_of
from tests.support import families
from tests.support.backbones import BACKBONES
from tests.support.tiny import OWN_TOWERS, TINY
from triptych.models.registry import FAMILIES, Family, resolve
from triptych.models.shared.settings import text_section

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
QWEN3_VL = {"qwen3_vl", "qwen3_vl_moe"}
"""Families that tests/parity/conftest.py and tests/layers/test_parity.py run, in more topologies than the others."""

ANSWERED = {BACKBONES[name].config["model_type"] for name in families.ANSWERED_BACKBONES}
WINDOWED = {tiny.config["model_type"] for tiny in BACKBONES.values() if text_section(tiny.config).get("sliding_window")}
SLOW = "; only in the slow suite (`scripts/test --slow`)"


@dataclass(frozen=True)
class Check:
    """One row of the table of checks."""

    what: str
    """What is compared with the reference."""
    how: str
    """How closely, and on which cases."""
    file: str
    """Files or folders of the tests, separated by commas."""
    families: Collection[str]
    """Model types that the tests cover."""


CHECKS = (
    Check(
        "plans and patches of images",
        "equal bit by bit to the Pillow processor's, except 16-bit grey, which that one clips",
        "tests/models",
        {*families.PATCHES, *QWEN3_VL, *OWN_TOWERS},
    ),
    Check(
        "plans, placeholders and patches of videos",
        "equal bit by bit to those of Transformers' processors (recorded with torchvision)",
        "tests/models/test_videos.py, tests/models/test_frame_tiles.py",
        {*(family_of(case) for case in families.VIDEO_CASES), *families.FRAME_TILES},
    ),
    Check(
        "positions",
        "equal to `get_rope_index` for 1,000 random mixes of text and media (50 in CI)",
        "tests/models/test_mrope.py",
        families.ROPE_INDEX,
    ),
    Check(
        "embeddings",
        "within 5e-5 (LLaVA: 5e-4, at values up to 18)",
        "tests/layers, tests/models",
        {*families.ANSWERED_IMAGES, *QWEN3_VL},
    ),
    Check(
        "logits",
        "within 1e-4 for whole prompts (of the embeddings that Transformers computes), from published tensor names "
        "and from those of `save_pretrained`",
        "tests/layers",
        {*(name for name, _ in families.LAYOUTS), *QWEN3_VL, *families.BACKBONE_TYPES, "qwen3_omni_moe_thinker"},
    ),
    Check(
        "logits of models that Transformers lacks",
        "within 1e-4 of their formulas written out in the test, for whole prompts and in chunks of 7",
        "tests/layers/test_internlm2.py",
        {"internlm2"},
    ),
    Check(
        "answers",
        "32 greedy tokens equal: in one instance, with each stage on its own, in chunks of 7 and whole, and through a "
        "receive pool of one block; first logits within 1e-4",
        "tests/parity",
        {*TINY, *QWEN3_VL, *OWN_TOWERS}.difference(families.SLOW_ANSWERS),
    ),
    Check("answers of other models", f"the same{SLOW}", "tests/parity/test_families.py", families.SLOW_ANSWERS),
    Check(
        "answers about videos",
        "as above, from MP4, WebM, GIF and lists of frames",
        "tests/parity",
        {*families.VIDEO_ANSWERS, *families.FRAME_TILES, "qwen3_vl"},
    ),
    Check(
        "audio",
        "tokens equal, features within 1e-4, embeddings within 1e-5; answers as above, also beside images",
        "tests/models, tests/layers, tests/parity",
        {name for name, family in FAMILIES.items() if "audio" in family.modalities and name in TINY},
    ),
    Check(
        "videos with soundtracks",
        "token order, positions and answers equal to those with `use_audio_in_video`, from MP4, WebM and Matroska",
        "tests/models, tests/parity/test_heard_videos.py",
        {families.HEARD_VIDEOS},
    ),
    Check(
        "answers to text",
        "32 greedy tokens equal: in `1PD` in chunks of 64, and in `1P1D` in chunks of 7",
        "tests/parity/test_backbones.py",
        ANSWERED,
    ),
    Check(
        "answers to text in more ways",
        "the same in `1PD`, `1P1D` and `1P2D`, each in chunks of 1, 7 and 64, and through a receive pool of one block"
        + SLOW,
        "tests/parity/test_backbones.py",
        families.BACKBONE_TYPES,
    ),
    Check(
        "tensor parallelism",
        "the same answers from two ranks",
        "tests/parity",
        {*families.TWO_RANKS, *QWEN3_VL},
    ),
    Check(
        "tensor parallelism of other models",
        "as above" + SLOW,
        "tests/parity/test_backbones.py",
        {
            tiny.config["model_type"]
            for tiny in BACKBONES.values()
            if text_section(tiny.config)["num_key_value_heads"] % 2 == 0
        },
    ),
    Check(
        "sliding windows",
        "the same answers with windows switched on",
        "tests/parity",
        {*families.SLIDING_WINDOWS, *(ANSWERED & WINDOWED)},
    ),
    Check(
        "attention in chunks",
        "the same answers with short chunks, in `1PD` and `1P1D`; pages of finished ones are released and not sent",
        "tests/parity/test_windows.py",
        {BACKBONES["llama4"].config["model_type"]},
    ),
    Check("sliding windows of other models", "as above" + SLOW, "tests/parity/test_backbones.py", WINDOWED - ANSWERED),
)


def page() -> str:
    """The page's Markdown."""
    lines = [
        "# Models",
        "",
        "This page is generated by `scripts/models_doc.py` from the registry and the tests.",
        "",
        "| `model_type` | models | input | language model | encoder |",
        "| --- | --- | --- | --- | --- |",
        *(_family(name, family) for name, family in FAMILIES.items()),
        "",
        "Text models are served without an encode instance: `1PD`, `1P1D`, …",
        "All kinds of RoPE scaling in Transformers are served: `linear`, `llama3`, `yarn`, `proportional`, `dynamic` "
        "and `longrope`.",
        "`dynamic` is served up to `max_position_embeddings`, from which on it would change with every token.",
        "`longrope` has two sets of frequencies; a request has one of them from its first token to its last.",
        "It is the long one if the prompt and `max_tokens` together exceed `original_max_position_embeddings`.",
        "A chat without `max_tokens` ends at that length if its prompt is shorter.",
        "Quantized checkpoints are refused at the start, except for "
        "[4-bit weights](operating.md#quantized-checkpoints) of compressed-tensors (`pack-quantized`), on CPUs.",
        "gpt-oss is published in MXFP4 only, and DeepSeek-V3 and Kimi K2 in FP8, so copies in bf16 are needed.",
        "",
        "## What is checked, and how",
        "",
        "The reference is Transformers in float32.",
        "Checkpoints are tiny and random, with every special feature of a family switched on.",
        "Of released weights, SmolLM2-135M-Instruct (`llama`) and Gemma-3-270M (`gemma3_text`) have been compared: 64 "
        "greedy tokens after each of 50 prompts are equal in float32, in `1PD` and `1P1D` "
        "(`tests/parity/test_released_weights.py`, run by hand: `TRIPTYCH_SMOLLM2` and `TRIPTYCH_GEMMA3` name the "
        "weights).",
        "",
        "| | how | where | " + " | ".join(f"`{name}`" for name in FAMILIES) + " |",
        "| --- | --- | --- |" + " :-: |" * len(FAMILIES),
        *(_check(check) for check in CHECKS),
    ]
    return "\n".join(lines) + "\n"


def _family(name: str, family: Family) -> str:
    adapter = resolve(family.adapter)
    towers = adapter.describe_towers() if family.takes_media else "none"
    backbone = resolve(family.backbone).description if family.backbone else "that of `text_config`"
    modalities = ", ".join(family.modalities)
    return f"| `{name}` | {family.name} | {modalities} | {backbone} | {towers} |"


def _check(check: Check) -> str:
    if unknown := set(check.families) - set(FAMILIES):
        raise ValueError(f"{check.what}: {unknown} are no families")
    files = ", ".join(f"`{file}`" for file in check.file.split(", "))
    marks = " | ".join("✓" if name in check.families else "" for name in FAMILIES)
    return f"| {check.what} | {check.how} | {files} | {marks} |"


if __name__ == "__main__":
    PAGE.write_text(page())
