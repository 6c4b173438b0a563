"""Gemma 4: plans, pixels and rows of images as transformers has them, its markers, and bad configs."""

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from tests.support.checkpoints import load_adapter, load_reference
from tests.support.family_parts import config_of, inputs_of, tower_of
from tests.support.forward import Pool, Prompt, Running, assert_close, step
from tests.support.gemma4 import in_rows
from tests.support.image_cases import picture, png
from tests.support.tiny import GEMMA4, GEMMA4_VISION, GEMMA_IDS, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.layers.tower_layer import TowerLayer
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.gemma4.plan import Gemma4Planner
from triptych.models.gemma4.preprocess import Gemma4Preprocessor
from triptych.models.registry import FAMILIES, family_of
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import MODEL_BOUNDS, ImageHeader, ItemContext, PixelBounds

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: ModelConfig = GEMMA4.config
GEMMA = "gemma4+gemma4_vision"
PROCESSOR: dict[str, Any] = GEMMA4.preprocessor or {}
PUBLISHED = CONFIG | {f"{kind}_config": {"model_type": f"gemma4_{kind}"} for kind in ("vision", "audio")}
"""With the published sizes of patches, pools and tables of positions."""
FACTOR = 12


def reference_of(processor: dict[str, Any]) -> Any:
    return Gemma4ImageProcessorPil(**{name: it for name, it in processor.items() if name != "image_processor_type"})


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    source = random.Random(1)
    for _ in range(count):
        rows = source.choice((70, 140, 280, 560, 1120))
        planner = Gemma4Planner(PUBLISHED, {"max_soft_tokens": rows})
        width, height = source.randint(20, 4000), source.randint(20, 4000)
        if source.random() < 0.2:
            height = -(-width // source.randint(50, 199))
        if source.random() < 0.5:
            width, height = height, width
        plan = planner.plan(ImageHeader("PNG", width, height))
        expected = get_aspect_ratio_preserving_size(height, width, 16, rows * 9, 3)
        assert (plan.resized_height, plan.resized_width) == expected
        assert list(planner.runs(plan)) == [expected[0] * expected[1] // 48**2]
        assert plan.is_whole
        assert plan.rows <= rows


def test_published_numbers_of_tokens() -> None:
    """Images become at most 280 by default, and fewer if their shape leaves a rest."""
    planner = Gemma4Planner(PUBLISHED, {})
    sizes = ((640, 480), (1920, 1080), (768, 768), (10, 2000), (5000, 25))
    rows = [planner.plan(ImageHeader("PNG", *size)).rows for size in sizes]
    assert rows == [266, 264, 256, 236, 236]
    assert planner.max_image_pixels == 280 * 48 * 48


def test_more_embeddings_than_by_default() -> None:
    """The preprocessor checks plans, which come from another process."""
    config = config_of(GEMMA, vision_config={"position_embedding_size": 420})
    planner, preprocess = Gemma4Planner(config, PROCESSOR), Gemma4Preprocessor(config, PROCESSOR)
    data = png(picture(130, 100, 1))
    [part] = preprocess(data, planner.plan(probe_image(data), ItemContext(options={"max_soft_tokens": 140})))
    made = reference_of(PROCESSOR | {"max_soft_tokens": 140})([picture(130, 100, 1)], return_tensors="pt")
    assert torch.equal(in_rows(part), made["pixel_values"][0, : len(part.patches)])
    with pytest.raises(BadMediaSize):
        planner.plan(probe_image(data), ItemContext(options={"max_soft_tokens": 280}))


def test_bounds_of_the_area() -> None:
    """``max_pixels`` and ``max_soft_tokens`` lower and raise the number of tokens."""
    planner = Gemma4Planner(PUBLISHED, {})

    def size(least: int, most: int) -> tuple[int, int]:
        plan = planner.plan(ImageHeader("PNG", 640, 480), ItemContext(PixelBounds(least, most)))
        return plan.resized_height, plan.resized_width

    for rows in (1, 70, 140):
        expected = get_aspect_ratio_preserving_size(480, 640, 16, rows * 9, 3)
        assert size(0, rows * 48 * 48) == size(0, rows * 48 * 48 + 1) == size(48 * 48, rows * 48 * 48) == expected
    assert size(266 * 48 * 48, 0) == (672, 912)
    assert size(0, 1120 * 48 * 48) == get_aspect_ratio_preserving_size(480, 640, 16, 1120 * 9, 3)
    for rows in (70, 560, 1120):
        context = ItemContext(options={"max_soft_tokens": rows})
        plan = planner.plan(ImageHeader("PNG", 640, 480), context)
        assert (plan.resized_height, plan.resized_width) == size(0, rows * 48 * 48)
    for context in (
        ItemContext(options={"max_soft_tokens": 100}),
        ItemContext(PixelBounds(0, 500_000), options={"max_soft_tokens": 140}),
    ):
        with pytest.raises(BadMediaSize, match="max_soft_tokens"):
            planner.plan(ImageHeader("PNG", 640, 480), context)
    for least, most in ((0, 48 * 48 - 1), (0, 1121 * 48 * 48), (267 * 48 * 48, 0), (5000, 4000)):
        with pytest.raises(BadMediaSize):
            size(least, most)
    [part] = inputs_of(GEMMA, picture(130, 100, 1), context=ItemContext(PixelBounds(0, 20 * FACTOR**2)))
    assert part.grid == (1, 9, 15)


def test_an_input_that_isnt_planned(tmp_path: Path) -> None:
    data = png(picture(130, 100, 1))
    other = Gemma4Planner(CONFIG, PROCESSOR).plan(probe_image(data), ItemContext(PixelBounds(0, 3000)))
    with pytest.raises(PlanMismatch, match="resized"):
        next(iter(Gemma4Preprocessor(CONFIG, PROCESSOR)(data, _with_bounds(other))))
    with pytest.raises(PlanMismatch, match="more than 210"):
        tower_of(make_tiny(tmp_path, GEMMA)).encode(
            [EncoderInput(np.zeros((639, 48), np.float32), (1, 3, 213), "name")]
        )


def _with_bounds(plan: Any) -> Any:
    from msgspec.structs import replace

    return replace(plan, bounds=MODEL_BOUNDS)


IMAGES = [picture(200, 150, 1), picture(31, 90, 2), picture(16, 8, 3), picture(300, 9, 4)]


def test_layers_without_clipping_are_compiled(tmp_path: Path) -> None:
    """To the same rows as module by module."""
    folder = make_tiny(tmp_path, GEMMA, config={"vision_config": GEMMA4_VISION | {"use_clipped_linears": False}})
    parts, tower = inputs_of(GEMMA, *IMAGES), cast(Any, tower_of(folder)).towers["vision"]
    found = torch.cat(tower.encode(parts))
    for layer in tower.layers:
        assert isinstance(layer, TowerLayer)
        assert layer.compiled_attend is not None
        assert layer.compiled_finish is not None
        layer.compiled_attend = layer.compiled_finish = None
    assert torch.equal(torch.cat(tower.encode(parts)), found)


def test_bounds_the_wrong_way_round(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, GEMMA)
    weights = load_file(folder / "model.safetensors")
    weights["model.vision_tower.encoder.layers.1.mlp.up_proj.input_max"] = torch.tensor(-9.0)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"input_min -1.* exceeds .*input_max -9"):
        tower_of(folder)


def test_markers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, GEMMA)
    content = [{"type": "image", "data": png(picture(24, 20, 1))}]
    prompt = PromptBuilder(folder).build([{"role": "user", "content": content}])
    [item] = prompt.items
    image, start, end = (GEMMA_IDS[token] for token in ("<|image_pad|>", "<|image>", "<image|>"))
    [span] = item.placement.spans
    assert prompt.tokens[span.start - 1 : span.end + 1] == [start, *[image] * item.plan.rows, end]
    assert np.array_equal(prompt.positions.prompt, np.tile(np.arange(len(prompt.tokens)), (3, 1)))
    for text in ("<|image>", "<image|>", "<|image_pad|>"):
        with pytest.raises(InvalidRequest):
            PromptBuilder(folder).build([{"role": "user", "content": f"see {text}"}])


def test_a_placeholder_without_media_is_embedded_as_padding(tmp_path: Path) -> None:
    """A model may say one. Transformers' logits, whole and token by token."""
    folder = make_tiny(tmp_path, GEMMA, config={"text_config": CONFIG["text_config"] | {"pad_token_id": 7}})
    tokens = torch.tensor([5, GEMMA_IDS["<|image_pad|>"], 9, GEMMA_IDS["<|audio_pad|>"], GEMMA_IDS["<|video_pad|>"], 3])
    expected = load_reference(folder)(tokens[None]).logits[0]
    adapter = load_adapter(folder)
    positions = torch.arange(len(tokens), dtype=torch.float64).expand(3, -1)
    prompt = Prompt(tokens, positions, torch.arange(0), torch.zeros(0, adapter.embedding_width))
    for chunk in (len(tokens), 1):
        pool, running = Pool(adapter.load_decoder(Checkpoint(folder), FP32, CPU)), Running(prompt)
        found = torch.cat([step(pool, [(running, chunk)]) for _ in range(len(tokens) // chunk)])
        assert_close(found, expected, 1e-4)


def test_a_model_without_towers_takes_text_alone() -> None:
    assert family_of(CONFIG) is FAMILIES[GEMMA]
    for nothing in (
        CONFIG | {"vision_config": None},
        {name: it for name, it in CONFIG.items() if "vision" not in name},
    ):
        assert family_of(nothing) is FAMILIES["gemma4"]
