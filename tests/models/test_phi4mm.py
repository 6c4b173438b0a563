"""Phi-4-multimodal: plans, pixels and rows as in its published files, both layouts' tensors, and bad configs."""

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import load_adapter
from tests.support.family_parts import tower_of
from tests.support.image_cases import picture, png
from tests.support.phi4 import grid, num_tokens
from tests.support.published_files import make_published_phi4
from tests.support.tiny import PHI4, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.phi4mm.encoder import Phi4MM
from triptych.models.phi4mm.plan import Phi4MMPlanner
from triptych.models.phi4mm.preprocess import Phi4MMPreprocessor
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext, ItemPlan, PixelBounds

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: ModelConfig = PHI4.config
PROCESSOR: dict[str, Any] = PHI4.preprocessor or {}
SIZES = [(56, 56), (300, 40), (40, 300), (200, 130), (700, 500), (33, 90), (9, 9), (1000, 90)]
"""Some tiles are white in part at the right, at the bottom, or not at all; some images have too many tiles."""


CONTEXT = {"max_position_embeddings": 4096}


def planned(width: int, height: int, **options: int) -> ItemPlan:
    return Phi4MMPlanner(CONFIG, PROCESSOR).plan(ImageHeader("PNG", width, height), ItemContext(options=options))


def inputs_of(width: int, height: int) -> list[EncoderInput]:
    data = png(picture(width, height, 1))
    plan = Phi4MMPlanner(CONFIG, PROCESSOR).plan(probe_image(data))
    return list(Phi4MMPreprocessor(CONFIG, PROCESSOR)(data, plan))


@pytest.mark.parametrize("count", [400, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_of_the_released_model(count: int) -> None:
    planner, source, counted = (
        Phi4MMPlanner({"model_type": "phi4_multimodal", **CONTEXT}, {}),
        0,
        0,
    )
    sizes = random.Random(1)
    while counted < count:
        width, height = (int(2 ** sizes.uniform(3, 12.5)) for _ in range(2))
        try:
            plan = planner.plan(ImageHeader("PNG", width, height))
        except BadMediaSize:
            source += 1
            continue
        counted += 1
        assert plan.rows == num_tokens(width, height)
        assert plan.parts[0].payload == grid(width, height, 448, 36)
        assert plan.is_whole
    assert source < count / 10


@pytest.mark.parametrize(("width", "height", "rows"), [(448, 448, 545), (1344, 896, 1841), (10, 10, 545)])
def test_published_numbers_of_tokens(width: int, height: int, rows: int) -> None:
    planner = Phi4MMPlanner({"model_type": "phi4_multimodal", **CONTEXT}, {})
    assert planner.plan(ImageHeader("PNG", width, height)).rows == rows


def test_a_request_may_have_fewer_tiles() -> None:
    assert planned(700, 500).parts[0].payload == (4, 3)
    assert planned(700, 500, dynamic_hd=4).parts[0].payload == grid(700, 500, 56, 4)
    assert planned(700, 500, dynamic_hd=1).parts[0].payload == (1, 1)
    assert planned(700, 500, dynamic_hd=12) == planned(700, 500)
    for header in (ImageHeader("PNG", 700, 500), ImageHeader("PNG", 56, 56)):
        with pytest.raises(BadMediaSize, match="dynamic_hd 13 exceeds the model's own, 12"):
            Phi4MMPlanner(CONFIG, PROCESSOR).plan(header, ItemContext(options={"dynamic_hd": 13}))
    low = ItemContext(PixelBounds(0, 2 * 56 * 56))
    assert Phi4MMPlanner(CONFIG, PROCESSOR).plan(ImageHeader("PNG", 700, 500), low).num_parts == 2
    assert Phi4MMPlanner(CONFIG, PROCESSOR).options.keys() == {"dynamic_hd"}


@pytest.mark.parametrize("size", [(2000, 11), (11, 2000)])
def test_thin_images_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadMediaSize, match="too thin"):
        planned(*size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("phi4"), "phi4_multimodal")


def test_layouts_are_one_model(folder: Path, tmp_path: Path) -> None:
    published = make_published_phi4(tmp_path / "phi4mm")
    towers = [tower_of(one) for one in (folder, published)]
    inputs = inputs_of(200, 130)
    for ours, theirs in zip(*(tower.encode(inputs) for tower in towers), strict=True):
        assert torch.equal(ours, theirs)
    decoder = load_adapter(published).load_decoder(Checkpoint(published), FP32, CPU)
    assert [(lora.name, lora.rank, lora.scale) for lora in decoder.config.loras] == [
        ("vision", 6, 0.5),
        ("speech", 4, 2.0),
    ]


def test_templates_that_take_strings_alone(tmp_path: Path) -> None:
    """Each part is a line; a request with an image has the vision LoRA."""
    builder = PromptBuilder(make_published_phi4(tmp_path))
    image = {"type": "image", "data": png(picture(60, 60, 1))}
    parts = [image, {"type": "text", "text": "What"}, image, {"type": "text", "text": "is it?"}]
    prompt = builder.build([{"role": "user", "content": parts}])
    text = "".join(builder.tokenizer.token_of(token) or "?" for token in dict.fromkeys(prompt.tokens))
    assert "<|endoftext10|>" in text
    first, second = (item.placement.spans for item in prompt.items)
    assert len(first) == len(second) == 1
    start = len(builder.tokenizer.encode("<|user|>", False))
    assert first[0].start == start
    assert second[0].start == first[0].end + len(builder.tokenizer.encode("\nWhat\n", False))
    assert prompt.lora == "vision"
    assert builder.build([{"role": "user", "content": "What?"}]).lora == ""


def changed(section: str, **settings: Any) -> ModelConfig:
    config = deepcopy(CONFIG)
    config[section] = config[section] | settings
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("vision_config", image_size=70, crop_size=70), "an even number of patches"),
        (changed("vision_config", crop_size=448), r"vision_config\.crop_size must be 56, not 448"),
        (changed("vision_config", feature_layer=5), "there are 3 layers"),
        (changed("vision_config", feature_layer=-9), "must be a layer's number"),
        (changed("vision_config", hd_transform_order="glb_sub"), "hd_transform_order must be 'sub_glb'"),
        (changed("vision_config", model_type="clip_vision_model"), "served is phi4_multimodal_vision"),
        (CONFIG | {"vision_lora": {"r": 0, "lora_alpha": 1}}, r"vision_lora\.r must be a positive integer"),
        (CONFIG | {"vision_lora": {"r": 3}}, "lora_alpha must be a number"),
    ],
)
def test_what_is_not_served_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Phi4MM(config)


@pytest.mark.parametrize("settings", [{"dynamic_hd": 37}, {"dynamic_hd": 0}, {"size": {"height": 448, "width": 448}}])
def test_bad_processors_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        Phi4MMPlanner(CONFIG, PROCESSOR | settings)


def test_plans_of_other_tiles_are_refused() -> None:
    """They come from another process."""
    data = png(picture(200, 130, 1))
    plan = Phi4MMPlanner(CONFIG, PROCESSOR).plan(probe_image(data))
    preprocess = Phi4MMPreprocessor(CONFIG, PROCESSOR)
    for payloads in (((5, 4), ()), ((36, 36), ()), ((0, 3), ()), ((), ()), ((4, 3), (1,)), ((4, 3),)):
        parts = tuple(
            type(part)(part.runs, part.patches, part.cost, part.tower, payload)
            for part, payload in zip(plan.parts, payloads, strict=False)
        )
        wrong = ItemPlan(**{name: getattr(plan, name) for name in plan.__struct_fields__} | {"parts": parts})
        with pytest.raises((PlanMismatch, BadMediaSize)):
            list(preprocess(data, wrong))


def test_a_missing_lora_is_named(tmp_path: Path) -> None:
    folder = make_published_phi4(tmp_path / "phi4mm")
    weights = load_file(folder / "model.safetensors")
    missing = "model.layers.1.mlp.down_proj.lora_B.speech.weight"
    save_file({name: it for name, it in weights.items() if name != missing}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"{missing}' is missing"):
        load_adapter(tmp_path).load_decoder(Checkpoint(tmp_path), FP32, CPU)
