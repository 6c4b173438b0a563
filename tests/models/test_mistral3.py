"""Mistral 3: plans, pixels, rows and keys as transformers has them, its markers, and bad configs."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.support.family_parts import inputs_of
from tests.support.image_cases import picture, png
from tests.support.tiny import OWN_TOWERS, ROW_IDS, make_tiny
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import ModelConfig
from triptych.models.mistral3.plan import Mistral3Planner
from triptych.models.mistral3.preprocess import Mistral3Preprocessor
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext, PixelBounds

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: ModelConfig = OWN_TOWERS["mistral3"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["mistral3"].preprocessor or {}
PUBLISHED: tuple[ModelConfig, dict[str, Any]] = (
    CONFIG | {"vision_config": CONFIG["vision_config"] | {"patch_size": 14}},
    {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
)


def reference_of(processor: dict[str, Any]) -> Any:
    return PixtralImageProcessorPil(**{name: it for name, it in processor.items() if name != "image_processor_type"})


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
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
    [part] = inputs_of("mistral3", picture(130, 100, 1), context=ItemContext(PixelBounds(0, 5000)))
    assert part.grid == (1, 14, 20)


def test_an_input_that_isnt_planned() -> None:
    data = png(picture(130, 100, 1))
    other = Mistral3Planner(CONFIG, PROCESSOR | {"size": {"longest_edge": 80}}).plan(probe_image(data))
    with pytest.raises(PlanMismatch, match="resized"):
        next(iter(Mistral3Preprocessor(CONFIG, PROCESSOR)(data, other)))


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
