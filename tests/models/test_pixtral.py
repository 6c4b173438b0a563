"""Pixtral: plans, pixels, rows and keys as transformers has them, its markers, and bad configs. What it shares with
Mistral 3 is in test_mistral3.py."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.pixtral.image_processing_pil_pixtral import (
    get_resize_output_image_size,
)

from tests.support.image_cases import picture, png
from tests.support.tiny import OWN_TOWERS, ROW_IDS, make_tiny
from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.llava.encoder import Llava
from triptych.models.pixtral.encoder import Pixtral
from triptych.models.pixtral.plan import PixtralPlanner
from triptych.models.registry import FAMILIES, family_of
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader

CONFIG: ModelConfig = OWN_TOWERS["llava+pixtral"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["llava+pixtral"].preprocessor or {}
PUBLISHED: ModelConfig = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_seq_length": 1,
    "image_token_index": 10,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 1024000,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "model_type": "pixtral",
        "patch_size": 16,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
"""Of Pixtral-12B."""


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    """Sizes, and as many rows as ``PixtralProcessor`` has."""
    source, planner = random.Random(1), PixtralPlanner(PUBLISHED, {})
    for _ in range(count):
        width, height = source.randint(20, 4000), source.randint(20, 4000)
        plan = planner.plan(ImageHeader("PNG", width, height))
        # of an image that takes no memory
        empty = np.broadcast_to(np.zeros((), np.uint8), (3, height, width))
        expected = get_resize_output_image_size(empty, (1024, 1024), (16, 16), "channels_first")
        assert (plan.resized_height, plan.resized_width) == expected
        assert list(planner.runs(plan)) == [expected[1] // 16] * (expected[0] // 16)
        assert plan.is_whole


def test_the_published_config() -> None:
    """The numbers of Pixtral-12B; an image of 1024 by 1024 has 64 rows of 64 embeddings and a marker."""
    adapter = Pixtral(PUBLISHED)
    vision, decoder = adapter.vision, adapter.decoder_config
    assert (vision.num_layers, vision.hidden_size, vision.intermediate_size, vision.num_heads) == (24, 1024, 4096, 16)
    assert (vision.features_of, vision.merge_size, vision.activation) == (24, 1, "silu")
    assert (decoder.num_layers, decoder.hidden_size, decoder.tie_embeddings) == (40, 5120, False)
    planner = PixtralPlanner(PUBLISHED, {})
    assert planner.context_length == 1024000
    plan = planner.plan(ImageHeader("PNG", 1024, 1024))
    assert (plan.rows, len(planner.runs(plan))) == (4096, 64)


def test_the_tower_decides_on_the_family() -> None:
    assert family_of(PUBLISHED) is FAMILIES["llava+pixtral"]
    assert family_of(OWN_TOWERS["llava"].config) is FAMILIES["llava"]
    assert family_of({"model_type": "llava"}) is FAMILIES["llava"]
    with pytest.raises(CheckpointError, match="model_type"):
        family_of(PUBLISHED | {"model_type": "llava+pixtral"})
    with pytest.raises(CheckpointError, match="model_type 'pixtral'"):
        Llava(PUBLISHED)


def test_markers_after_rows(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llava+pixtral")
    content = [{"type": "image", "data": png(picture(24, 20, 1))}]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    [item] = prompt.items
    image, row_end, image_end = (ROW_IDS[token] for token in ("<|image_pad|>", "[IMG_BREAK]", "[IMG_END]"))
    start = item.placement.spans[0].start
    row = [image] * 3
    assert prompt.tokens[start : start + 12] == [*row, row_end, *row, row_end, *row, image_end]


def test_mistrals_own_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"dim": 5120}))
    with pytest.raises(CheckpointError, match=r"params\.json, so it is in Mistral's own format"):
        PromptBuilder(tmp_path)
