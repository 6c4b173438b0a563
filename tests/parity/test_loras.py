"""Requests with different LoRAs, and with none, in one batch: answers of Phi-4-multimodal's published files to text,
images and audio.

The references are transformers' models with one LoRA merged into the weights, or none.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import Phi4MultimodalFeatureExtractor

from tests.support.audio_cases import audio_part, noise
from tests.support.harness import FLOAT32, Running, at_stake, running, together
from tests.support.image_cases import CASES, picture
from tests.support.published_files import PHI4_LORAS, make_published_phi4, write_peft_loras
from tests.support.reference import Reference
from tests.support.sounds import sound
from tests.support.stage_loops import answer_of_two_encoders, first_logits
from tests.support.tiny import make_tiny
from tests.support.video_cases import image_part, user
from triptych.config import EngineConfig, RankSizes
from triptych.media.audio import decode_audio
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder
from triptych.types import AudioHeader

AUDIO = audio_part(sound("wav", noise(1.3, 1)))
HEARD = {
    "speech": (user(AUDIO, "What is it?"), []),
    "vision": (user("First ", image_part(96, 64, 1), " then ", AUDIO, "?"), [picture(96, 64, 1)]),
}
"""Messages and pictures of requests with audio, by their LoRA."""
MESSAGES = [*(case.messages for case in CASES), *(messages for messages, _ in HEARD.values())]
IMAGES = [*(case.images for case in CASES), *(images for _, images in HEARD.values())]
LORAS = [*("vision" if case.images else "" for case in CASES), *HEARD]


class Hearing(Reference):
    """Transformers' model with a clip beside images."""

    def reference_inputs(self, prompt: PlannedPrompt, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        inputs = super().reference_inputs(prompt, images)
        for item in prompt.items:
            if isinstance(header := item.plan.header, AudioHeader):
                samples = decode_audio(item.data, header, 16_000)
                inputs |= Phi4MultimodalFeatureExtractor()(samples, sampling_rate=16_000, return_tensors="pt")
        return inputs


@dataclass(frozen=True)
class Model:
    """The published files, and the expected answers to all cases."""

    folder: Path
    answers: list[list[int]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_published_phi4(tmp_path_factory.mktemp("phi4mm"), seed=4)


@pytest.fixture(scope="module")
def references(published: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hearing]:
    """By LoRA."""
    return {lora: Hearing(merged(published, tmp_path_factory.mktemp("merged"), lora)) for lora in ("", *PHI4_LORAS)}


@pytest.fixture(scope="module")
def model(published: Path, references: dict[str, Hearing]) -> Model:
    folder = published
    builder, answers = PromptBuilder(folder), []
    for messages, images, lora in zip(MESSAGES, IMAGES, LORAS, strict=True):
        prompt = builder.build(messages)
        assert prompt.lora == lora
        answers.append(references[lora].generate(prompt, images))
        assert not lora or references[""].generate(prompt, images) != answers[-1], "the LoRA changes the answer"
    return Model(folder, answers)


def merged(folder: Path, to: Path, lora: str) -> Path:
    """Transformers' files with the LoRA's matrices in the weights, and returns their folder."""
    make_tiny(to, "phi4_multimodal", seed=4)
    theirs, weights = load_file(folder / "model.safetensors"), load_file(to / "model.safetensors")
    changed = weights | {"lm_head.weight": theirs["lm_head.weight"]}
    for name in weights:
        stem = name.removesuffix(".weight")
        if lora and f"{stem}.base_layer.weight" in theirs:
            rank, alpha = PHI4_LORAS[lora]
            down, up = (theirs[f"{stem}.lora_{kind}.{lora}.weight"] for kind in "AB")
            changed[name] = weights[name] + alpha / rank * up @ down
    save_file(changed, to / "changed.safetensors", metadata={"format": "pt"})
    (to / "changed.safetensors").rename(to / "model.safetensors")
    return to


def answered(model: Model, topology: str, engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine, prepare=together(len(MESSAGES))) as service:
            return await service.answers(MESSAGES)

    return asyncio.run(run())


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD", "1E1P1D"])
def test_answers(model: Model, topology: str) -> None:
    assert answered(model, topology) == model.answers


def test_first_token_logits(model: Model, references: dict[str, Hearing]) -> None:
    """Within 1e-4 in float32, of a request without a LoRA and of one with each."""
    builder = PromptBuilder(model.folder)
    some = [LORAS.index(lora) for lora in ("", *PHI4_LORAS)]
    recorded = first_logits(model.folder, [MESSAGES[number] for number in some])
    for number, logits in zip(some, recorded, strict=True):
        expected = references[LORAS[number]].first_logits(builder.build(MESSAGES[number]), IMAGES[number])
        assert (logits - expected).abs().max() < 1e-4, LORAS[number]


def test_chunks_through_a_receive_pool_of_one_block(model: Model) -> None:
    engine = replace(FLOAT32, max_num_batched_tokens=7, receive_blocks=1, receive_block_rows=8)
    assert answered(model, "1E1PD", engine) == model.answers


@pytest.mark.parametrize("topology", ["1EPD", pytest.param("1E1P1D", marks=pytest.mark.slow)])
def test_loras_in_folders(published: Path, references: dict[str, Hearing], tmp_path: Path, topology: str) -> None:
    """Beside transformers' files, as peft writes them."""
    folder = merged(published, tmp_path / "files", "")
    write_peft_loras(published, folder)
    builder, expected = PromptBuilder(folder), []
    some = [LORAS.index(lora) for lora in ("", "vision", "speech")]
    for number in some:
        prompt = builder.build(MESSAGES[number])
        assert prompt.lora == LORAS[number]
        expected.append(references[prompt.lora].generate(prompt, IMAGES[number]))

    async def run() -> list[list[int]]:
        async with running(folder, topology, prepare=together(len(some))) as service:
            return await service.answers([MESSAGES[number] for number in some])

    assert asyncio.run(run()) == expected


@pytest.mark.slow
def test_two_ranks(model: Model) -> None:
    assert answered(model, "1EPD", replace(FLOAT32, tensor_parallel_size=RankSizes(2))) == model.answers


def test_lost_instances_are_replaced(model: Model) -> None:
    """One prefills when it is lost, another decodes."""

    async def run() -> None:
        engine = replace(FLOAT32, max_num_batched_tokens=16)
        async with running(model.folder, "1E2P2D", engine) as service:
            asked = [asyncio.create_task(service.answer(messages)) for messages in MESSAGES]
            await lose(service)
            assert await asyncio.gather(*asked) == model.answers

    asyncio.run(run())


@pytest.mark.slow
def test_an_encoder_that_is_lost_in_the_middle_of_an_image(model: Model) -> None:
    number = next(number for number, case in enumerate(CASES) if case.name == "large image")
    [item] = PromptBuilder(model.folder).build(MESSAGES[number]).items
    assert answer_of_two_encoders(model.folder, MESSAGES[number], item.plan.rows) == model.answers[number]


@pytest.mark.slow
def test_an_encoder_that_is_lost_in_the_middle_of_a_clip(model: Model) -> None:
    number = LORAS.index("speech")
    [item] = PromptBuilder(model.folder).build(MESSAGES[number]).items
    assert answer_of_two_encoders(model.folder, MESSAGES[number], item.plan.rows) == model.answers[number]


async def lose(service: Running) -> None:
    names = [instance.name for instance in service.instances if instance.role.has_decoder]
    loops = dict(zip(names, service.engine_loops(), strict=True))
    async with asyncio.timeout(60):
        while not loops["p1"].num_computed_tokens:
            await asyncio.sleep(0)
        await service.end("p1")
        while not at_stake(service, "d4"):
            await asyncio.sleep(0)
        await service.end("d4")
