"""Backbones without towers answer as transformers does, in one instance and in two, in chunks of any length."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.conftest import Model
from tests.support.backbones import BACKBONES
from tests.support.disturbed import served
from tests.support.families import ANSWERED_BACKBONES
from tests.support.harness import FLOAT32, Running, running
from tests.support.image_cases import TEXTS
from tests.support.reference import Reference
from tests.support.tiny import make_tiny
from triptych.config import EngineConfig, RankSizes
from triptych.models.shared.settings import text_section

SEED = 4
CHUNKS = (1, 7, 64)
EACH = [name if name in ANSWERED_BACKBONES else pytest.param(name, marks=pytest.mark.slow) for name in BACKBONES]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    torch.set_num_threads(1)
    return {
        name: Model(make_tiny(tmp_path_factory.mktemp(name), tiny, seed=SEED), TEXTS)
        for name, tiny in BACKBONES.items()
    }


def answered(model: Model, topology: str, engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            return await service.answers([case.messages for case in model.cases])

    return asyncio.run(run())


@pytest.mark.parametrize(("topology", "chunk"), [pytest.param("1PD", 64, marks=pytest.mark.slow), ("1P1D", 7)])
@pytest.mark.parametrize("name", EACH)
def test_answers(models: dict[str, Model], name: str, topology: str, chunk: int) -> None:
    assert answered(models[name], topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == models[name].answers


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("topology", ["1PD", "1P1D", "1P2D"])
@pytest.mark.parametrize("name", BACKBONES)
def test_every_chunk(models: dict[str, Model], name: str, topology: str, chunk: int) -> None:
    assert answered(models[name], topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == models[name].answers


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_blocks_and_ranks(models: dict[str, Model], name: str) -> None:
    """A receive pool of one block; and two ranks."""
    block = replace(FLOAT32, kv_receive_blocks=1, receive_block_rows=8)
    assert answered(models[name], "1P1D", block) == models[name].answers
    if text_section(BACKBONES[name].config)["num_key_value_heads"] % 2 == 0:
        ranks = replace(FLOAT32, tensor_parallel_size=RankSizes(2))
        assert answered(models[name], "1PD", ranks) == models[name].answers


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_dynamic_frequencies_of_each_length(tmp_path: Path, topology: str) -> None:
    """As transformers answers with the base that belongs to a request's longest possible length; and, for one token,
    as it answers by itself. Twice each, so that prefixes are found."""
    short, factor, dim = 160, 3.0, 16
    settings = BACKBONES["llama"].config | {"max_position_embeddings": short}

    def made(name: str, theta: float, scaling: dict[str, Any] | None) -> Model:
        """The same weights with another rope."""
        config = settings | {"rope_theta": theta, "rope_scaling": scaling}
        return Model(make_tiny(tmp_path / name, replace(BACKBONES["llama"], config=config), seed=SEED), TEXTS)

    def at_length(case: int, max_tokens: int) -> list[int]:
        length = max(short, len(model.prompts[case].tokens) + max_tokens - 1)
        theta = 1e4 * (factor * length / short - (factor - 1)) ** (dim / (dim - 2))
        reference = made(f"{case} {max_tokens}", theta, None).reference
        return reference.generate(model.prompts[case], [])

    def by_itself(case: int) -> list[int]:
        # a model of its own: transformers goes on with the frequencies of the longest sequence before
        return Reference(model.folder).generate(model.prompts[case], [], 1)

    model = made("dynamic", 1e4, {"type": "dynamic", "factor": factor})
    cases = range(len(TEXTS))
    lengths = [len(prompt.tokens) for prompt in model.prompts]
    assert min(lengths) + 31 <= short < max(lengths), "requests of both kinds"
    expected = [at_length(case, 32) for case in cases]
    assert expected != [at_length(case, 200) for case in cases], "the length matters"
    firsts = [by_itself(case) for case in cases]

    async def ask(service: Running) -> None:
        requests = [case.messages for case in TEXTS]
        for _ in range(2):
            assert await service.answers(requests) == expected
            assert await service.answers(requests, max_tokens=1) == firsts

    served(model, topology, replace(FLOAT32, max_num_batched_tokens=64), ask)
