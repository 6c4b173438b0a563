"""Mistral 3: plans, pixels, rows and keys as transformers has them, its markers, and bad configs."""

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.support.checkpoints import load_adapter
from tests.support.image_cases import picture, png
from tests.support.tiny import OWN_TOWERS, ROW_IDS, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.mistral3.encoder import Mistral3
from triptych.models.mistral3.plan import Mistral3Planner
from triptych.models.mistral3.preprocess import Mistral3Preprocessor
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import MODEL_BOUNDS, ImageHeader, ItemContext, PixelBounds

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: ModelConfig = OWN_TOWERS["mistral3"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["mistral3"].preprocessor or {}
PUBLISHED: tuple[ModelConfig, dict[str, Any]] = (
    CONFIG | {"vision_config": CONFIG["vision_config"] | {"patch_size": 14}},
    {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
)


def changed(**settings: Any) -> ModelConfig:
    """The tiny config with these settings; a dict changes a section's."""
    config = deepcopy(CONFIG)
    for name, value in settings.items():
        config[name] = config[name] | value if isinstance(config.get(name), dict) and value else value
    return config


def reference_of(processor: dict[str, Any]) -> Any:
    return PixtralImageProcessorPil(**{name: it for name, it in processor.items() if name != "image_processor_type"})


def inputs_of(*images: Image.Image, bounds: PixelBounds = MODEL_BOUNDS) -> list[EncoderInput]:
    planner, preprocess = Mistral3Planner(CONFIG, PROCESSOR), Mistral3Preprocessor(CONFIG, PROCESSOR)
    return [
        part
        for one in images
        for part in preprocess(png(one), planner.plan(probe_image(png(one)), ItemContext(bounds)))
    ]


def pixels_of(part: EncoderInput) -> torch.Tensor:
    """Pixels [3, height, width] of patches, of which those of an embedding are consecutive."""
    _, rows, columns = part.grid
    squares = torch.from_numpy(part.patches).view(rows // 2, columns // 2, 2, 2, 3, 4, 4)
    return squares.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 4, columns * 4)


def check_pixels(width: int, height: int) -> None:
    image = picture(width, height, width + height)
    [part] = inputs_of(image)
    assert torch.equal(pixels_of(part), reference_of(PROCESSOR)([image], return_tensors="pt")["pixel_values"][0])


def test_pixels_are_the_pillow_processors() -> None:
    source = random.Random(0)
    sizes = [(1, 1), (140, 140), (190, 3), (2, 150), (141, 140), (8, 16)]
    for width, height in [*sizes, *((source.randint(1, 300), source.randint(2, 300)) for _ in "12345678")]:
        check_pixels(width, height)


@pytest.mark.slow
def test_pixels_of_many_sizes() -> None:
    source = random.Random(2)
    for _ in range(1000):
        check_pixels(source.randint(3, 500), source.randint(3, 500))


def plans_are_the_processors(count: int) -> None:
    source, planner = random.Random(1), Mistral3Planner(*PUBLISHED)
    reference = reference_of({"size": {"longest_edge": 1540}, "patch_size": {"height": 28, "width": 28}})
    for _ in range(count):
        width, height = source.randint(20, 4000), source.randint(20, 4000)
        plan = planner.plan(ImageHeader("PNG", width, height))
        # of an image that takes no memory
        empty = np.broadcast_to(np.zeros((), np.uint8), (3, height, width))
        expected = size_of(reference, empty)
        assert (plan.resized_height, plan.resized_width) == expected
        assert list(planner.runs(plan)) == [expected[1] // 28] * (expected[0] // 28)
        assert plan.is_whole


def size_of(reference: Any, empty: Any) -> tuple[int, int]:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    found: tuple[int, int] = get_resize_output_image_size(
        empty, (reference.size["longest_edge"],) * 2, (reference.patch_size["height"],) * 2, "channels_first"
    )
    return found


def test_plans_are_the_processors() -> None:
    plans_are_the_processors(300)


@pytest.mark.slow
def test_many_plans_are_the_processors() -> None:
    plans_are_the_processors(3000)


def test_bounds_of_the_area() -> None:
    planner = Mistral3Planner(CONFIG, PROCESSOR)

    def size(least: int, most: int, width: int = 130, height: int = 100) -> tuple[int, int]:
        plan = planner.plan(ImageHeader("PNG", width, height), ItemContext(PixelBounds(least, most)))
        return plan.resized_height, plan.resized_width

    assert [size(0, 0), size(0, 5000), size(9000, 0, 20, 10)] == [(104, 136), (56, 80), (72, 136)]
    assert planner.max_image_pixels == 144 * 144
    for least, most in ((0, 63), (0, 144 * 144 + 1), (5000, 4000)):
        with pytest.raises(BadMediaSize):
            size(least, most)
    [part] = inputs_of(picture(130, 100, 1), bounds=PixelBounds(0, 5000))
    assert part.grid == (1, 14, 20)


def test_an_input_that_isnt_planned(tmp_path: Path) -> None:
    data = png(picture(130, 100, 1))
    other = Mistral3Planner(CONFIG, PROCESSOR | {"size": {"longest_edge": 80}}).plan(probe_image(data))
    with pytest.raises(PlanMismatch, match="resized"):
        next(iter(Mistral3Preprocessor(CONFIG, PROCESSOR)(data, other)))
    [part] = inputs_of(picture(16, 16, 1))
    for grid in ((1, 4, 5), (1, 1, 16)):
        with pytest.raises(PlanMismatch, match="fill"):
            tower_of(make_tiny(tmp_path, "mistral3")).encode([EncoderInput(part.patches, grid, "name")])


def tower_of(folder: Path, weights: Any = FP32) -> Encoder:
    return load_adapter(folder).load_encoder(Checkpoint(folder), weights, CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_feature_layer": [1, 2]}, "vision_feature_layer"),
        ({"spatial_merge_size": 0}, "spatial_merge_size"),
        ({"spatial_merge_size": 10**6}, "side"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_config": {"hidden_act": "gelu_new"}}, "hidden_act"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_attention_heads": 5}}, "heads"),
        ({"vision_config": {"num_attention_heads": 24}}, "heads"),
        ({"vision_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"vision_config": {"num_channels": 1}}, "num_channels"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"vision_config": {"rope_parameters": [1]}}, "rope_parameters"),
        ({"vision_config": {"rope_parameters": {"rope_theta": 0.0}}}, "rope_theta"),
        ({"text_config": {"model_type": "mistral3"}}, "text_config.model_type"),
        ({"text_config": None}, "text_config"),
    ],
)
def test_bad_configs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Mistral3(changed(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"longest_edge": 7}}, "longest_edge"),
        ({"size": {"longest_edge": 10**6}}, "longest_edge"),
        ({"size": {"height": 140, "width": 140}}, "longest_edge"),
        ({"patch_size": {"height": 8, "width": 4}}, "patch_size"),
        ({"patch_size": 16}, "patch_size"),
        ({"patch_size": {"height": [8]}}, "patch_size"),
    ],
)
def test_bad_processors(settings: dict[str, Any], message: str) -> None:
    for kind in (Mistral3Planner, Mistral3Preprocessor):
        with pytest.raises(CheckpointError, match=message):
            kind(CONFIG, PROCESSOR | settings)


def test_markers_after_rows(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "mistral3")
    content = [{"type": "image", "data": png(picture(24, 20, 1))}]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    [item] = prompt.items
    image, row_end, image_end = (ROW_IDS[token] for token in ("<|image_pad|>", "[IMG_BREAK]", "[IMG_END]"))
    start = item.placement.spans[0].start
    row = [image] * 3
    assert prompt.tokens[start : start + 12] == [*row, row_end, *row, row_end, *row, image_end]
    assert np.array_equal(prompt.positions.prompt, np.tile(np.arange(len(prompt.tokens)), (3, 1)))
    for text in ("[IMG_BREAK]", "[IMG_END]"):
        with pytest.raises(InvalidRequest):
            PromptBuilder(folder).build([{"role": "user", "content": f"see {text}"}])
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("[IMG_END]", "[OTHER]"))
    with pytest.raises(CheckpointError, match="IMG_END"):
        PromptBuilder(folder)
