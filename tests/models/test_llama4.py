"""Llama 4: plans, pixels, rows and keys as transformers has them, its separators, and bad configs."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.models.golden.make_llama4_images import FILE, SIZE, image
from tests.models.golden.make_videos import digest
from tests.support.image_cases import picture, png
from tests.support.llama4 import Llama4Pixels
from tests.support.tiny import OWN_TOWERS, TILE_IDS, make_tiny
from triptych.api.media_parts import MediaSettings
from triptych.errors import BadMediaSize, InvalidRequest, PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.llama4.encoder import Llama4
from triptych.models.llama4.plan import Llama4Planner
from triptych.models.llama4.preprocess import Llama4Preprocessor
from triptych.models.llama4.tiles import CanvasTiles
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext, OptionValue, PixelBounds

CONFIG: ModelConfig = OWN_TOWERS["llama4"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["llama4"].preprocessor or {}
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
PUBLISHED: ModelConfig = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 202048,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 4096,
    },
}
"""Of Llama 4 Scout."""


def inputs_of(
    *images: Image.Image, processor: dict[str, Any] = PROCESSOR, options: dict[str, OptionValue] | None = None
) -> list[EncoderInput]:
    planner, preprocess = Llama4Planner(CONFIG, processor), Llama4Preprocessor(CONFIG, processor)
    context = ItemContext(options=options or {})
    return [part for one in images for part in preprocess(png(one), planner.plan(probe_image(png(one)), context))]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("asked", [False, True])
def test_pixels_are_the_processors(number: int, asked: bool) -> None:
    """Whether the checkpoint or the request says how many tiles there are."""
    case = CASES[number]
    settings = case.get("settings", {})
    options = {name: it for name, it in settings.items() if name in Llama4Planner.options} if asked else {}
    processor = {"size": SIZE} | {name: it for name, it in settings.items() if name not in options}
    one = Image.fromarray(image(number, case["height"], case["width"]))
    parts = inputs_of(one, processor=processor, options=options)
    rows, columns = case["tiles"]
    assert len(parts) == rows * columns + (rows * columns > 1)
    assert digest(np.concatenate([part.patches for part in parts])) == case["digest"]


def test_pixels_of_the_tests_processor() -> None:
    """Its pixels are the reference's, too: what other tests compare with."""
    for number, case in enumerate(CASES):
        processor = Llama4Pixels({"size": SIZE} | case.get("settings", {}))
        pixels = processor.tiles(image(number, case["height"], case["width"])).float()
        patches = pixels.view(-1, 3, 4, 14, 4, 14).permute(0, 2, 4, 1, 3, 5)
        assert digest(patches.contiguous().numpy()) == case["digest"]


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    """Sizes of the scaled image and of its canvas, from which rows follow."""
    source = random.Random(1)
    for settings in ({}, {"max_patches": 5}, {"resize_to_max_canvas": True}):
        planner, tiles_of = Llama4Planner(PUBLISHED, settings), CanvasTiles.from_config(settings, 336)
        processor = Llama4Pixels({"size": {"height": 336}} | settings)
        for number in range(count):
            width, height = source.randint(30, 5000), source.randint(30, 5000)
            if number % 4 == 0:  # at the edges between canvases
                width, height = source.randint(1, 9) * 168, source.randint(1, 9) * 168
            plan = planner.plan(ImageHeader("PNG", width, height))
            scaled, canvas = processor.sizes(height, width)
            assert (plan.resized_height, plan.resized_width) == canvas
            assert tiles_of.canvas(height, width).scaled == scaled
            tiles = canvas[0] * canvas[1] // 336**2
            assert plan.rows == 144 * (tiles + (tiles > 1))
            assert plan.is_whole


def test_the_published_config() -> None:
    """The numbers of Llama 4 Scout; an image of 1024 by 768 has 3 rows of 4 tiles and the whole."""
    adapter = Llama4(PUBLISHED)
    clip, decoder = adapter.vision.clip, adapter.decoder_config
    assert (clip.num_layers, clip.hidden_size, clip.num_heads, clip.states) == (34, 1408, 16, 577)
    assert (adapter.vision.rows, adapter.vision.adapter_width, adapter.vision.merge_size) == (144, 4096, 2)
    assert (decoder.num_layers, decoder.hidden_size, decoder.tie_embeddings) == (48, 5120, False)
    planner = Llama4Planner(PUBLISHED, {})
    assert planner.context_length == 10485760
    plan = planner.plan(ImageHeader("PNG", 1024, 768))
    assert (plan.rows, plan.num_parts, len(planner.runs(plan))) == (13 * 144, 13, 13)


def test_options_of_a_request() -> None:
    planner, header = Llama4Planner(PUBLISHED, {}), ImageHeader("PNG", 1000, 1000)
    assert planner.plan(header).num_parts == 10
    assert planner.plan(header, ItemContext(options={"max_patches": 5})).num_parts == 5
    small = ImageHeader("PNG", 100, 100)
    assert planner.plan(small).num_parts == 1
    assert planner.plan(small, ItemContext(options={"resize_to_max_canvas": True})).num_parts == 17
    low = ItemContext(PixelBounds(max_pixels=512 * 512), options={"max_patches": 5})
    assert planner.plan(header, low).num_parts == 1
    assert planner.plan(small, ItemContext(PixelBounds(min_pixels=2 * 336**2))).num_parts == 3
    with pytest.raises(BadMediaSize, match="max_patches 17 exceeds the model's own, 16"):
        planner.plan(header, ItemContext(options={"max_patches": 17}))
    with pytest.raises(BadMediaSize, match="no image has"):
        planner.plan(header, ItemContext(PixelBounds(max_pixels=336)))
    MediaSettings.from_options(planner.options, {"max_patches": 4, "resize_to_max_canvas": True})
    with pytest.raises(InvalidRequest, match="fps"):
        MediaSettings.from_options(planner.options, {"fps": 2})


def test_plans_of_other_processes_are_checked() -> None:
    data = png(picture(200, 150, 1))
    plan = Llama4Planner(CONFIG, PROCESSOR).plan(probe_image(data))
    for other in ({"max_patches": 2}, {"resize_to_max_canvas": True, "max_patches": 3}):
        with pytest.raises(PlanMismatch, match="its plan says otherwise"):
            list(Llama4Preprocessor(CONFIG, PROCESSOR | other)(data, plan))


def test_separators_between_tiles(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama4")
    content = [{"type": "image", "data": png(one)} for one in (picture(100, 100, 1), picture(40, 30, 2))]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    start, end, whole, column, row = (
        number for token, number in TILE_IDS.items() if number >= TILE_IDS["<|image_start|>"]
    )
    tile = [TILE_IDS["<|image_pad|>"]] * 4
    assert [len(item.placement.spans) for item in prompt.items] == [5, 1]
    first = prompt.items[0].placement.start - 1
    line = [*tile, column, *tile, row]
    large, small = [start, *line, *line, whole, *tile, end], [start, whole, *tile, end]
    assert prompt.tokens[first : first + len(large)] == large
    second = prompt.items[1].placement.start - 2
    assert prompt.tokens[second : second + len(small)] == small
