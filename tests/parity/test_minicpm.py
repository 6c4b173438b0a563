"""MiniCPM-V 2.6 and 4.5 answer as an implementation written from their description does, in every kind of topology."""

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import av
import pytest
import torch

from tests.support.clips import clip
from tests.support.harness import FLOAT32, Messages, running
from tests.support.image_cases import CASES, picture, png
from tests.support.minicpm import LANGUAGE_MODELS, Clip, MiniCPMReference, Shown, config_of, grouped, make_minicpm
from tests.support.stage_loops import answer_of_two_encoders, count_parts, first_logits
from tests.support.video_cases import user, video_part
from triptych.config import EngineConfig
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder
from triptych.types import FrameSampling

VERSIONS = list(LANGUAGE_MODELS)
STILLS: Mapping[str, tuple[Messages, list[Shown]]] = {case.name: (case.messages, [*case.images]) for case in CASES}


@dataclass(frozen=True, eq=False)
class OldModel:
    """A checkpoint and its expected answers to the cases: messages and what they show."""

    folder: Path
    version: float
    cases: Mapping[str, tuple[Messages, list[Shown]]]

    @cached_property
    def reference(self) -> MiniCPMReference:
        return MiniCPMReference(self.folder, config_of(self.version))

    @cached_property
    def prompts(self) -> list[PlannedPrompt]:
        builder = PromptBuilder(self.folder)
        return [builder.build(messages) for messages, _ in self.cases.values()]

    @cached_property
    def answers(self) -> list[list[int]]:
        pairs = zip(self.prompts, self.cases.values(), strict=True)
        answers = [self.reference.generate(prompt.tokens, shown) for prompt, (_, shown) in pairs]
        assert len({tuple(answer) for answer in answers}) >= len(self.cases) - 1
        return answers


def sampled(version: float, data: bytes, fps: float = 0) -> Clip:
    """What the reference shows of a video."""
    with av.open(io.BytesIO(data), "r") as file:
        rate = float(file.streams.video[0].average_rate or 0)
        frames = [frame.to_image() for frame in file.decode(video=0)]
    groups, times = grouped(len(frames), rate, version, fps)
    return Clip([[frames[number] for number in group] for group in groups], times, 2 if version == 2.6 else 1)


def videos(version: float) -> dict[str, tuple[Messages, list[Shown]]]:
    """The last one is long enough that version 4.5 shows frames together."""
    first, second = clip("mp4", frames=50), clip("webm", frames=20, width=64, height=96, seed=4)
    long = clip("mp4", frames=61, rate=1, width=48, height=48, seed=5)
    still = picture(200, 150, 1)
    return {
        "mp4": (user(video_part(first), "What happens?"), [sampled(version, first)]),
        "image and video": (
            user({"type": "image", "data": png(still)}, video_part(second), "Same?"),
            [still, sampled(version, second)],
        ),
        "two a second": (
            user("See", video_part(second, sampling=FrameSampling(fps=2.0))),
            [sampled(version, second, 2.0)],
        ),
        "long": (user(video_part(long), "And now?"), [sampled(version, long)]),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[float, OldModel]:
    torch.set_num_threads(1)
    return {
        version: OldModel(make_minicpm(tmp_path_factory.mktemp(str(version)), version), version, STILLS)
        for version in VERSIONS
    }


@cache
def seeing(model: OldModel) -> OldModel:
    """The same model with the cases of videos."""
    return replace(model, cases=videos(model.version))


def answered(model: OldModel, topology: str, engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            return await service.answers([messages for messages, _ in model.cases.values()])

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


@pytest.mark.parametrize("topology", ["1EPD", pytest.param("1E1PD", marks=pytest.mark.slow), "1E1P1D"])
@pytest.mark.parametrize("version", VERSIONS)
def test_videos(models: dict[float, OldModel], version: float, topology: str) -> None:
    """In chunks of 7 tokens, unless all roles are in one instance."""
    model = seeing(models[version])
    engine = FLOAT32 if topology == "1EPD" else replace(FLOAT32, max_num_batched_tokens=7)
    assert answered(model, topology, engine) == model.answers


@pytest.mark.parametrize("case", ["large image", pytest.param("mp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [2.6, pytest.param(4.5, marks=pytest.mark.slow)])
def test_an_encoder_that_is_lost_in_the_middle_of_an_item(
    models: dict[float, OldModel], version: float, case: str
) -> None:
    model = models[version] if case in STILLS else seeing(models[version])
    number = list(model.cases).index(case)
    messages, _ = model.cases[case]
    [item] = model.prompts[number].items
    assert answer_of_two_encoders(model.folder, messages, item.plan.rows) == model.answers[number]


@pytest.mark.parametrize("videos", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_first_token_logits(models: dict[float, OldModel], version: float, videos: bool) -> None:
    """Within 1e-4 in float32, through the transfer of E to PD."""
    model = seeing(models[version]) if videos else models[version]
    recorded = first_logits(model.folder, [messages for messages, _ in model.cases.values()])
    for (name, (_, shown)), prompt, logits in zip(model.cases.items(), model.prompts, recorded, strict=True):
        assert (logits - model.reference.first_logits(prompt.tokens, shown)).abs().max() < 1e-4, name
