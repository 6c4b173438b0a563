"""CogVLM2: plans, pixels, rows and prompts as in its published code, which tests/support/cogvlm2.py describes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import edit_config, load_adapter, load_reference
from tests.support.cogvlm2 import pixels_of, positions_of, question
from tests.support.family_parts import tower_of
from tests.support.forward import assert_rows
from tests.support.image_cases import picture, png
from tests.support.released import RELEASED
from tests.support.tiny import OWN_TOWERS, make_tiny
from triptych.errors import CheckpointError, InvalidRequest, PlanMismatch, UnsupportedMedia
from triptych.layers.decoder_config import SecondWeights
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import EncoderInput
from triptych.models.cogvlm2.encoder import CogVLM2
from triptych.models.cogvlm2.plan import CogVLM2Planner
from triptych.models.cogvlm2.preprocess import CogVLM2Preprocessor
from triptych.models.registry import family_of
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import ImageHeader, ItemContext

TINY = OWN_TOWERS["cogvlm2"]
CONFIG: dict[str, Any] = TINY.config
PUBLISHED: dict[str, Any] = RELEASED["cogvlm2"].tiny("cogvlm2").config
FP32, CPU = WEIGHT_FORMATS["float32"], torch.device("cpu")
SIDE = CONFIG["vision_config"]["image_size"]
SIZES = ((200, 150), (1, 1), (5, 9), (900, 700), (84, 84), (3, 400), (400, 3))
"""One image, tiny, huge and thin ones."""


def preprocessed(width: int, height: int) -> EncoderInput:
    data = png(picture(width, height, width))
    [part] = CogVLM2Preprocessor(CONFIG, {})(data, CogVLM2Planner(CONFIG, {}).plan(probe_image(data)))
    return part


def test_published_figures() -> None:
    """An image of 1344 pixels per side becomes 96 by 96 patches, and 48 by 48 rows within two more."""
    planner = CogVLM2Planner(PUBLISHED, {})
    plan = planner.plan(ImageHeader("PNG", 640, 480))
    assert (plan.resized_height, plan.resized_width, plan.grid) == (1344, 1344, (1, 96, 96))
    assert (plan.patches, plan.rows, plan.second, plan.is_whole) == (9216, 2306, 2305, True)
    adapter = CogVLM2(PUBLISHED)
    assert adapter.vision.num_layers == 63
    assert isinstance(adapter.decoder_config.second, SecondWeights)
    [(_, rope)] = adapter.decoder_config.ropes
    assert (rope.theta, rope.scaling) == (500_000.0, None)


def test_what_is_refused() -> None:
    planner, header = CogVLM2Planner(CONFIG, {}), ImageHeader("PNG", 64, 64)
    with pytest.raises(UnsupportedMedia, match="one image per request"):
        planner.plan(header, ItemContext(siblings=1))


def test_a_plan_of_another_size_is_refused() -> None:
    data = png(picture(20, 20, 1))
    plan = CogVLM2Planner(PUBLISHED, {}).plan(probe_image(data))
    with pytest.raises(PlanMismatch):
        next(CogVLM2Preprocessor(CONFIG, {})(data, plan))


def test_rows(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "cogvlm2")
    tower = tower_of(folder)
    ours = tower.encode([preprocessed(*size) for size in SIZES])
    reference: Any = load_reference(folder)
    with torch.inference_mode():
        theirs = reference.get_image_features(
            torch.stack([pixels_of(picture(width, height, width), SIDE) for width, height in SIZES])
        )
    assert [len(one) for one in ours] == [11] * len(SIZES)
    assert_rows(torch.stack(ours), theirs)


def test_prompts(tmp_path: Path) -> None:
    """The image follows the token that starts a sequence, whichever message has it; then come questions and answers."""
    builder, begin = PromptBuilder(make_tiny(tmp_path, "cogvlm2")), TINY.ids["<|endoftext|>"]
    part, text = {"type": "image", "data": png(picture(60, 40, 1))}, {"type": "text", "text": "What is it?"}
    answer, turns = {"role": "assistant", "content": "A fish."}, [("What is it?", "A fish.")]
    asked: list[tuple[list[dict[str, Any]], str]] = [
        ([{"role": "user", "content": [text, part]}], question([], "What is it?")),
        (
            [{"role": "user", "content": [part, text]}, answer, {"role": "user", "content": "Sure?"}],
            question(turns, "Sure?"),
        ),
        (
            [{"role": "user", "content": "What is it?"}, answer, {"role": "user", "content": [text, part]}],
            question(turns, "What is it?"),
        ),
    ]
    for messages, expected in asked:
        prompt = builder.build(messages)
        [span] = prompt.items[0].placement.spans
        assert (span.start, span.length, span.second, span.atomic) == (1, 11, 10, False)
        image = [CONFIG["pad_token_id"]] * 11
        assert prompt.tokens == [begin, *image, *builder.tokenizer.encode(expected)]
        positions = positions_of([token == image[0] for token in prompt.tokens])
        assert positions[:14] == [0, 1, *[2] * 9, 3, 4, 5]
        assert np.array_equal(prompt.positions.prompt, np.tile(positions, (3, 1)))
        assert prompt.positions.next_position == positions[-1] + 1
    plain = builder.build([{"role": "user", "content": "Sure?"}])
    assert plain.tokens == [begin, *builder.tokenizer.encode(question([], "Sure?"))]


def test_a_system_message_becomes_a_users_text(tmp_path: Path) -> None:
    builder = PromptBuilder(make_tiny(tmp_path, "cogvlm2"))
    as_system = builder.build([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
    assert as_system.tokens == builder.build([{"role": "user", "content": "Be kind.\n\nHi"}]).tokens


def test_messages_that_are_refused(tmp_path: Path) -> None:
    builder = PromptBuilder(make_tiny(tmp_path, "cogvlm2"))
    part = {"type": "image", "data": png(picture(60, 40, 1))}
    for messages, message in (
        ([{"role": "user", "content": "see <|image|>"}], "image"),
        ([{"role": "user", "content": "see <|image_pad|>"}], "image_pad"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            builder.build(messages)
    with pytest.raises(UnsupportedMedia, match="one image per request"):
        builder.build([{"role": "user", "content": [part]}, {"role": "user", "content": [part]}])


def test_a_config_without_model_type(tmp_path: Path) -> None:
    """The family follows from ``architectures``."""
    folder = make_tiny(tmp_path, "cogvlm2")
    edit_config(folder, model_type=None)
    config = json.loads((folder / "config.json").read_text())
    assert "model_type" not in config
    assert family_of(config).adapter_name == "CogVLM2"
    assert isinstance(load_adapter(folder), CogVLM2)
    with pytest.raises(CheckpointError, match="model_type None is not served"):
        family_of(config | {"architectures": ["CogVLMVideoForCausalLM"]})
