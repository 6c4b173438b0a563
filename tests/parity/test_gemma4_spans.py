"""Gemma 4 whose images attend to themselves in both directions: in layers with a window, shorter than they are."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, running
from tests.support.tiny import OWN_TOWERS, make_tiny
from triptych.config import EngineConfig

FAMILY = "gemma4+gemma4_vision"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    text = OWN_TOWERS[FAMILY].config["text_config"] | {"use_bidirectional_attention": "vision"}
    return Model(make_tiny(tmp_path_factory.mktemp("spans"), FAMILY, seed=4, config={"text_config": text}))


def answered(model: Model, topology: str, engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            return await service.answers([case.messages for case in model.cases])

    return asyncio.run(run())


@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
def test_answers(model: Model, topology: str) -> None:
    assert answered(model, topology) == model.answers


def test_steps_of_an_image_through_a_receive_pool_of_one_block(model: Model) -> None:
    engine = replace(FLOAT32, max_num_batched_tokens=70, receive_blocks=1, receive_block_rows=8)
    assert answered(model, "1E1PD", engine) == model.answers


def test_answers_differ_from_those_of_images_that_see_what_is_before(model: Model, tmp_path: Path) -> None:
    other = Model(make_tiny(tmp_path, FAMILY, seed=4), model.cases)
    assert other.answers != model.answers
