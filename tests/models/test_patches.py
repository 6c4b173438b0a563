"""Plans and patches as the reference processor's, of families other than Qwen3-VL."""

import io
import random
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.families import PATCHES
from tests.support.tiny import PREPROCESSOR, TINY
from triptych.errors import CheckpointError
from triptych.models.base import Planner
from triptych.models.registry import family_of, resolve
from triptych.models.shared.planner import VisionCostModel
from triptych.prompt.probe import probe_image
from triptych.types import ImageHeader

BOUNDS = {"min_pixels": 4 * 28 * 28, "max_pixels": 40 * 28 * 28}


def planner(family: str, processor: dict[str, Any], **vision: Any) -> Planner:
    config = deepcopy(TINY[family].config)
    config.get("thinker_config", config)["vision_config"] |= vision
    made: Planner = resolve(family_of(config).planner)(config, processor)
    return made


@pytest.mark.parametrize("family", PATCHES)
@pytest.mark.parametrize("processor", [PREPROCESSOR, PREPROCESSOR | BOUNDS])
@pytest.mark.parametrize("num_images", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_as_the_reference(family: str, processor: dict[str, Any], num_images: int) -> None:
    source = random.Random(0)
    config = TINY[family].config
    preprocess = resolve(family_of(config).preprocessor or "")(config, processor)
    known = ("min_pixels", "max_pixels", "patch_size", "image_mean", "image_std")
    reference = Qwen2VLImageProcessorPil(**{key: processor[key] for key in known})
    for _ in range(num_images):
        size = source.randint(1, 700), source.randint(4, 700)
        noise = np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        image, file = Image.fromarray(noise), io.BytesIO()
        image.save(file, "PNG")
        plan = planner(family, processor).plan(probe_image(file.getvalue()))
        (result,), expected = preprocess(file.getvalue(), plan), reference(image, return_tensors="np")
        assert plan.grid == result.grid == tuple(expected["image_grid_thw"][0])
        assert plan.rows == len(result.patches) // 4
        np.testing.assert_array_equal(result.patches, expected["pixel_values"])


def test_positions_are_the_grids() -> None:
    plan = planner("qwen2_5_vl", PREPROCESSOR).plan(ImageHeader("PNG", 84, 56))
    assert (plan.grid, plan.rows) == ((1, 4, 6), 6)


def test_cost_counts_every_product() -> None:
    """A layer's multiplications, counted one by one; windowed attention is linear in the number of patches."""
    full, gated = VisionCostModel(32, 40), VisionCostModel(32, 40, mlp_matrices=3)
    linear = 4 * 32 * 32 + 2 * 32 * 40
    assert full.cost(100) == pytest.approx((100 * linear + 2 * 100 * 100 * 32) / linear)
    assert gated.cost(100) == pytest.approx(100 + 2 * 100 * 100 * 32 / (linear + 32 * 40))
    windows = VisionCostModel(32, 40, windowed_share=1.0, window=16)
    assert windows.cost(1600) == pytest.approx(100 * windows.cost(16))
    half = VisionCostModel(32, 40, windowed_share=0.5, window=16)
    assert half.cost(1600) == pytest.approx((windows.cost(1600) + full.cost(1600)) / 2)


def test_windows_make_large_images_cheaper() -> None:
    header = ImageHeader("PNG", 252, 252)
    windowed = planner("qwen2_5_vl", PREPROCESSOR).plan(header)
    full = planner("qwen2_5_vl", PREPROCESSOR, fullatt_block_indexes=[0, 1, 2, 3]).plan(header)
    assert windowed.rows == full.rows
    assert windowed.cost < full.cost


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen2_vl", "embed_dim"),
        ("qwen2_vl", "patch_size"),
        ("qwen2_5_vl", "window_size"),
        ("qwen2_5_vl", "fullatt_block_indexes"),
        ("qwen2_5_vl", "intermediate_size"),
    ],
)
def test_bad_config_names_the_key(family: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        planner(family, PREPROCESSOR, **{key: "x"})
