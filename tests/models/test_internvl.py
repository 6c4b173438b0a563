"""InternVL: plans, pixels, rows and keys as transformers has them, its markers, and bad configs."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.support.checkpoints import load_adapter
from tests.support.family_parts import config_of, tower_of
from tests.support.forward import random_input
from tests.support.image_cases import picture, png
from tests.support.published_files import make_original_internvl
from tests.support.tiny import IDS, OWN_TOWERS, make_tiny
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.internvl.encoder import InternVLChat
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


def reference_of(processor: dict[str, Any]) -> GotOcr2ImageProcessorPil:
    return GotOcr2ImageProcessorPil(**{name: it for name, it in processor.items() if name != "image_processor_type"})


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    source = random.Random(1)
    config = config_of("internvl", vision_config={"image_size": 448}, image_seq_length=256)
    for bounds in ({}, {"min_patches": 2, "max_patches": 6}, {"max_patches": 40}, {"max_patches": 1}):
        planner, reference = InternVLPlanner(config, PUBLISHED | bounds), reference_of(PUBLISHED | bounds)
        for _ in range(count):
            width, height = source.randint(20, 4000), source.randint(20, 4000)
            plan = planner.plan(ImageHeader("PNG", width, height))
            tiles = reference.get_number_of_image_patches(height, width)
            assert (plan.num_parts, plan.rows, plan.part_rows) == (tiles, 256 * tiles, 256)
            assert plan.is_whole
            assert plan.patches == 1024 * tiles


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


def test_markers_around_an_image(tmp_path: Path) -> None:
    plan: ItemPlan = InternVLPlanner(CONFIG, PROCESSOR).plan(ImageHeader("PNG", 90, 90))
    placeholder = InternVLPlanner(CONFIG, PROCESSOR).placeholder(plan, lambda token: f"[{token}]")
    assert placeholder == f"<img>[{IDS['<|image_pad|>']}]</img>"
    messages = [{"role": "user", "content": [{"type": "image", "data": png(picture(300, 200, 1))}]}]
    prompt = PromptBuilder(make_tiny(tmp_path, "internvl")).build(messages)
    assert prompt.tokens.count(IDS["<|image_pad|>"]) == prompt.items[0].plan.rows == 28
    assert np.array_equal(prompt.positions.prompt, np.tile(np.arange(len(prompt.tokens)), (3, 1)))


def test_original_files(tmp_path: Path) -> None:
    """They have the same rows, decoder and prompts as the same model in transformers' layout."""
    original, folder = make_original_internvl(tmp_path / "original"), make_tiny(tmp_path / "published", "internvl")
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
