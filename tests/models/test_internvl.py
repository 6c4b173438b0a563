"""InternVL: plans, pixels, rows and keys as transformers has them, its markers, and bad configs."""

import random
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import assert_rows, random_input
from tests.support.image_cases import picture, png
from tests.support.published_files import make_original_internvl
from tests.support.tiny import IDS, OWN_TOWERS, make_tiny
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput
from triptych.models.internvl.encoder import InternVL, InternVLChat
from triptych.models.internvl.plan import InternVLPlanner
from triptych.models.internvl.preprocess import InternVLPreprocessor
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext, ItemPlan, PixelBounds

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: dict[str, Any] = OWN_TOWERS["internvl"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["internvl"].preprocessor or {}
PUBLISHED = PROCESSOR | {"size": {"height": 448, "width": 448}, "max_patches": 12}
INPUTS = [random_input((1, 4, 4), seed, 3 * 14 * 14) for seed in range(2)]


def changed(**settings: Any) -> dict[str, Any]:
    """The tiny config with these settings; a dict changes a section's."""
    config = deepcopy(CONFIG)
    for name, value in settings.items():
        config[name] = config[name] | value if isinstance(config.get(name), dict) and value else value
    return config


def reference_of(processor: dict[str, Any]) -> GotOcr2ImageProcessorPil:
    return GotOcr2ImageProcessorPil(**{name: it for name, it in processor.items() if name != "image_processor_type"})


def pixels_of(inputs: list[EncoderInput]) -> torch.Tensor:
    """Pixels [tiles, 3, side, side] of patches."""
    patches = torch.stack([torch.from_numpy(item.patches) for item in inputs])
    return patches.view(-1, 4, 4, 3, 14, 14).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 56, 56)


def check_pixels(processor: dict[str, Any], width: int, height: int) -> None:
    image = picture(width, height, width + height)
    plan = InternVLPlanner(CONFIG, processor).plan(probe_image(png(image)))
    found = pixels_of(list(InternVLPreprocessor(CONFIG, processor)(png(image), plan)))
    assert torch.equal(found, torch.from_numpy(np.stack(reference_of(processor)(image)["pixel_values"])))


@pytest.mark.parametrize("processor", [PROCESSOR, PROCESSOR | {"min_patches": 2, "max_patches": 3}])
def test_pixels_are_the_pillow_processors(processor: dict[str, Any]) -> None:
    source = random.Random(0)
    sizes = [(1, 1), (56, 56), (190, 3), (2, 150), *((source.randint(1, 300), source.randint(2, 300)) for _ in "1234")]
    for width, height in sizes:
        check_pixels(processor, width, height)


@pytest.mark.slow
def test_pixels_of_many_sizes() -> None:
    source = random.Random(2)
    for _ in range(1000):
        check_pixels(PROCESSOR, source.randint(4, 500), source.randint(4, 500))


def plans_are_the_processors(count: int) -> None:
    source = random.Random(1)
    config = changed(vision_config={"image_size": 448}, image_seq_length=256)
    for bounds in ({}, {"min_patches": 2, "max_patches": 6}, {"max_patches": 40}, {"max_patches": 1}):
        planner, reference = InternVLPlanner(config, PUBLISHED | bounds), reference_of(PUBLISHED | bounds)
        for _ in range(count):
            width, height = source.randint(20, 4000), source.randint(20, 4000)
            plan = planner.plan(ImageHeader("PNG", width, height))
            tiles = reference.get_number_of_image_patches(height, width)
            assert (plan.num_parts, plan.rows, plan.part_rows) == (tiles, 256 * tiles, 256)
            assert plan.is_whole
            assert plan.patches == 1024 * tiles


def test_plans_are_the_processors() -> None:
    plans_are_the_processors(100)


@pytest.mark.slow
def test_many_plans_are_the_processors() -> None:
    plans_are_the_processors(3000)


def test_bounds_of_the_area() -> None:
    planner = InternVLPlanner(CONFIG, PROCESSOR)
    tile = 56 * 56

    def tiles(least: int, most: int) -> int:
        return planner.plan(ImageHeader("PNG", 900, 600), ItemContext(PixelBounds(least, most))).num_parts

    assert [tiles(0, 0), tiles(0, tile), tiles(0, 2 * tile), tiles(5 * tile, 0)] == [7, 1, 3, 7]
    assert planner.max_image_pixels == 6 * tile
    for least, most in ((0, tile - 1), (0, 7 * tile), (2 * tile, tile), (tile + 1, 2 * tile - 1)):
        with pytest.raises(BadMediaSize):
            tiles(least, most)
    data = png(picture(300, 200, 1))
    plan = planner.plan(probe_image(data), ItemContext(PixelBounds(0, 2 * tile)))
    assert len(list(InternVLPreprocessor(CONFIG, PROCESSOR)(data, plan))) == 3


def test_an_input_that_isnt_planned() -> None:
    data = png(picture(300, 200, 1))
    other = InternVLPlanner(CONFIG, PROCESSOR | {"max_patches": 2}).plan(probe_image(data))
    with pytest.raises(PlanMismatch, match="tiles"):
        next(InternVLPreprocessor(CONFIG, PROCESSOR)(data, other))
    tower = load_tower_input(6)
    with pytest.raises(PlanMismatch, match="fill"):
        tower_of(folder_of("published")).encode([tower])


def load_tower_input(side: int) -> EncoderInput:
    return random_input((1, side, side), 0, 3 * 14 * 14)


@pytest.fixture(scope="module", autouse=True)
def _tmp(tmp_path_factory: pytest.TempPathFactory) -> None:
    _FOLDERS["all"] = tmp_path_factory.mktemp("internvl")


_FOLDERS: dict[str, Path] = {}


@cache
def folder_of(layout: Any) -> Path:
    return make_tiny(_FOLDERS["all"] / layout, "internvl", layout)


def tower_of(folder: Path, weights: Any = FP32) -> Encoder:
    return load_adapter(folder).load_encoder(Checkpoint(folder), weights, CPU)


def reference_rows(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode():
        model: Any = load_reference(folder, dtype)
        return model.get_image_features(pixels_of(INPUTS).to(dtype)).pooler_output.flatten(0, 1)


VISION_SETTINGS = [
    {},
    {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
    {"hidden_act": "gelu_pytorch_tanh", "image_size": 56, "patch_size": 14},
]


@pytest.mark.parametrize("vision", VISION_SETTINGS)
def test_rows(tmp_path: Path, vision: dict[str, Any]) -> None:
    features = {"vision_feature_layer": 2 if vision else -1}
    folder = make_tiny(tmp_path, "internvl", config=features | {"vision_config": CONFIG["vision_config"] | vision})
    rows = tower_of(folder).encode(INPUTS)
    exact, expected = reference_rows(folder, torch.float64), reference_rows(folder)
    assert_rows(torch.cat(rows), expected)
    ours, theirs = ((one - exact).square().mean().sqrt() for one in (torch.cat(rows), expected))
    assert 0 < ours <= 1.5 * theirs
    for item, part in zip(INPUTS, rows, strict=True):
        assert_rows(part, tower_of(folder).encode([item])[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_feature_layer": [1]}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"downsample_ratio": 0.3}, "downsample_ratio"),
        ({"downsample_ratio": 1e-9}, "downsample_ratio"),
        ({"downsample_ratio": 1 / 3}, "doesn't divide"),
        ({"image_seq_length": 5}, "image_seq_length"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_attention_heads": 5}}, "divide"),
        ({"vision_config": {"image_size": 10**9}}, "image_size"),
        ({"vision_config": {"image_size": [56, 70]}}, "image_size"),
        ({"vision_config": {"image_size": [56]}}, "image_size"),
        ({"vision_config": {"patch_size": [0, 0]}}, "patch_size"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"use_mean_pooling": False}}, "use_mean_pooling"),
        ({"vision_config": {"norm_type": ["rms_norm"]}}, "norm_type"),
        ({"vision_config": {"layer_norm_eps": 0.0}}, "layer_norm_eps"),
        ({"text_config": {"model_type": "internvl"}}, "text_config.model_type 'internvl'"),
        ({"text_config": None}, "text_config"),
    ],
)
def test_bad_configs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        InternVL(changed(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 448, "width": 448}}, "size"),
        ({"min_patches": 7}, "ascend"),
        ({"max_patches": 10**6}, "max_patches"),
        ({"max_patches": 0}, "max_patches"),
        ({"min_patches": "2"}, "min_patches"),
    ],
)
def test_bad_processors(settings: dict[str, Any], message: str) -> None:
    for kind in (InternVLPlanner, InternVLPreprocessor):
        with pytest.raises(CheckpointError, match=message):
            kind(CONFIG, PROCESSOR | settings)


def test_markers_around_an_image() -> None:
    plan: ItemPlan = InternVLPlanner(CONFIG, PROCESSOR).plan(ImageHeader("PNG", 90, 90))
    placeholder = InternVLPlanner(CONFIG, PROCESSOR).placeholder(plan, lambda token: f"[{token}]")
    assert placeholder == f"<img>[{IDS['<|image_pad|>']}]</img>"
    messages = [{"role": "user", "content": [{"type": "image", "data": png(picture(300, 200, 1))}]}]
    prompt = PromptBuilder(folder_of("published")).build(messages)
    assert prompt.tokens.count(IDS["<|image_pad|>"]) == prompt.items[0].plan.rows == 28
    assert np.array_equal(prompt.positions.prompt, np.tile(np.arange(len(prompt.tokens)), (3, 1)))


def test_original_files(tmp_path: Path) -> None:
    """They have the same rows, decoder and prompts as the same model in transformers' layout."""
    original, folder = make_original_internvl(tmp_path), folder_of("published")
    assert torch.equal(*(torch.cat(tower_of(path).encode(INPUTS)) for path in (original, folder)))
    adapter, keys = load_adapter(original), Checkpoint(original).tensors
    assert sorted(adapter.encoder_keys(keys) + adapter.decoder_keys(keys)) == sorted(keys)
    ours, other = (load_adapter(path).load_decoder(Checkpoint(path), FP32, CPU) for path in (original, folder))
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), other.parameters(), strict=True))
    data = png(picture(300, 200, 1))
    content = [{"type": "text", "text": "a"}, {"type": "image", "data": data}, {"type": "image", "data": data}]
    first, second = (PromptBuilder(path).build([{"role": "user", "content": content}]) for path in (original, folder))
    assert (first.tokens, first.items[1].placement) == (second.tokens, second.items[1].placement)
    config = load_config(original)
    [made, other_made] = (
        list(InternVLPreprocessor(one, processor)(data, first.items[0].plan))
        for one, processor in ((config, {"image_mean": [9, 9, 9], "crop_size": 448}), (CONFIG, PROCESSOR))
    )
    assert [part.name for part in made] == [part.name for part in other_made]
    for text in ("<image>", "<IMG_CONTEXT>"):
        with pytest.raises(InvalidRequest, match=text):
            PromptBuilder(original).build([{"role": "user", "content": f"see {text}"}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ps_version": "v3"}, "ps_version"),
        ({"ps_version": ["v1"]}, "ps_version"),
        ({"use_thumbnail": "no"}, "use_thumbnail"),
        ({"select_layer": 9}, "vision_feature_layer"),
        ({"max_dynamic_patch": 10**9}, "max_patches"),
        ({"force_image_size": 10**9}, "image_size"),
        ({"llm_config": 3, "text_config": 3}, "text_config"),
        ({"vision_config": []}, "vision_config"),
        ({"dynamic_image_size": "yes"}, "dynamic_image_size"),
    ],
)
def test_bad_original_configs(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    config = load_config(make_original_internvl(tmp_path)) | settings
    with pytest.raises(CheckpointError, match=message):
        InternVLPlanner(config, {})
        InternVLChat(config)


def test_original_files_without_the_token(tmp_path: Path) -> None:
    original = make_original_internvl(tmp_path)
    tokenizer = original / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<IMG_CONTEXT>", "<OTHER>"))
    with pytest.raises(CheckpointError, match="<IMG_CONTEXT>"):
        PromptBuilder(original)
