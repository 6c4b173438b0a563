"""LLaVA-1.5: plans, pixels, rows and keys as transformers has them, its own chat template, and bad configs."""

import io
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.llava.processing_llava import LlavaProcessor

from tests.support.checkpoints import edit_config, load_adapter
from tests.support.family_parts import config_of, tower_of
from tests.support.forward import random_input
from tests.support.random_checkpoint import write_json
from tests.support.tiny import IDS, OWN_TOWERS, make_tiny
from triptych.errors import BadMediaSize, MediaTooLarge, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.llava.config import text_config
from triptych.models.llava.encoder import Llava
from triptych.models.llava.plan import LlavaPlanner
from triptych.models.llava.preprocess import LlavaPreprocessor
from triptych.models.registry import backbone_of
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemPlan, Placement, Span

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
CONFIG: dict[str, Any] = OWN_TOWERS["llava"].config
PROCESSOR: dict[str, Any] = OWN_TOWERS["llava"].preprocessor or {}
INPUTS = [random_input((1, 5, 5), seed, 3 * 14 * 14) for seed in range(2)]

PUBLISHED_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<|image_pad|>\n' }}"
    "{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As in the published files, images first: it takes parts, and shows no content that is a string."""


def png(width: int, height: int) -> tuple[Image.Image, bytes]:
    noise = np.random.default_rng((width, height)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image, file = Image.fromarray(noise), io.BytesIO()
    image.save(file, "PNG")
    return image, file.getvalue()


@pytest.mark.parametrize("count", [20, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    """``_get_num_multimodal_tokens`` needs no tokenizer, which the rest of the processor does."""
    source = random.Random(1)
    for strategy in ("default", "full"):
        planner = LlavaPlanner(config_of("llava", vision_feature_select_strategy=strategy), PROCESSOR)
        reference = LlavaProcessor.__new__(LlavaProcessor)
        reference.patch_size, reference.num_additional_image_tokens = 14, 1
        reference.vision_feature_select_strategy, reference.image_token = strategy, "x"
        for _ in range(count):
            width, height = source.randint(20, 4000), source.randint(20, 4000)
            plan = planner.plan(ImageHeader("PNG", width, height))
            text = reference.replace_image_token({"pixel_values": [np.zeros((3, 75, 75))]}, 0)
            assert plan.rows == plan.rows_of(0) == len(text)
            assert (plan.grid, plan.num_parts, plan.is_whole) == ((1, 5, 5), 1, True)


def test_a_published_config_has_576_rows() -> None:
    """llava-1.5-7b's, which relies on the defaults of ``LlamaConfig``."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = {
        "model_type": "llava",
        "image_token_index": 32000,
        "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064},
        "vision_config": vision | {"image_size": 336, "patch_size": 14, "model_type": "clip_vision_model"},
    }
    planner = LlavaPlanner(config, {})
    plan = planner.plan(ImageHeader("JPEG", 1920, 1080))
    assert (plan.grid, plan.rows, planner.context_length) == ((1, 24, 24), 576, 4096)
    adapter = Llava(config)
    assert (adapter.decoder_config.hidden_size, adapter.decoder_config.num_layers) == (4096, 32)
    assert adapter.vision.feature_layers == (23,)


def test_tensors_that_only_older_files_have(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llava")
    weights = load_file(folder / "model.safetensors")
    weights["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(26)[None]
    save_file(weights, folder / "model.safetensors")
    tower_of(folder)


def test_positions_are_plain() -> None:
    planner = LlavaPlanner(CONFIG, PROCESSOR)
    plan: ItemPlan = planner.plan(ImageHeader("PNG", 90, 90))
    places = [Placement((Span(start=2, length=25),)), Placement((Span(start=27, length=25),))]
    found = planner.positions(60, places, [plan, plan])
    assert found.next_position == 60
    assert np.array_equal(found.prompt, np.tile(np.arange(60), (3, 1)))
    for wrong in (places[:1], places[::-1], [places[0], Placement((Span(start=27, length=24),))]):
        with pytest.raises(PlanMismatch):
            planner.positions(60, wrong, [plan, plan])


def test_an_input_of_another_grid() -> None:
    data = png(90, 60)[1]
    plan = LlavaPlanner(config_of("llava", vision_config={"image_size": 56}), PROCESSOR).plan(probe_image(data))
    with pytest.raises(PlanMismatch, match="grid"):
        list(LlavaPreprocessor(CONFIG, PROCESSOR)(data, plan))


@pytest.mark.parametrize(
    ("size", "pads", "error"),
    [
        ((20_000, 100), True, MediaTooLarge),
        ((50_000_000, 1), False, BadMediaSize),
        ((10_000, 10_000), False, MediaTooLarge),
        ((0, 1), False, BadMediaSize),
    ],
)
def test_planned_sizes_are_checked(size: tuple[int, int], pads: bool, error: type[Exception]) -> None:
    """Plans come from another process. The bytes aren't read."""
    processor = PROCESSOR | ({"image_processor_type": "LlavaImageProcessor", "do_pad": True} if pads else {})
    plan = LlavaPlanner(CONFIG, PROCESSOR).plan(ImageHeader("PNG", 90, 90))
    with pytest.raises(error):
        next(LlavaPreprocessor(CONFIG, processor)(b"", msgspec.structs.replace(plan, header=ImageHeader("PNG", *size))))


def test_the_backbone_is_that_of_the_text_config() -> None:
    for name in ("llama", "qwen2", "mistral"):
        text = CONFIG["text_config"] | {"model_type": name}
        assert backbone_of(CONFIG | {"text_config": text}) == backbone_of({"model_type": name})
    without = {name: value for name, value in CONFIG["text_config"].items() if name != "model_type"}
    assert text_config(CONFIG | {"text_config": without})["model_type"] == "llama"


def test_the_published_template(tmp_path: Path) -> None:
    """Strings become parts, which alone it shows, and a sequence starts as the tokenizer has it."""
    folder = make_tiny(tmp_path, "llava")
    (folder / "chat_template.jinja").write_text(PUBLISHED_TEMPLATE)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    start = "<|endoftext|>"
    special = {start: {"id": start, "ids": [IDS[start]], "tokens": [start]}}
    single = [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(
        folder / "tokenizer_config.json",
        json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": start},
    )
    builder = PromptBuilder(folder)
    assert builder.modalities == ["image"]
    alone = builder.build([{"role": "user", "content": "Why?"}])
    assert alone.tokens[0] == IDS[start]
    assert builder.tokenizer.decode(alone.tokens[1:]) == "USER: Why? ASSISTANT:"
    parts = [{"type": "text", "text": "Why?"}, {"type": "image", "data": png(90, 60)[1]}]
    prompt = builder.build([{"role": "user", "content": parts}])
    image = [IDS["<|image_pad|>"]] * 25
    assert prompt.tokens[:32] == [*alone.tokens[:7], *image]
    assert builder.tokenizer.decode(prompt.tokens[32:]) == "\nWhy? ASSISTANT:"


def test_saved_config(tmp_path: Path) -> None:
    """Either section may tie the head."""
    folder = make_tiny(tmp_path, "llava")
    edit_config(folder, text_config={"tie_word_embeddings": True})
    assert load_adapter(folder).decoder_config.tie_embeddings
