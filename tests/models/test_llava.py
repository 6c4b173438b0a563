"""LLaVA-1.5: plans, pixels, rows and keys as transformers has them, its own chat template, and bad configs."""

import io
import json
import random
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from tests.support.checkpoints import edit_config, load_adapter, load_reference
from tests.support.forward import assert_rows, random_input
from tests.support.random_checkpoint import write_json
from tests.support.tiny import IDS, OWN_TOWERS, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput
from triptych.models.llava.config import text_config
from triptych.models.llava.encoder import Llava
from triptych.models.llava.plan import LlavaPlanner
from triptych.models.llava.preprocess import LlavaPreprocessor
from triptych.models.registry import backbone_of
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemPlan, Placement, Span

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: dict[str, Any] = OWN_TOWERS["llava"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["llava"].preprocessor or {}
INPUTS = [random_input((1, 5, 5), seed, 3 * 14 * 14) for seed in range(2)]

PUBLISHED_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<|image_pad|>\n' }}"
    "{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As in the published files, images first: it takes parts, and shows no content that is a string."""


def changed(**settings: Any) -> dict[str, Any]:
    """The tiny config with these settings; a dict changes a section's."""
    config = deepcopy(CONFIG)
    for name, value in settings.items():
        config[name] = config[name] | value if isinstance(config.get(name), dict) and value else value
    return config


def png(width: int, height: int) -> tuple[Image.Image, bytes]:
    noise = np.random.default_rng((width, height)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image, file = Image.fromarray(noise), io.BytesIO()
    image.save(file, "PNG")
    return image, file.getvalue()


def images_of(inputs: list[EncoderInput], side: int = 75) -> torch.Tensor:
    """Pixels [images, 3, side, side] of patches; those beyond the last whole patch are zero."""
    pixels = torch.zeros(len(inputs), 3, side, side)
    patches = torch.stack([torch.from_numpy(item.patches) for item in inputs])
    whole = patches.view(-1, 5, 5, 3, 14, 14).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 70, 70)
    pixels[:, :, :70, :70] = whole
    return pixels


def check_pixels(processor: dict[str, Any], reference: Any, width: int, height: int) -> None:
    image, data = png(width, height)
    plan = LlavaPlanner(CONFIG, processor).plan(probe_image(data))
    [result] = LlavaPreprocessor(CONFIG, processor)(data, plan)
    expected = torch.from_numpy(reference(image, return_tensors="np")["pixel_values"])
    assert torch.equal(images_of([result])[:, :, :70, :70], expected[:, :, :70, :70])


PROCESSORS = [
    (PROCESSOR, CLIPImageProcessorPil),
    (PROCESSOR | {"size": {"shortest_edge": 83}, "crop_size": 75}, CLIPImageProcessorPil),
    (PROCESSOR | {"size": {"height": 75, "width": 75}, "do_center_crop": False}, CLIPImageProcessorPil),
    (PROCESSOR | {"image_processor_type": "LlavaImageProcessor", "do_pad": True}, LlavaImageProcessorPil),
]


def reference_of(processor: dict[str, Any], kind: Any) -> Any:
    return kind(**{name: value for name, value in processor.items() if name != "image_processor_type"})


@pytest.mark.parametrize(("processor", "kind"), PROCESSORS)
def test_pixels_are_the_pillow_processors(processor: dict[str, Any], kind: Any) -> None:
    source = random.Random(0)
    sizes = [
        (1, 1),
        (75, 75),
        (190, 3),
        (2, 150),
        *((source.randint(1, 300), source.randint(2, 300)) for _ in range(6)),
    ]
    for width, height in sizes:
        check_pixels(processor, reference_of(processor, kind), width, height)


def plans_are_the_processors(count: int) -> None:
    """``_get_num_multimodal_tokens`` needs no tokenizer, which the rest of the processor does."""
    source = random.Random(1)
    for strategy in ("default", "full"):
        planner = LlavaPlanner(changed(vision_feature_select_strategy=strategy), PROCESSOR)
        reference = LlavaProcessor.__new__(LlavaProcessor)
        reference.patch_size, reference.num_additional_image_tokens = 14, 1
        reference.vision_feature_select_strategy, reference.image_token = strategy, "x"
        for _ in range(count):
            width, height = source.randint(20, 4000), source.randint(20, 4000)
            plan = planner.plan(ImageHeader("PNG", width, height))
            text = reference.replace_image_token({"pixel_values": [np.zeros((3, 75, 75))]}, 0)
            assert plan.rows == plan.rows_of(0) == len(text)
            assert (plan.grid, plan.num_parts, plan.is_whole) == ((1, 5, 5), 1, True)


def test_plans_are_the_processors() -> None:
    plans_are_the_processors(20)


@pytest.mark.slow
def test_many_plans_are_the_processors() -> None:
    plans_are_the_processors(3000)


@pytest.mark.slow
def test_pixels_of_many_sizes() -> None:
    source = random.Random(2)
    for processor, kind in PROCESSORS:
        for _ in range(250):
            check_pixels(processor, reference_of(processor, kind), source.randint(4, 700), source.randint(4, 700))


def test_a_published_config_has_576_rows() -> None:
    """llava-1.5-7b's, which relies on the defaults of ``LlamaConfig``."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = {
        "model_type": "llava",
        "image_token_index": 32000,
        "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064},
        "vision_config": vision | {"image_size": 336, "patch_size": 14, "model_type": "clip_vision_model"},
    }
    planner = LlavaPlanner(config, {})
    plan = planner.plan(ImageHeader("JPEG", 1920, 1080))
    assert (plan.grid, plan.rows, planner.context_length) == ((1, 24, 24), 576, 4096)
    adapter = Llava(config)
    assert (adapter.decoder_config.hidden_size, adapter.decoder_config.num_layers) == (4096, 32)
    assert adapter.vision.feature_layers == (23,)


@cache
def folder_of(tmp: Path, layout: Any) -> Path:
    return make_tiny(tmp / layout, "llava", layout)


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llava")


def tower_of(folder: Path, weights: Any = FP32) -> Encoder:
    return load_adapter(folder).load_encoder(Checkpoint(folder), weights, CPU)


def reference_rows(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        model: Any = load_reference(folder, dtype)
        return torch.cat(list(model.get_image_features(images_of(INPUTS).to(dtype)).pooler_output))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vision_feature_layer": [0, 3, -2], "vision_feature_select_strategy": "full"},
        {"vision_feature_layer": -1, "multimodal_projector_bias": False, "projector_hidden_act": "gelu_pytorch_tanh"},
    ],
)
def test_rows(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path, "llava", config=settings)
    rows = tower_of(folder).encode(INPUTS)
    exact, expected = reference_rows(folder, torch.float64), reference_rows(folder)
    assert_rows(torch.cat(rows), expected)
    ours, theirs = ((one - exact).square().mean().sqrt() for one in (torch.cat(rows), expected))
    assert 0 < ours <= 1.5 * theirs
    for item, part in zip(INPUTS, rows, strict=True):
        assert_rows(part, tower_of(folder).encode([item])[0])


def test_keys_named_as_the_modules(tmp: Path, tmp_path: Path) -> None:
    """``model.vision_tower.…``, and tensors that only older files have."""
    folder = folder_of(tmp, "saved")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    renamed = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        module = key.replace("language_model.model.", "language_model.")
        renamed["lm_head.weight" if "lm_head" in key else f"model.{module}"] = weight
    renamed["model.vision_tower.embeddings.position_ids"] = torch.arange(26)[None]
    save_file(renamed, tmp_path / "model.safetensors")
    for path in (folder, tmp_path):
        adapter, keys = load_adapter(path), Checkpoint(path).tensors
        assert sorted(adapter.encoder_keys(keys) + adapter.decoder_keys(keys)) == sorted(keys)
    assert torch.equal(*(torch.cat(tower_of(path).encode(INPUTS)) for path in (folder, tmp_path)))
    ours, other = (load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU) for path in (folder, tmp_path))
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_feature_layer": []}, "vision_feature_layer"),
        ({"vision_feature_layer": True}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "all"}, "vision_feature_select_strategy"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ({"vision_config": {"num_attention_heads": 5}}, "divide"),
        ({"vision_config": {"image_size": 10**9}}, "image_size"),
        ({"vision_config": {"patch_size": 0}}, "patch_size"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"num_channels": 1}}, "num_channels"),
        ({"vision_config": {"layer_norm_eps": 0.0}}, "layer_norm_eps"),
        ({"text_config": {"model_type": "qwen2_vl"}}, "text_config.model_type 'qwen2_vl'"),
        ({"text_config": {"model_type": ["llama"]}}, "text_config.model_type"),
        ({"text_config": None}, "text_config"),
    ],
)
def test_bad_configs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Llava(changed(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"shortest_edge": 70}}, "size"),
        ({"size": {"shortest_edge": 10**6}}, "size"),
        ({"size": [75]}, "shortest_edge"),
        ({"do_center_crop": False}, "size"),
        ({"crop_size": {"height": 75, "width": 74}}, "crop_size"),
        ({"do_resize": False}, "do_resize"),
        ({"image_mean": "x"}, "image_mean"),
        ({"image_processor_type": 3, "do_pad": True}, "image_processor_type"),
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True, "image_mean": [2, 0, 0]}, "image_mean"),
    ],
)
def test_bad_processors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LlavaPreprocessor(CONFIG, PROCESSOR | settings)


def test_positions_are_plain() -> None:
    planner = LlavaPlanner(CONFIG, PROCESSOR)
    plan: ItemPlan = planner.plan(ImageHeader("PNG", 90, 90))
    places = [Placement((Span(start=2, length=25),)), Placement((Span(start=27, length=25),))]
    found = planner.positions(60, places, [plan, plan])
    assert found.next_position == 60
    assert np.array_equal(found.prompt, np.tile(np.arange(60), (3, 1)))
    for wrong in (places[:1], places[::-1], [places[0], Placement((Span(start=27, length=24),))]):
        with pytest.raises(PlanMismatch):
            planner.positions(60, wrong, [plan, plan])


def test_an_input_of_another_grid() -> None:
    data = png(90, 60)[1]
    plan = LlavaPlanner(changed(vision_config={"image_size": 56}), PROCESSOR).plan(probe_image(data))
    with pytest.raises(PlanMismatch, match="grid"):
        list(LlavaPreprocessor(CONFIG, PROCESSOR)(data, plan))


@pytest.mark.parametrize(
    ("size", "pads", "error"),
    [
        ((20_000, 100), True, MediaTooLarge),
        ((50_000_000, 1), False, BadMediaSize),
        ((10_000, 10_000), False, MediaTooLarge),
        ((0, 1), False, BadMediaSize),
    ],
)
def test_planned_sizes_are_checked(size: tuple[int, int], pads: bool, error: type[Exception]) -> None:
    """Plans come from another process. The bytes aren't read."""
    processor = PROCESSOR | ({"image_processor_type": "LlavaImageProcessor", "do_pad": True} if pads else {})
    plan = LlavaPlanner(CONFIG, PROCESSOR).plan(ImageHeader("PNG", 90, 90))
    with pytest.raises(error):
        next(LlavaPreprocessor(CONFIG, processor)(b"", msgspec.structs.replace(plan, header=ImageHeader("PNG", *size))))


def test_patches_that_dont_fill_the_grid(tmp: Path) -> None:
    tower = tower_of(folder_of(tmp, "published"))
    assert tower.encode([]) == []
    with pytest.raises(PlanMismatch):
        tower.encode([random_input((1, 5, 4), 0, 588)])


def test_the_backbone_is_that_of_the_text_config() -> None:
    for name in ("llama", "qwen2", "mistral"):
        text = CONFIG["text_config"] | {"model_type": name}
        assert backbone_of(CONFIG | {"text_config": text}) == backbone_of({"model_type": name})
    without = {name: value for name, value in CONFIG["text_config"].items() if name != "model_type"}
    assert text_config(CONFIG | {"text_config": without})["model_type"] == "llama"


def test_the_published_template(tmp_path: Path) -> None:
    """Strings become parts, which alone it shows, and a sequence starts as the tokenizer has it."""
    folder = make_tiny(tmp_path, "llava")
    (folder / "chat_template.jinja").write_text(PUBLISHED_TEMPLATE)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    start = "<|endoftext|>"
    special = {start: {"id": start, "ids": [IDS[start]], "tokens": [start]}}
    single = [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(
        folder / "tokenizer_config.json",
        json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": start},
    )
    builder = PromptBuilder(folder)
    assert builder.modalities == ["image"]
    alone = builder.build([{"role": "user", "content": "Why?"}])
    assert alone.tokens[0] == IDS[start]
    assert builder.tokenizer.decode(alone.tokens[1:]) == "USER: Why? ASSISTANT:"
    parts = [{"type": "text", "text": "Why?"}, {"type": "image", "data": png(90, 60)[1]}]
    prompt = builder.build([{"role": "user", "content": parts}])
    image = [IDS["<|image_pad|>"]] * 25
    assert prompt.tokens[:32] == [*alone.tokens[:7], *image]
    assert builder.tokenizer.decode(prompt.tokens[32:]) == "\nWhy? ASSISTANT:"


def test_saved_config(tmp_path: Path) -> None:
    """Either section may tie the head."""
    folder = make_tiny(tmp_path, "llava")
    edit_config(folder, text_config={"tie_word_embeddings": True})
    assert load_adapter(folder).decoder_config.tie_embeddings
