"""The pages of docs/models: for each family with media, what it takes and what becomes of an image.
``scripts/models_doc.py`` writes them, from the registry and the planners."""

from dataclasses import dataclass, replace

from scripts.generated import DOCS, table
from tests.support.released import RELEASED
from tests.support.tiny import TINY
from triptych.checkpoint.config_files import with_text_config
from triptych.models.base import FRAME_OPTIONS, Planner
from triptych.models.registry import FAMILIES, WITH_TOWER, Family, resolve
from triptych.models.shared.omni import OmniPlanner
from triptych.types import ImageHeader

FOLDER = DOCS / "models"
SHOWN_SIZES = ((448, 448), (1920, 1080), (1080, 1920), (4000, 3000))
"""Width and height of the images in the table of embeddings."""
SOUND_OPTION = "use_audio_in_video"
GLM = {"glm46v": replace(TINY["glm4v"], config=TINY["glm4v"].config | {"model_type": "glm46v"})}
"""Tiny checkpoints of model types whose options depend on their files, and that ``RELEASED`` lacks."""


@dataclass(frozen=True)
class Page:
    """One page: model types that share their code."""

    title: str
    model_types: tuple[str, ...]
    notes: tuple[str, ...]
    """What the tables can't say: a sentence each."""


PAGES = {
    "qwen2-vl": Page(
        "Qwen2-VL and Qwen2.5-VL",
        ("qwen2_vl", "qwen2_5_vl"),
        (
            "`min_pixels` and `max_pixels` bound an image, and each frame of a video.",
            "Two frames become one temporal patch.",
        ),
    ),
    "qwen3-vl": Page(
        "Qwen3-VL, Qwen3.5 and Qwen3.6",
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        (
            "`min_pixels` and `max_pixels` bound an image, and all frames of a video together.",
            "A video's temporal patches stand after their times in the prompt.",
            "Layers of multi-token prediction (`mtp.*`) aren't loaded.",
        ),
    ),
    "qwen2.5-omni": Page(
        "Qwen2.5-Omni",
        ("qwen2_5_omni", "qwen2_5_omni_thinker"),
        (
            "The thinker is served: answers are text.",
            "A second of audio becomes 25 tokens, and a clip has at most the seconds of `chunk_length` (300).",
            f"With `{SOUND_OPTION}`, a video's first audio track is also used, in turns with its frames.",
            "A turn is `seconds_per_chunk` long.",
            "`min_pixels` and `max_pixels` bound an image, and each frame of a video.",
        ),
    ),
    "qwen2-audio": Page(
        "Qwen2-Audio",
        ("qwen2_audio",),
        (
            "A second of audio becomes 25 tokens, and a clip has at most 30 seconds; longer ones are refused, not cut.",
            "A request may have several clips, which the model's template numbers.",
        ),
    ),
    "qwen3-omni": Page(
        "Qwen3-Omni",
        ("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        (
            "The thinker is served: answers are text.",
            "One frame a second is sampled by default; a second of audio becomes 13 tokens.",
            f"With `{SOUND_OPTION}`, a video's first audio track is also used, interleaved with its frames by time.",
            "`min_pixels` and `max_pixels` bound an image, and each frame of a video.",
        ),
    ),
    "phi4mm": Page(
        "Phi-4-multimodal",
        ("phi4mm", "phi4_multimodal"),
        (
            "The published files hold two LoRAs: requests with images are computed with `vision`, those with audio "
            "alone with `speech`, and text without one.",
            "Requests with a LoRA and without share batches.",
            "`mm_processor_kwargs.dynamic_hd` lowers the files' largest number of tiles, 36; bounds are refused.",
            "Transformers' files (`phi4_multimodal`) have the LoRAs in folders, `vision-lora` and `speech-lora`, as "
            "peft writes them: those that are there are used, and other media are computed without a LoRA.",
            "In requests that also have images, audio is projected otherwise.",
            "Each clip is encoded by itself; Transformers pads a request's clips to one length.",
        ),
    ),
    "glm-v": Page(
        "GLM-4.1V, GLM-4.5V and GLM-4.6V",
        ("glm4v", "glm46v", "glm4v_moe"),
        (
            "The processor's files decide how frames are sampled, not the model type.",
            "`size` counts an image as two frames, as the processor does; `min_pixels` and `max_pixels` don't.",
            "Errors about an image's area count one frame.",
            "Even edges of `size` bound exactly as in the processor; odd ones are tightened by one pixel.",
            "GLM-4.1V and GLM-4.5V take `fps`; GLM-4.6V decides on its frames alone.",
            "Layers of multi-token prediction aren't loaded.",
        ),
    ),
    "llava": Page(
        "LLaVA-1.5",
        ("llava",),
        ("All images are resized alike, so bounds of their area are refused.",),
    ),
    "llava-next": Page(
        "LLaVA-NeXT and LLaVA-OneVision",
        ("llava_next", "llava_onevision"),
        (
            "Bounds apply to the area of all tiles together, without the overview before them.",
            "LLaVA-OneVision shows an image in tiles only if it is the request's only image.",
            "LLaVA-OneVision resizes all frames alike, refuses bounds for videos, and samples 32 frames by default.",
        ),
    ),
    "pixtral": Page(
        "Pixtral",
        ("llava+pixtral",),
        (
            "The files for Transformers are served: a `model_type` of `llava` with a `vision_config` of `pixtral`.",
            "Files in Mistral's own format (`params.json`) are refused.",
            "An image is reduced if a side exceeds `size.longest_edge`.",
            "Then each side is enlarged to whole embeddings, so the aspect ratio may change a little.",
            "`min_pixels` enlarges smaller images, `max_pixels` reduces larger ones.",
            "A request's `size` has a `longest_edge` alone, up to the files' own.",
            "Each row of embeddings ends with `[IMG_BREAK]`, the last with `[IMG_END]`.",
        ),
    ),
    "gemma4": Page(
        "Gemma 4",
        ("gemma4+gemma4_vision",),
        (
            "An image is enlarged or reduced to the most embeddings: 280 unless the processor's file says otherwise.",
            "A video's frames have at most 70 embeddings each, after their times; 32 frames are sampled by default.",
            "`max_soft_tokens` sets these numbers for a request: 70, 140, 280, 560 or 1120.",
            "`max_pixels` bounds the area of an image or a frame instead; 2,304 pixels become one embedding.",
            "Images of 26B-A4B and 31B (`use_bidirectional_attention`) are computed in one step, in which their tokens "
            "attend to each other; a larger `max_soft_tokens` may need a larger `--max-num-batched-tokens`.",
            "E2B and E4B take audio, at most 30 seconds a clip; an embedding stands for 40 ms.",
            "The sound of videos isn't used, as in the reference.",
            "Without `vision_config`, a checkpoint is a text model.",
            "Gemma 4 12B (`gemma4_unified`), which has no encoder, isn't served: its model type is refused as unknown.",
        ),
    ),
    "mistral3": Page(
        "Mistral Small 3.1 and 3.2, Ministral 3",
        ("mistral3",),
        (
            "An image is reduced if a side exceeds `size.longest_edge`.",
            "Then each side is enlarged to whole embeddings, so the aspect ratio may change a little.",
            "`min_pixels` enlarges smaller images, `max_pixels` reduces larger ones.",
            "A request's `size` has a `longest_edge` alone, up to the files' own.",
            "Each row of embeddings ends with `[IMG_BREAK]`, the last with `[IMG_END]`.",
        ),
    ),
    "gemma3": Page(
        "Gemma 3",
        ("gemma3",),
        (
            "All images are resized alike, so bounds of their area are refused.",
            "An image's tokens attend to each other in both directions, so one step computes all of them.",
            "With `do_pan_and_scan`, long images are also shown in crops; the other options then have vLLM's defaults.",
            "Options of crops are refused if neither the request nor the processor's file sets `do_pan_and_scan`.",
            "There are no `prompt_logprobs` with images, whose tokens attend to later ones.",
        ),
    ),
    "kimi": Page(
        "Kimi-VL and Kimi K2.5",
        ("kimi_vl", "kimi_k25"),
        (
            "An image keeps its size unless it has too many patches, and is padded to whole embeddings.",
            "Within bounds of a request, it is resized to whole embeddings instead.",
            "Kimi K2.5's videos are sampled twice a second, as the published processor or Transformers' does it.",
            "Four frames become the embeddings of one image, after the time of the first; bounds are those of a frame.",
            "Kimi-VL's images that would be cropped (`pad_input: false`) are refused.",
            "Files are published with a `tiktoken.model`; serving them takes a `tokenizer.json`.",
            "Tensors have their published names: Transformers loads Kimi K2.5, but saves it under names of no use.",
            "Transformers has no class for Kimi-VL, so tests compare it with an implementation of their own.",
        ),
    ),
    "idefics3": Page(
        "Idefics3 and SmolVLM",
        ("idefics3", "smolvlm"),
        (
            "An image is resized to the longest edge before it is cut, so a small one costs as much as a large one.",
            "Bounds apply to the area of all tiles together, without the overview after them.",
            "A request's `size` has a `longest_edge` alone, up to the files' own.",
            "SmolVLM takes videos: each frame is one tile, after its time; bounds and `size` are refused for them.",
            "One frame a second is sampled, at most 64; of a longer video, the first and the last second are left out.",
            "A request's `num_frames` is the most, and its `fps` the rate.",
        ),
    ),
    "llama4": Page(
        "Llama 4",
        ("llama4",),
        (
            "An image is scaled to the canvas of tiles that it is enlarged least for, at most to a tile's side.",
            "The rest of the canvas is black. Tiles have separators in the prompt; the whole image follows them.",
            "`max_patches` bounds the tiles within the model's own number; `resize_to_max_canvas` enlarges small ones.",
            "Bounds apply to the area of all tiles together, without the overview.",
            "Its image processor needs torchvision: pixels are compared with what it made of seeded images.",
        ),
    ),
    "minicpm-v": Page(
        "MiniCPM-V",
        ("minicpmv4_6", "minicpmv"),
        (
            "An image becomes the whole, shrunk or enlarged, and up to `max_slice_nums` slices of it.",
            "A request's `max_slice_nums` holds for images and for each frame of videos; it may exceed the files' own.",
            "With `slice_mode: false` in the processor's file, images stay whole, whatever a request asks for.",
            "`downsample_mode` (`16x` or `4x`) holds for images and videos alike.",
            "Images are numbered in the prompt unless the processor's file says otherwise.",
            "A video is sampled once a second, longer ones more rarely; bounds of its frames' area are refused.",
            "Earlier versions 2.6 and 4.5 are served; a conversation's parts become its lines.",
            "Their videos are sampled as their published descriptions say: 2.6's once a second (at most 64 frames), "
            "4.5's three times a second.",
            "From 180 frames, 4.5 shows up to 3 frames together: they become one line and one image's embeddings.",
            "Frames of these versions aren't numbered, nor are images of a request with videos; by default, 2.6 cuts a "
            "frame into up to 2 slices, and 4.5 into none.",
        ),
    ),
    "deepseek-ocr": Page(
        "DeepSeek-OCR",
        ("deepseek_vl_v2", "deepseek_ocr2"),
        (
            "`deepseek_vl_v2` means DeepSeek-OCR and DeepSeek-OCR-2; DeepSeek-VL2 isn't served.",
            "DeepSeek-OCR cuts an image into tiles if it is the request's only one, or if `crop_mode` is true.",
            "DeepSeek-OCR-2 cuts every image that is larger than a tile, unless `crop_mode` is false.",
            "DeepSeek-OCR's modes are `base_size`, `image_size` and `crop_mode` as in its code. "
            "With `crop_mode: false`, Tiny is 512 for both sizes, Small 640, Base 1024 and Large 1280.",
            "Gundam, the default, is 1024, 640 and true; other sizes of tiles are refused.",
            "Bounds apply to the area of all tiles together, without the overview after them.",
            "An image whose `max_pixels` no tiles fit within is shown as a whole alone.",
            "A checkpoint without a chat template gets the plain format of the published code.",
        ),
    ),
    "cogvlm2": Page(
        "CogVLM2",
        ("cogvlm2",),
        (
            "A config without `model_type` is known by its `architectures`: `CogVLMForCausalLM`.",
            "A request takes one image, also in a conversation; the prompt begins with it.",
            "All images are resized alike, so bounds of their area are refused.",
            "An image's embeddings but the last are computed with the weights of the visual experts, all other tokens "
            "with the language model's own; both are loaded, also where requests are decoded alone.",
            "Prompts have the form of the published code (`template_version: chat`), whatever the tokenizer's files "
            "have: `Question: … Answer:`.",
            "It knows no system messages, which are refused.",
            "A `chat_template.jinja` in the folder replaces it; it writes `<|image|>` for an image.",
            "Positions aren't scaled, as in the published code: a config with `rope_scaling` is refused.",
            "CogVLM and CogVLM2-Video aren't served.",
            "The encoder follows descriptions and ports of the published code; no published weights were loaded.",
            "Transformers has no class for CogVLM2, so tests compare it with an implementation of their own.",
        ),
    ),
    "internvl": Page(
        "InternVL",
        ("internvl", "internvl_chat"),
        (
            "Bounds apply to the area of all tiles together, without the thumbnail after them.",
            "Frames of videos are resized alike, so bounds are refused; 32 frames are sampled by default.",
            "`min_dynamic_patch` and `max_dynamic_patch` are within the files' own, and don't count the thumbnail.",
            "A request has either these and `dynamic_image_size` or bounds.",
            "Each frame of a video is one tile, so a request with videos alone has no options of tiles.",
            "Original files (`internvl_chat`) and those of Transformers (`-hf`) are served alike.",
            "Both values of the original files' `ps_version` and `use_thumbnail` are served.",
        ),
    ),
}
"""By file name."""


def pages() -> dict[str, str]:
    """Markdown of each page, by file name. Raises ValueError for a family that no page or two pages have."""
    shown = sorted(name for page in PAGES.values() for name in page.model_types)
    if shown != (expected := sorted(name for name, family in FAMILIES.items() if family.takes_media)):
        raise ValueError(f"scripts/family_pages.py has {shown}, but the registry has {expected}")
    return {f"{name}.md": _page(page) for name, page in PAGES.items()}


def _page(page: Page) -> str:
    families = {name: FAMILIES[name] for name in page.model_types}
    lines = [
        f"# {page.title}",
        "",
        "<!-- written by scripts/models_doc.py -->",
        "",
        table(["", *map(spelled, families)], _facts(families)),
        "",
        *(f"- {note}" for note in page.notes),
        "",
        *_embeddings(page.model_types),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _facts(families: dict[str, Family]) -> list[list[str]]:
    return [
        ["checkpoints", *(family.name for family in families.values())],
        ["input", *(", ".join(family.modalities) for family in families.values())],
        ["language model", *(language_model(family) for family in families.values())],
        ["encoder", *(resolve(family.adapter).towers for family in families.values())],
        ["`mm_processor_kwargs`", *(_options(name) for name in families)],
    ]


def spelled(name: str) -> str:
    """A family's name in the registry as Markdown."""
    model_type, plus, tower = name.partition(WITH_TOWER)
    return f"`{model_type}` with `{tower}`" if plus else f"`{model_type}`"


def language_model(family: Family) -> str:
    """What the family's language model is."""
    return resolve(family.backbone).description if family.backbone else "that of `text_config`"


def _options(name: str) -> str:
    family = FAMILIES[name]
    kind = resolve(family.planner)
    planner = _planner(name) if name in RELEASED or name in GLM else kind
    names = set(planner.options) - (set() if "video" in family.modalities else FRAME_OPTIONS.keys())
    if issubclass(kind, OmniPlanner):
        names.add(SOUND_OPTION)
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def _embeddings(model_types: tuple[str, ...]) -> list[str]:
    """A table of what images become, for each checkpoint whose sizes are known."""
    found = [name for name in model_types if name in RELEASED and "image" in FAMILIES[name].modalities]
    if not found:
        return []
    rows = [
        [f"{width} × {height}", *(_becomes(_planner(name), width, height) for name in found)]
        for width, height in SHOWN_SIZES
    ]
    return [
        "## Embeddings of an image",
        "",
        table(["image", *(RELEASED[name].name for name in found)], rows),
        "",
    ]


def _planner(name: str) -> Planner:
    tiny = GLM[name] if name in GLM else RELEASED[name].tiny(name)
    config = with_text_config(tiny.config)
    planner: Planner = resolve(FAMILIES[name].planner)(config, tiny.preprocessor, tiny.video_preprocessor)
    return planner


def _becomes(planner: Planner, width: int, height: int) -> str:
    return f"{planner.plan(ImageHeader('PNG', width, height)).rows:,}"
