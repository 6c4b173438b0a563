"""MiniCPM-V 2.6 and 4.5 answer as an implementation written from their description does, in every kind of topology."""

import asyncio
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES
from tests.support.minicpm import LANGUAGE_MODELS, MiniCPMReference, config_of, make_minicpm
from tests.support.stage_loops import Recording, count_parts, engine_loop
from triptych.config import EngineConfig
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder
from triptych.server.instance import Instance

VERSIONS = list(LANGUAGE_MODELS)


@dataclass(frozen=True)
class OldModel:
    """A checkpoint and its expected answers to all cases."""

    folder: Path
    version: float

    @cached_property
    def reference(self) -> MiniCPMReference:
        return MiniCPMReference(self.folder, config_of(self.version))

    @cached_property
    def prompts(self) -> list[PlannedPrompt]:
        builder = PromptBuilder(self.folder)
        return [builder.build(case.messages) for case in CASES]

    @cached_property
    def answers(self) -> list[list[int]]:
        pairs = zip(self.prompts, CASES, strict=True)
        answers = [self.reference.generate(prompt.tokens, case.images) for prompt, case in pairs]
        assert len({tuple(answer) for answer in answers}) >= len(CASES) - 1
        return answers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[float, OldModel]:
    torch.set_num_threads(1)
    return {
        version: OldModel(make_minicpm(tmp_path_factory.mktemp(str(version)), version), version) for version in VERSIONS
    }


def answered(model: OldModel, topology: str, engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            return await service.answers([case.messages for case in CASES])

    return asyncio.run(run())


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD", "1E1P1D"])
@pytest.mark.parametrize("version", VERSIONS)
def test_images(models: dict[float, OldModel], version: float, topology: str) -> None:
    assert answered(models[version], topology) == models[version].answers


@pytest.mark.parametrize("version", VERSIONS)
def test_chunks_through_a_receive_pool_of_one_block(models: dict[float, OldModel], version: float) -> None:
    engine = replace(FLOAT32, max_num_batched_tokens=7, receive_blocks=1, receive_block_rows=8)
    assert answered(models[version], "1E1PD", engine) == models[version].answers


def test_rows_of_a_warm_encoder_cache(models: dict[float, OldModel]) -> None:
    model, seen = models[2.6], list[int]()
    messages = [case.messages for case in CASES[:3]]

    async def run() -> tuple[list[list[int]], int, list[list[int]]]:
        async with running(model.folder, "1E1PD", prepare=lambda instance: count_parts(instance, seen)) as service:
            cold = await service.answers(messages)
            return cold, sum(seen), await service.answers(messages)

    cold, encoded, warm = asyncio.run(run())
    assert cold == warm == model.answers[:3]
    assert sum(seen) == encoded > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_first_token_logits(models: dict[float, OldModel], version: float) -> None:
    """Within 1e-4 in float32, through the transfer of E to PD."""
    model, recorded = models[version], list[Tensor]()

    def record(instance: Instance) -> None:
        if instance.role.has_decoder:
            runner = engine_loop(instance).runner
            runner.decoder = Recording(runner.decoder, recorded)

    async def run() -> None:
        async with running(model.folder, "1E1PD", prepare=record) as service:
            for case in CASES:
                await service.answer(case.messages, max_tokens=1)

    asyncio.run(run())
    for case, prompt, logits in zip(CASES, model.prompts, recorded, strict=True):
        assert (logits - model.reference.first_logits(prompt.tokens, case.images)).abs().max() < 1e-4, case.name
