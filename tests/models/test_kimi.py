"""Kimi-VL and Kimi K2.5: plans, pixels and rows as transformers has K2.5's, and an independent implementation has
Kimi-VL's; published sizes, and bad configs."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.golden.make_kimi_images import FILE, SETTINGS
from tests.models.golden.make_videos import digest
from tests.support.family_parts import inputs_of
from tests.support.forward import assert_close
from tests.support.image_cases import picture, png
from tests.support.kimi import kimi_k25_pixels, kimi_vl_size
from tests.support.tiny import MOON_IDS, OWN_TOWERS, make_tiny
from tests.support.without_torchvision import functions_of
from triptych.errors import BadMediaSize, InvalidRequest, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.kimi.encoder import KimiK25, KimiVL
from triptych.models.kimi.plan import KimiK25Planner, KimiVLPlanner
from triptych.models.registry import FAMILIES, resolve
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import MODEL_BOUNDS, ImageHeader, ItemContext, ItemPlan, PixelBounds, VideoHeader

TYPES = ("kimi_vl", "kimi_k25")
FP32 = WEIGHT_FORMATS["float32"]
HALF = [0.5, 0.5, 0.5]
KIMI_VL: ModelConfig = {
    "model_type": "kimi_vl",
    "media_placeholder_token_id": 163605,
    "text_config": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "max_position_embeddings": 131072,
        "rope_theta": 800000.0,
        "rms_norm_eps": 1e-5,
    },
    "vision_config": {
        "model_type": "moonvit",
        "patch_size": 14,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
    },
}
"""Of Kimi-VL-A3B."""
KIMI_VL_PROCESSOR = {"in_token_limit": 4096, "patch_size": 14, "image_mean": HALF, "image_std": HALF, "pad_input": True}
K25_VISION = {
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 1152,
    "mm_projector_type": "patchmerger",
    "model_type": "",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
}
"""Of Kimi K2.5."""
K25: ModelConfig = KIMI_VL | {"model_type": "kimi_k25", "vision_config": K25_VISION}
K25_PROCESSOR = {"media_proc_cfg": {"in_patch_limit": 16384, "patch_size": 14, "patch_limit_on_one_side": 512}}


def planner_of(family: str) -> Any:
    tiny = OWN_TOWERS[family]
    return resolve(FAMILIES[family].planner)(tiny.config, tiny.preprocessor)


def row_by_row(part: EncoderInput, side: int = 14) -> torch.Tensor:
    """Pixels [patches, 3, side, side], row by row, of patches of which those of an embedding are consecutive."""
    _, rows, columns = part.grid
    squares = torch.from_numpy(part.patches).view(rows // 2, columns // 2, 2, 2, 3, side, side)
    return squares.transpose(1, 2).reshape(-1, 3, side, side)


def test_pixels_of_k25() -> None:
    """As an independent implementation of the processor has them. Transformers folds rescaling into mean and deviation:
    the test of its own pixels compares bits."""
    source = random.Random(0)
    sizes = [(1, 1), (140, 140), (190, 3), (2, 150), (28, 28), *((source.randint(1, 300), 90) for _ in "12345678")]
    images = [picture(*size, seed) for seed, size in enumerate(sizes)]
    expected = kimi_k25_pixels(OWN_TOWERS["kimi_k25"].preprocessor or {}, images)["pixel_values"]
    assert_close(torch.cat([row_by_row(part) for part in inputs_of("kimi_k25", *images)]), expected, 1e-6)


@pytest.mark.parametrize("case", json.loads(FILE.read_text()))
def test_pixels_are_those_of_transformers(case: dict[str, Any]) -> None:
    """Kimi K2.5's, by torchvision."""
    number = json.loads(FILE.read_text()).index(case)
    assert (OWN_TOWERS["kimi_k25"].preprocessor or {}).items() >= SETTINGS.items()
    [part] = inputs_of("kimi_k25", picture(case["width"], case["height"], number))
    assert list(part.grid) == case["grid"]
    assert digest(row_by_row(part).numpy()) == case["digest"]


def navit_resize() -> Callable[..., Any]:
    """The function of transformers, whose module needs torchvision."""
    file = "models/kimi_k25/image_processing_kimi_k25.py"
    names = functions_of(file, ("navit_resize",), {"math": math})
    function: Callable[..., Any] = names["navit_resize"]
    return function


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_references(count: int) -> None:
    source, resize = random.Random(1), navit_resize()
    vl, k25 = KimiVLPlanner(KIMI_VL, KIMI_VL_PROCESSOR), KimiK25Planner(K25, K25_PROCESSOR)
    for _ in range(count):
        width, height = source.randint(1, 4000), source.randint(20, 4000)
        header = ImageHeader("PNG", width, height)
        padded = kimi_vl_size(width, height, 4096)[2:]
        if max(width, height) <= 200 * min(width, height):
            check_plan(vl, header, padded)
            check_plan(k25, header, resize(height, width, 14, 2, 16384, 512)[1][::-1])


def check_plan(planner: KimiVLPlanner, header: ImageHeader, padded: tuple[int, int]) -> None:
    plan: ItemPlan = planner.plan(header)
    assert (plan.resized_width, plan.resized_height) == padded
    assert list(planner.runs(plan)) == [padded[0] * padded[1] // 28**2]
    assert padded[0] * padded[1] <= planner.max_image_pixels
    assert plan.is_whole


def test_no_plan_is_larger_than_stated() -> None:
    """Whatever the limit, down to a few patches."""
    source = random.Random(3)
    for _ in range(3000):
        limit, width, height = source.randint(1, 400), source.randint(6, 1200), source.randint(6, 1200)
        planner = KimiVLPlanner(KIMI_VL, KIMI_VL_PROCESSOR | {"in_token_limit": limit})
        plan = planner.plan(ImageHeader("PNG", width, height))
        assert plan.resized_width * plan.resized_height <= planner.max_image_pixels


def test_published_configs() -> None:
    """The sizes of Kimi-VL-A3B, and of Kimi K2.5's tower, which has the same."""
    adapters = KimiVL(KIMI_VL), KimiK25(K25)
    assert adapters[0].vision == adapters[1].vision
    vision, decoder = adapters[0].vision, adapters[0].decoder_config
    assert (vision.num_layers, vision.hidden_size, vision.intermediate_size, vision.num_heads) == (27, 1152, 4304, 16)
    assert (vision.table, vision.merge_size, vision.patch_size) == ((64, 64), 2, 14)
    assert (decoder.num_layers, decoder.hidden_size, decoder.vocab_size) == (27, 2048, 163840)
    planner = KimiVLPlanner(KIMI_VL, KIMI_VL_PROCESSOR)
    assert planner.context_length == 131072
    # 4,096 patches, or about a thousand embeddings, are the most
    sizes = {(896, 896): 1024, (28, 28): 1, (640, 480): 23 * 18, (4000, 3000): 37 * 28}
    assert {size: planner.plan(ImageHeader("PNG", *size)).rows for size in sizes} == sizes


def test_bounds_of_the_area() -> None:
    planner = planner_of("kimi_vl")

    def size(least: int, most: int, width: int = 130, height: int = 100) -> tuple[int, int]:
        plan = planner.plan(ImageHeader("PNG", width, height), ItemContext(bounds=PixelBounds(least, most)))
        return plan.resized_height, plan.resized_width

    assert [size(0, 0), size(0, 5000), size(20000, 0, 20, 10)] == [(112, 140), (56, 56), (112, 224)]
    for least, most in ((0, 700), (0, 10**7), (5000, 4000)):
        with pytest.raises(BadMediaSize):
            size(least, most)
    [part] = inputs_of("kimi_vl", picture(130, 100, 1), context=ItemContext(bounds=PixelBounds(0, 5000)))
    assert part.grid == (1, 4, 4)


def test_what_isnt_planned() -> None:
    planner = KimiVLPlanner(KIMI_VL, KIMI_VL_PROCESSOR)
    for header, error in (
        (VideoHeader("MP4", 90, 90, 4, 2.0), UnsupportedMedia),
        (ImageHeader("PNG", 201, 1), BadMediaSize),
        (ImageHeader("PNG", 7150, 40), BadMediaSize),  # 512 patches wide
        (ImageHeader("PNG", 10_000, 10_000), MediaTooLarge),
    ):
        with pytest.raises(error):
            planner.plan(header)
    assert KimiK25Planner(K25, K25_PROCESSOR).plan(ImageHeader("PNG", 9000, 50)).grid == (1, 4, 512)
    data = png(picture(130, 100, 1))
    tiny = OWN_TOWERS["kimi_vl"]
    preprocess = resolve(FAMILIES["kimi_vl"].preprocessor or "")(tiny.config, tiny.preprocessor)
    other = KimiVLPlanner(tiny.config, (tiny.preprocessor or {}) | {"in_token_limit": 4}).plan(probe_image(data))
    with pytest.raises(PlanMismatch, match="resized"):
        next(iter(preprocess(data, other)))


def test_placeholders(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "kimi_vl")
    content = [{"type": "image", "data": png(picture(60, 40, 1))}]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    [item] = prompt.items
    [span] = item.placement.spans
    assert item.plan.bounds == MODEL_BOUNDS
    assert prompt.tokens[span.start : span.end] == [MOON_IDS["<|image_pad|>"]] * 6
    for text in ("<|media_start|>", "<|media_content|>", "<|media_end|>"):
        with pytest.raises(InvalidRequest):
            PromptBuilder(folder).build([{"role": "user", "content": f"see {text}"}])
