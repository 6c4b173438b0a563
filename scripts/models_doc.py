"""Writes docs/models.md and docs/models: which families there are, from the registry, and what is checked of each, from
the tests themselves. A test fails when a page is out of date.

    .venv/bin/python -m scripts.models_doc
"""

from collections.abc import Mapping
from pathlib import Path

from scripts.family_pages import FOLDER, PAGES, language_model, pages, spelled
from scripts.generated import table
from scripts.model_checks import Check
from tests.models.golden.make_videos import family_of
from tests.support import families
from tests.support.backbones import BACKBONES, MORE_BACKBONES
from tests.support.tiny import HEARING, OMNI, OWN_TOWERS, SHARED, TINY, Tiny
from triptych.models.registry import FAMILIES
from triptych.models.shared.settings import text_section

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
QWEN3_VL = {"qwen3_vl", "qwen3_vl_moe"}
"""Families that tests/parity/conftest.py and tests/layers/test_parity.py run, in more topologies than the others."""

RECORDED_IMAGES = {"llama4", "kimi_k25"}
"""Families whose image processors need torchvision: images are compared with what these made."""
WRITTEN_IMAGES = {"cogvlm2", "kimi_vl", "deepseek_vl_v2", "phi4_multimodal"}
"""Families whose images are compared with those of implementations in the tests."""
ANSWERED_FAMILIES = {*TINY, "qwen3_vl", *OWN_TOWERS, *HEARING}.difference(families.SLOW_ANSWERS)
"""Families whose answers are compared in every run."""
ONE_INSTANCE = {*families.ONE_INSTANCE, *families.TEXT_ALONE, *HEARING, *OMNI, "qwen3_vl"}
"""Families that answer in one instance in every run: those of text in `1PD`, OMNI's about audio."""
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
EDGE_TESTS = "tests/models/test_edge_media.py"
SLOW = "; only in the slow suite (`scripts/test --slow`)"


CHECKS = (
    Check(
        "plans and patches of images",
        "equal bit by bit to the Pillow processor's, except 16-bit grey, which that one clips",
        "tests/models",
        {*families.PATCHES, *QWEN3_VL, *OWN_TOWERS, "glm4v"} - RECORDED_IMAGES - WRITTEN_IMAGES,
        columns=("plan", "pixels"),
    ),
    Check(
        "plans and patches of images whose processors need torchvision",
        "patches equal bit by bit to those recorded with torchvision, plans to those of the processor's function or of "
        "an implementation in the tests that makes the recorded patches, too",
        "tests/models/test_kimi.py, tests/models/test_llama4.py",
        RECORDED_IMAGES,
        columns=("plan", "pixels"),
    ),
    Check(
        "plans and patches of images, written out in the tests",
        "equal bit by bit to those of an implementation in the tests, written from published files or descriptions",
        "tests/models/test_cogvlm2.py, tests/models/test_deepseek_ocr.py, tests/models/test_kimi.py, "
        "tests/models/test_phi4mm.py",
        WRITTEN_IMAGES,
        columns=("plan", "pixels"),
    ),
    Check(
        "plans of clips of Qwen2-Audio",
        "as many embeddings as the processor's formula says, of random lengths and sample rates, and as the processor "
        "counts, of four lengths",
        "tests/models/test_qwen2_audio.py",
        {"qwen2_audio"},
        columns=("plan",),
    ),
    Check(
        "media of model types that share their code",
        "plans, patches and embeddings equal bit by bit to those of the other type, of images, videos (but for "
        "GLM-4.6V) and audio",
        "tests/models/test_same_media.py",
        families.SAME_MEDIA,
        columns=("plan", "pixels", "rows"),
    ),
    Check(
        "plans, placeholders and patches of videos",
        "equal bit by bit to those of Transformers' processors (recorded with torchvision)",
        "tests/models/test_videos.py, tests/models/test_frame_tiles.py, tests/models/test_glm4v.py, "
        "tests/models/test_smolvlm_videos.py, tests/models/test_minicpm.py, tests/models/test_gemma4_videos.py",
        {
            *(family_of(case) for case in families.VIDEO_CASES),
            *(*families.FRAME_TILES, *families.FRAME_PARTS, "glm4v", "glm46v"),
        },
    ),
    Check(
        "thin images",
        "embeddings within 1e-4 of the largest value, of images whose sides differ 200-fold (Pixtral and Mistral 3: "
        "140-fold, Phi-4-multimodal: 40-fold); more than 200-fold is refused",
        EDGE_TESTS,
        families.EDGE_MEDIA,
    ),
    Check(
        "plans of huge images",
        "6000 by 5000 pixels become no more than the limits allow; more than 50 million pixels are refused",
        EDGE_TESTS,
        families.RELEASED_EDGES,
    ),
    Check(
        "patches of huge images",
        "the same values as of the processor, with the settings of a released checkpoint" + SLOW,
        EDGE_TESTS,
        families.RELEASED_EDGES,
        in_ci=False,
    ),
    Check(
        "`mm_processor_kwargs`",
        "each option changes a plan; the least and the largest values that the API takes are refused, or preprocessed "
        "as planned; options of other models are refused by name; `size` gives the processor's pixels; "
        "`detail: low` is never refused",
        EDGE_TESTS,
        families.EDGE_MEDIA,
    ),
    Check(
        "media that can't be used",
        "damaged or empty files, and inputs that the model lacks, are refused; images with a wrong size in their "
        "header are what Pillow reads; the next item is preprocessed as before",
        EDGE_TESTS,
        families.EDGE_MEDIA,
    ),
    Check(
        "bad requests",
        "a service refuses such files and options with a status from 400 to 499 and the field's name, and answers the "
        "next request as before" + SLOW,
        EDGE_TESTS,
        families.EDGE_MEDIA,
        in_ci=False,
    ),
    Check(
        "positions",
        "equal to `get_rope_index` for 1,000 random mixes of text and media (50 in CI)",
        "tests/models/test_mrope.py",
        families.ROPE_INDEX,
    ),
    Check(
        "embeddings",
        "differences of at most 1e-5 of the largest value; of Qwen, GLM and LLaVA-1.5, errors against float64 are at "
        "most 1.5 times Transformers'",
        "tests/layers, tests/models",
        {*families.ANSWERED_IMAGES, *QWEN3_VL, *HEARING},
        columns=("rows",),
    ),
    Check(
        "logits",
        "within 1e-4 for whole prompts (of the embeddings that Transformers computes), from published tensor names "
        "and from those of `save_pretrained`",
        "tests/layers",
        {*(name for name, _ in families.LAYOUTS), *QWEN3_VL, *families.BACKBONE_TYPES, "qwen3_omni_moe_thinker"},
        columns=("logits",),
    ),
    Check(
        "logits of models that Transformers lacks",
        "within 1e-4 of their formulas written out in the test, for whole prompts and in chunks of 7",
        "tests/layers/test_internlm2.py",
        {"internlm2"},
        columns=("logits",),
    ),
    Check(
        "answers",
        "32 greedy tokens equal: with each stage on its own, and in chunks of 7 through a receive pool of one block",
        "tests/parity",
        ANSWERED_FAMILIES,
        columns=("answers", "split", "split P/D"),
    ),
    Check(
        "answers of one instance",
        "the same tokens from `1EPD`, and from `1E1PD` with whole prompts; of text models from `1PD`, of Qwen's Omni "
        "about audio",
        "tests/parity",
        ONE_INSTANCE,
    ),
    Check(
        "answers of one instance of other models",
        "the same, of Qwen's Omni about images" + SLOW,
        "tests/parity/test_families.py",
        (ANSWERED_FAMILIES - ONE_INSTANCE).union(OMNI),
        in_ci=False,
    ),
    Check(
        "answers of Qwen3-VL's mixture",
        "the same tokens from two ranks, with each stage on its own; the rest only in the slow suite",
        "tests/parity/test_tensor_parallel.py",
        {"qwen3_vl_moe"},
        columns=("answers", "split", "split P/D"),
    ),
    Check(
        "first logits",
        "within 1e-4, from embeddings that an encode instance sent",
        "tests/parity",
        FIRST_LOGITS,
        columns=("logits",),
    ),
    Check(
        "first logits of other models",
        "the same" + SLOW,
        "tests/parity",
        ANSWERED_FAMILIES - FIRST_LOGITS | {"qwen3_vl_moe"},
        columns=("logits",),
        in_ci=False,
    ),
    Check(
        "models of images and videos that Transformers lacks",
        "plans, pixels, embeddings (within 1e-5 of the largest value), logits and answers equal to those of an "
        "implementation in the tests, "
        "in one instance, with each stage on its own, in chunks of 7 and through a receive pool of one block",
        "tests/models/test_minicpm_original.py, tests/models/test_minicpm_original_videos.py, "
        "tests/parity/test_minicpm.py",
        {"minicpmv"},
        columns=("plan", "pixels", "rows", "logits", "answers", "video", "split", "split P/D"),
    ),
    Check(
        "videos of Kimi K2.5",
        "frames, texts and patches equal bit by bit to those of Transformers' processor (recorded with torchvision), "
        "embeddings within 1e-5, logits within 1e-4 and answers equal, in one instance, with each stage on its own, "
        "and in chunks of 7",
        "tests/models/test_kimi_videos.py, tests/parity/test_kimi_videos.py",
        {"kimi_k25"},
        columns=("video",),
    ),
    Check(
        "answers of model types that share their code",
        "32 greedy tokens equal to Transformers' after two prompts with images, from `1E1PD` and `1E1P1D`, and first "
        "logits within 1e-4",
        "tests/parity/test_families.py",
        SHARED,
        columns=("logits", "answers", "split", "split P/D"),
    ),
    Check(
        "answers about thin and huge images",
        "32 greedy tokens equal with each stage on its own, whole and in chunks of 7" + SLOW,
        "tests/parity/test_edge_images.py",
        families.EDGE_ANSWERS,
        in_ci=False,
    ),
    Check(
        "answers from original files",
        "equal to those of Transformers' files, in one instance and with each stage on its own; over Qwen3, Qwen3-MoE, "
        "gpt-oss and InternLM2 (as a Llama that computes the same) from `1E1PD`, with first logits within 1e-4",
        "tests/parity/test_families.py",
        {"internvl_chat"},
        columns=("logits", "answers", "split", "split P/D"),
    ),
    Check(
        "answers of requests with LoRAs",
        "32 greedy tokens and first logits (within 1e-4) equal to those of models with the LoRA merged into the "
        "weights, in batches with requests without one, with each stage on its own, in chunks of 7, and when instances "
        "are lost",
        "tests/parity/test_loras.py",
        {"phi4mm", "phi4_multimodal"},
        columns=("logits", "answers", "split", "split P/D"),
    ),
    Check(
        "answers of other models",
        f"the same{SLOW}",
        "tests/parity/test_families.py",
        families.SLOW_ANSWERS,
        columns=("logits", "answers", "split", "split P/D"),
        in_ci=False,
    ),
    Check(
        "recovery",
        "the same answer if an encode instance is lost after some rows of an image have landed; the others come from "
        "another instance",
        "tests/parity",
        {*families.REPRESENTATIVE, "qwen3_vl", "minicpmv"},
        columns=("recovery",),
    ),
    Check(
        "recovery of other models",
        "the same" + SLOW,
        "tests/parity",
        {*families.ANSWERED_IMAGES, *SHARED, "qwen3_vl_moe", "internvl_chat", "phi4mm"}.difference(
            families.REPRESENTATIVE
        ),
        columns=("recovery",),
        in_ci=False,
    ),
    Check(
        "recovery of videos and audio",
        "the same of an encode instance that is lost in the middle of a video or a clip" + SLOW,
        "tests/parity",
        {
            *(*families.VIDEO_ANSWERS, *families.FRAME_TILES, *families.FRAME_PARTS, *HEARING, *OMNI),
            *("qwen3_vl", "kimi_k25", "minicpmv", "phi4mm"),
        },
        columns=("recovery",),
        in_ci=False,
    ),
    Check(
        "answers about videos",
        "as above, from MP4, WebM, GIF and lists of frames",
        "tests/parity",
        {*families.VIDEO_ANSWERS, *families.FRAME_TILES, *families.FRAME_PARTS, "qwen3_vl"},
        columns=("video",),
    ),
    Check(
        "answers about videos of model types that share their code",
        "the same, from `1EPD` and `1E1P1D`" + SLOW,
        "tests/parity/test_video_families.py",
        families.SAME_VIDEOS,
        columns=("video",),
        in_ci=False,
    ),
    Check(
        "audio",
        "tokens equal, features within 1e-4, embeddings within 1e-5; answers as above, also beside images",
        "tests/models, tests/layers, tests/parity",
        {
            *(name for name in TINY | HEARING if "audio" in FAMILIES[name].modalities),
            *("phi4mm", "phi4_multimodal", "gemma4+gemma4_vision"),
        },
        columns=("audio",),
    ),
    Check(
        "audio of thinkers by themselves",
        "answers as above, from `1E1P1D`, and with an encode instance that is lost in the middle of a clip" + SLOW,
        "tests/parity/test_audio.py",
        {f"{name}_thinker" for name in OMNI},
        columns=("audio", "recovery"),
        in_ci=False,
    ),
    Check(
        "videos with soundtracks",
        "token order, positions and answers equal to those with `use_audio_in_video`, from MP4, WebM and Matroska",
        "tests/models, tests/parity/test_heard_videos.py",
        families.HEARD_VIDEOS,
    ),
    Check(
        "answers to text",
        "32 greedy tokens equal, in `1P1D` in chunks of 7",
        "tests/parity/test_backbones.py",
        ANSWERED,
        columns=("answers", "split P/D"),
    ),
    Check(
        "answers to text in more ways",
        "the same in `1PD`, `1P1D` and `1P2D`, each in chunks of 1, 7 and 64 and of whole prompts; through a receive "
        "pool of one block; of one and of eight requests at a time; with prefixes that are cold, warm and partly "
        "evicted; of preempted requests (where layers without a window need pages), and with lost instances" + SLOW,
        "tests/parity/test_backbones.py",
        MORE_TYPES,
        columns=("answers", "split P/D"),
        in_ci=False,
    ),
    Check(
        "answers to text of models that Transformers lacks",
        "equal to those of a model that computes the same (a Llama, and DeepSeek-V3), in `1PD` and `1P1D`" + SLOW,
        "tests/parity/test_backbones.py",
        {"internlm2", "kimi_k2"},
        columns=("answers", "split P/D"),
        in_ci=False,
    ),
    Check(
        "unequal numbers of ranks",
        "the same answers from two ranks that prefill and one that decodes" + SLOW,
        "tests/parity/test_backbones.py",
        TWO_RANKS,
        in_ci=False,
    ),
    Check(
        "tensor parallelism",
        "the same answers from two ranks",
        "tests/parity",
        {*families.TWO_RANKS, *QWEN3_VL},
        columns=("two ranks",),
    ),
    Check(
        "tensor parallelism of other models",
        "as above" + SLOW,
        "tests/parity/test_backbones.py",
        TWO_RANKS,
        columns=("two ranks",),
        in_ci=False,
    ),
    Check(
        "sliding windows",
        "the same answers with windows switched on",
        "tests/parity",
        {*families.SLIDING_WINDOWS, *(ANSWERED & WINDOWED)},
        columns=("windows",),
    ),
    Check(
        "attention in chunks",
        "the same answers with short chunks, in `1PD` and `1P1D`; pages of finished ones are released and not sent",
        "tests/parity/test_windows.py",
        {BACKBONES["llama4"].config["model_type"]},
        columns=("windows",),
    ),
    Check(
        "sliding windows of other models",
        "as above" + SLOW,
        "tests/parity/test_backbones.py",
        types_of(MORE_BACKBONES, "sliding_window") - (ANSWERED & WINDOWED),
        columns=("windows",),
        in_ci=False,
    ),
)


MEDIA_COLUMNS = ("plan", "pixels", "rows", "logits", "answers", "video", "audio", "split", "split P/D", "recovery")
TEXT_COLUMNS = ("logits", "answers", "split P/D", "two ranks", "windows")
INPUTS = {"video": "video", "audio": "audio"}
"""Columns that stand for an input, which some families don't take."""


def page() -> str:
    """The index's Markdown."""
    lines = [
        "# Models",
        "",
        "This page is generated by `scripts/models_doc.py` from the registry and the tests.",
        "",
        "## Models with media",
        "",
        "Each page says what its models take, what becomes of an image, and what was checked how.",
        "",
        _families_with_media(),
        "",
        "## Text models",
        "",
        "They are served without an encode instance: `1PD`, `1P1D`, …",
        "",
        _text_families(),
        "",
        "All kinds of RoPE scaling in Transformers are served: `linear`, `llama3`, `yarn`, `proportional`, `dynamic` "
        "and `longrope`.",
        "`longrope` and `dynamic` choose frequencies by a request's length: of its prompt and `max_tokens` together.",
        "A request keeps its frequencies from its first token to its last.",
        "`longrope` has a second set above `original_max_position_embeddings`.",
        "`dynamic` has a base for each length above `max_position_embeddings`, and a context of `factor` times that.",
        "A chat without `max_tokens` ends at the original length if its prompt is shorter.",
        "If its prompt is longer, `dynamic` takes the base of the service's whole context: name `max_tokens` for "
        "the one that fits.",
        "Neither is served in three axes (M-RoPE).",
        "Quantized checkpoints are served in [these formats](operating.md#quantized-checkpoints), of any family; "
        "others are refused at the start.",
        "gpt-oss is published in MXFP4 only, so a copy in bf16 is needed.",
        "",
        "## What is checked, and how",
        "",
        "The reference is Transformers in float32 or, where it has no class, an implementation in the tests: of "
        "CogVLM2, of InternLM2, of Kimi-VL, of MiniCPM-V 2.6 and 4.5, and of the processors of DeepSeek-OCR and "
        "Phi-4-multimodal.",
        "Checkpoints are tiny and random, with every special feature of a family switched on.",
        "Of released weights, SmolLM2-135M-Instruct (`llama`) and Gemma-3-270M (`gemma3_text`) have been compared: 64 "
        "greedy tokens after each of 50 prompts are equal in float32, in `1PD` and `1P1D` "
        "(`tests/parity/test_released_weights.py`, run by hand: `TRIPTYCH_SMOLLM2` and `TRIPTYCH_GEMMA3` name the "
        "weights).",
        "No released weights of a model with media have been compared, and none have been loaded.",
        "",
        "A column of these tables stands for one kind of test:",
        "",
        table(["column", "✓ in every run; (✓) in the slow suite, `scripts/test --slow`; – not an input"], _columns()),
        "",
        "### Models with media",
        "",
        _ticks([name for name, family in FAMILIES.items() if family.takes_media], MEDIA_COLUMNS),
        "",
        "### Text models",
        "",
        _ticks([name for name, family in FAMILIES.items() if not family.takes_media], TEXT_COLUMNS),
        "",
        "### Each check",
        "",
        table(["what", "how", "where"], [[check.what, check.how, check.files] for check in CHECKS]),
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
    rows = [
        [family.name, f"`{name}`", language_model(family)]
        for name, family in FAMILIES.items()
        if not family.takes_media
    ]
    return table(["models", "`model_type`", "language model"], rows)


def _columns() -> list[list[str]]:
    columns = dict.fromkeys((*MEDIA_COLUMNS, *TEXT_COLUMNS))
    return [[column, "; ".join(check.what for check in CHECKS if column in check.columns)] for column in columns]


def _ticks(names: list[str], columns: tuple[str, ...]) -> str:
    """A row for each model type. Raises ValueError for a check of a model type that isn't in the registry."""
    for check in CHECKS:
        if unknown := set(check.families) - set(FAMILIES):
            raise ValueError(f"{check.what}: {unknown} are no families")
    rows = [[spelled(name), *(_tick(name, column) for column in columns)] for name in names]
    return table(["", *columns], rows)


def _tick(name: str, column: str) -> str:
    if INPUTS.get(column, "text") not in FAMILIES[name].modalities:
        return "–"
    found = {check.in_ci for check in CHECKS if column in check.columns and name in check.families}
    return "✓" if True in found else "(✓)" if found else ""


def main() -> None:
    """Write the index and the families' pages."""
    PAGE.write_text(page())
    FOLDER.mkdir(exist_ok=True)
    for name, markdown in pages(CHECKS).items():
        (FOLDER / name).write_text(markdown)


if __name__ == "__main__":
    main()
