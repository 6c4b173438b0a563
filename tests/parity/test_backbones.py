"""Backbones without towers answer as transformers does, in one instance and in two, in chunks of any length."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from tests.parity.conftest import Model
from tests.support.backbones import BACKBONES, MORE_BACKBONES
from tests.support.checkpoints import edit_config
from tests.support.disturbed import LONG_TEXTS, check_lost_instances, check_preemption, served
from tests.support.families import ANSWERED_BACKBONES
from tests.support.harness import FLOAT32, Running, running
from tests.support.image_cases import TEXTS
from tests.support.published_files import LLAMA_LIKE_INTERNLM2, make_internlm2
from tests.support.reference import Reference
from tests.support.tiny import make_tiny
from triptych.config import EngineConfig, RankSizes
from triptych.models.shared.settings import text_section

SEED = 4
CHUNKS = (1, 7, 64, pytest.param(2048, id="whole"))
WINDOWS_ALONE = ("mistral", "phi3-windows")
"""Backbones of which every layer has a window: a request needs no more pages than at first, so none is preempted."""
IN_TWO_RANKS = [
    name for name, tiny in MORE_BACKBONES.items() if text_section(tiny.config)["num_key_value_heads"] % 2 == 0
]
"""Backbones whose heads two ranks can divide."""
EACH = [name if name in ANSWERED_BACKBONES else pytest.param(name, marks=pytest.mark.slow) for name in BACKBONES]


class Models(dict[str, Model]):
    """Backbones by name, made when they are first asked for."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        super().__init__()
        self._make_folder = make_folder

    def __missing__(self, name: str) -> Model:
        made = Model(make_tiny(self._make_folder(name), MORE_BACKBONES[name], seed=SEED), TEXTS)
        self[name] = made
        return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return Models(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def long(models: Models) -> Callable[[str], Model]:
    """Models with longer texts, the longest first."""
    return cache(lambda name: Model(models[name].folder, LONG_TEXTS))


def answered(model: Model, topology: str, engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            return await service.answers([case.messages for case in model.cases])

    return asyncio.run(run())


@pytest.mark.parametrize(("topology", "chunk"), [pytest.param("1PD", 64, marks=pytest.mark.slow), ("1P1D", 7)])
@pytest.mark.parametrize("name", EACH)
def test_answers(models: Models, name: str, topology: str, chunk: int) -> None:
    assert answered(models[name], topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == models[name].answers


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("topology", ["1PD", "1P1D", "1P2D"])
@pytest.mark.parametrize("name", MORE_BACKBONES)
def test_every_chunk(models: Models, name: str, topology: str, chunk: int) -> None:
    assert answered(models[name], topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == models[name].answers


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_BACKBONES)
def test_blocks_and_ranks(models: Models, name: str) -> None:
    """A receive pool of one block; and two ranks."""
    block = replace(FLOAT32, kv_receive_blocks=1, receive_block_rows=8)
    assert answered(models[name], "1P1D", block) == models[name].answers
    if name in IN_TWO_RANKS:
        ranks = replace(FLOAT32, tensor_parallel_size=RankSizes(2))
        assert answered(models[name], "1PD", ranks) == models[name].answers


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TWO_RANKS)
def test_unequal_numbers_of_ranks(models: Models, name: str) -> None:
    """Whose parts of the KV cache differ; of a latent, all have the whole."""
    ranks = replace(FLOAT32, tensor_parallel_size=RankSizes.parse("P=2,D=1"), max_num_batched_tokens=64)
    assert answered(models[name], "1P1D", ranks) == models[name].answers


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
@pytest.mark.parametrize("name", MORE_BACKBONES)
def test_batches(models: Models, name: str, topology: str) -> None:
    """One request after another, and eight at once."""
    model, requests = models[name], [case.messages for case in TEXTS]

    async def ask(service: Running) -> None:
        assert [await service.answer(messages) for messages in requests] == model.answers
        assert await service.answers(2 * requests) == 2 * model.answers

    served(model, topology, replace(FLOAT32, enable_prefix_caching=False), ask)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
@pytest.mark.parametrize("name", [name for name in MORE_BACKBONES if name not in WINDOWS_ALONE])
def test_preempted_requests_start_again(long: Callable[[str], Model], name: str, topology: str) -> None:
    check_preemption(long(name), topology, [case.messages for case in LONG_TEXTS])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_BACKBONES)
def test_lost_instances_are_replaced(long: Callable[[str], Model], name: str) -> None:
    check_lost_instances(long(name), [case.messages for case in LONG_TEXTS])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_BACKBONES)
def test_prefixes_that_are_cold_warm_and_partly_evicted(long: Callable[[str], Model], name: str) -> None:
    """Another request needs some of the pages, so that only the first ones of the prompt are left."""
    model = long(name)
    page = FLOAT32.page_size
    longest = len(model.prompts[0].tokens) + 32

    async def ask(service: Running) -> None:
        (loop,) = service.engine_loops()
        found = []
        for case in (0, 0, 2, 0):
            before = loop.scheduler.num_prefix_hits
            assert await service.answer(LONG_TEXTS[case].messages) == model.answers[case]
            found.append(loop.scheduler.num_prefix_hits - before)
        cold, warm, _, partly = found
        assert cold == 0 < partly <= warm, found
        assert partly < warm or name in WINDOWS_ALONE, found

    engine = replace(
        FLOAT32, kv_cache_tokens=longest, state_snapshot_interval=page, state_snapshots=40, max_num_batched_tokens=64
    )
    served(model, "1PD", engine, ask)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_models_that_transformers_lacks(models: Models, tmp_path: Path, topology: str) -> None:
    """InternLM2 and Kimi K2, as models that compute the same: a Llama and DeepSeek-V3."""
    llama = Model(make_tiny(tmp_path / "llama", LLAMA_LIKE_INTERNLM2, seed=SEED), TEXTS)
    assert answered(Model(make_internlm2(tmp_path / "internlm2", SEED), TEXTS), topology) == llama.answers
    deepseek = models["deepseek_v3"]
    edit_config(copytree(deepseek.folder, tmp_path / "kimi_k2"), model_type="kimi_k2")
    assert answered(Model(tmp_path / "kimi_k2", TEXTS), topology) == deepseek.answers


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
