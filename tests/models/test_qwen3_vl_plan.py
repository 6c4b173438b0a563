import math
import random
import subprocess
import sys
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch
from triptych.models.qwen3_vl.plan import Qwen3VLPlanner
from triptych.models.shared.geometry import ImageGeometry
from triptych.types import ImageHeader, ItemPlan, Placement, Span, VideoHeader

IMAGE, VIDEO = 7, 8
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE,
    "video_token_id": 8,
    "vision_start_token_id": 9,
    "vision_end_token_id": 10,
    "text_config": {"max_position_embeddings": 262144},
    "vision_config": {
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
    },
}
PROCESSOR = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2}


def planned(width: int, height: int, **processor: Any) -> ItemPlan:
    return Qwen3VLPlanner(CONFIG, processor).plan(ImageHeader("PNG", width, height))


@settings(max_examples=500)
@given(
    st.integers(1, 6000),
    st.integers(1, 6000),
    st.sampled_from([28, 32]),
    st.sampled_from([(3136, 1003520), (65536, 16777216), (1, 1024), (4096, 4096)]),
)
def test_resized_as_the_reference(height: int, width: int, factor: int, bounds: tuple[int, int]) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    geometry = ImageGeometry(factor // 2, 2, 2, *bounds)
    assert geometry.resized(height, width) == smart_resize(height, width, factor, *bounds)


def test_halves_round_to_even() -> None:
    assert planned(80, 80, min_pixels=1).resized_width == 64
    assert planned(112, 112, min_pixels=1).resized_width == 128


def test_plan_counts() -> None:
    plan = planned(640, 480, **PROCESSOR)
    assert plan.modality == "image"
    assert (plan.resized_height, plan.resized_width) == (480, 640)
    assert plan.grid == (1, 30, 40)
    assert plan.rows == 300
    assert plan.cost == 1200 * (1 + 1200 / (2 * 64 + 128))


def test_smallest_picture_becomes_whole_tokens() -> None:
    plan = planned(1, 1, **PROCESSOR)
    assert plan.resized_height * plan.resized_width >= 65536
    assert plan.rows == math.prod(plan.grid) // 4


@pytest.mark.parametrize(
    ("processor", "bounds"),
    [
        ({}, (56 * 56, 28 * 28 * 1280)),
        ({"size": None, "min_pixels": None}, (56 * 56, 28 * 28 * 1280)),
        ({"size": {"shortest_edge": 1024, "longest_edge": 9999}}, (1024, 9999)),
        ({"min_pixels": 1024}, (1024, 28 * 28 * 1280)),
        ({"min_pixels": 1024, "size": {"shortest_edge": 5, "longest_edge": 9999}}, (1024, 9999)),
        ({"max_pixels": 8192, "min_pixels": 2048, "size": {}}, (2048, 8192)),
    ],
)
def test_pixel_bounds_as_the_reference(processor: dict[str, Any], bounds: tuple[int, int]) -> None:
    geometry = ImageGeometry.from_configs(CONFIG, processor)
    assert (geometry.min_pixels, geometry.max_pixels) == bounds
    reference = Qwen2VLImageProcessorPil(**{key: deepcopy(value) for key, value in processor.items()})
    assert (reference.size["shortest_edge"], reference.size["longest_edge"]) == bounds


def test_too_many_pixels() -> None:
    with pytest.raises(MediaTooLarge, match=r"2500000000 pixels .* at most 50000000 "):
        planned(50_000, 50_000)


def test_source_limit_is_inclusive() -> None:
    assert planned(10_000, 5_000).rows > 0
    with pytest.raises(MediaTooLarge):
        planned(10_000, 5_001)


def test_aspect_ratio() -> None:
    assert planned(2000, 10).rows > 0
    with pytest.raises(BadMediaSize, match="200-fold"):
        planned(2001, 10)
    with pytest.raises(BadMediaSize, match="200-fold"):
        planned(10, 2001)


def test_zero_side() -> None:
    with pytest.raises(BadMediaSize, match="at least 1"):
        planned(0, 10)


@pytest.mark.parametrize(
    "path",
    [
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "text_config.max_position_embeddings",
        "vision_config.patch_size",
        "vision_config.spatial_merge_size",
        "vision_config.hidden_size",
        "vision_config.intermediate_size",
    ],
)
@pytest.mark.parametrize("value", [None, "16", 0, True, 1.5])
def test_bad_config_names_the_key(path: str, value: object) -> None:
    config = deepcopy(CONFIG)
    *parents, key = path.split(".")
    holder = config
    for parent in parents:
        holder = holder[parent]
    holder[key] = value
    with pytest.raises(CheckpointError, match=path):
        Qwen3VLPlanner(config, PROCESSOR)


@pytest.mark.parametrize(
    ("processor", "named"),
    [
        ({"size": {"shortest_edge": 5}}, "size.longest_edge"),
        ({"size": 5}, "size"),
        ({"min_pixels": "a"}, "min_pixels"),
        ({"patch_size": 14}, "patch_size is 14, but vision_config.patch_size of config.json is 16"),
    ],
)
def test_bad_processor_config_names_the_key(processor: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Qwen3VLPlanner(CONFIG, processor)


@pytest.fixture(scope="module")
def reference() -> Qwen3VLModel:
    """The model's methods without its modules: ``get_rope_index`` reads the config only."""
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig()
    return model


@pytest.mark.parametrize("num_prompts", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_positions_as_the_reference(reference: Any, num_prompts: int) -> None:
    random_source = random.Random(0)
    small = {"size": {"shortest_edge": 1024, "longest_edge": 65536}}
    planner = Qwen3VLPlanner(CONFIG, PROCESSOR | small, small)
    for _ in range(num_prompts):
        plans, placements, tokens = random_prompt(planner, random_source)
        ids = torch.tensor([tokens])
        expected, delta = reference.get_rope_index(
            ids,
            (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
            image_grid_thw=grids(plans, "image"),
            video_grid_thw=grids(plans, "video"),
        )
        positions = planner.positions(len(tokens), placements, plans)
        assert positions.prompt.dtype == np.float64
        np.testing.assert_array_equal(positions.prompt, expected[:, 0].numpy())
        assert positions.next_position == len(tokens) + delta.item()


def grids(plans: list[ItemPlan], modality: str) -> torch.Tensor | None:
    found = [plan.grid for plan in plans if plan.modality == modality]
    return torch.tensor(found) if found else None


def random_prompt(
    planner: Qwen3VLPlanner, random_source: random.Random
) -> tuple[list[ItemPlan], list[Placement], list[int]]:
    """Text, images, videos, text, …; the ends may be bare, but two runs of rows always have text between them, as in
    templates."""
    plans, placements = [], []
    tokens = [1] * random_source.choice([0, 1, 20])
    for _ in range(random_source.randrange(5)):
        width, height = random_source.randrange(4, 400), random_source.randrange(4, 400)
        if random_source.random() < 0.5:
            plans.append(planner.plan(ImageHeader("PNG", width, height)))
        else:
            frames, rate = random_source.randrange(1, 500), random_source.choice([1.0, 24.0, 29.97])
            plans.append(planner.plan(VideoHeader("MP4", width, height, frames, rate)))
        spans = []
        for length in planner.runs(plans[-1]):
            spans.append(Span(len(tokens), length))
            placeholder = planner.placeholder_tokens[plans[-1].modality]
            assert isinstance(placeholder, int)
            tokens += [placeholder] * length + [1] * random_source.choice([1, 2, 30])
        placements.append(Placement(tuple(spans)))
    if placements and random_source.random() < 0.3:
        tokens = tokens[: placements[-1].end]
    return plans, placements, tokens or [1]


def test_positions_of_nothing() -> None:
    positions = Qwen3VLPlanner(CONFIG, PROCESSOR).positions(0, [], [])
    assert positions.prompt.shape == (3, 0)
    assert positions.next_position == 0


@pytest.mark.parametrize("span", [Span(0, 299), Span(1, 300)])
def test_spans_that_are_not_as_planned(span: Span) -> None:
    planner = Qwen3VLPlanner(CONFIG, PROCESSOR)
    with pytest.raises(PlanMismatch, match="300"):
        planner.positions(300, [Placement((span,))], [planner.plan(ImageHeader("PNG", 640, 480))])


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, triptych.models.qwen3_vl.plan, triptych.models.qwen3_vl.preprocess, triptych.prompt.prompt, "
        "triptych.prompt.media, triptych.prompt.detokenize; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
