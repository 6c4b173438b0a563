"""The product and its simulation place and batch the same requests alike.

Each request comes once the one before is answered, so that what happens doesn't depend on how long anything takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32
from tests.support.serving import image, image_part, served, text_part
from triptych.config import AdmissionConfig, EncodeConfig
from triptych.encode.runner import EncoderRunner
from triptych.engine.runner import MediaEmbeddings, Runner, StepOutput
from triptych.engine.sampler import SamplingInput
from triptych.engine.scheduler import Chunk
from triptych.layers.decoder import AfterLayer
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.work import Encode, Generate, Prefill, SamplingParams
from triptych.models.base import EncoderInput
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.lifecycle import RequestLifecycle
from triptych.simulate.costs import LinearCosts
from triptych.simulate.instance import InstanceSettings, SimulatedModel
from triptych.simulate.service import SimulatedService
from triptych.topology import Role
from triptych.types import Address

ENGINE = FLOAT32
ENCODE = EncodeConfig(decode_workers=1)
LONG = "a long text that is about nothing at all, " * 6
QUESTIONS: list[Any] = [
    "Hello",
    [image_part(image(seed=1)), text_part("What is this?")],
    [text_part(LONG), image_part(image(96, 128, seed=2)), text_part("Which is it?")],
    LONG,
    [image_part(image(seed=1)), text_part("And this?")],
    LONG + "And then?",
    [image_part(image(seed=4)), text_part(LONG)],
]
TWO_IMAGES: list[Any] = [
    [text_part(LONG), image_part(image(seed=2)), image_part(image(96, 128, seed=3)), text_part("Which is larger?")],
]
"""With several instances, which of them arrives first, and whether a step begins in between, is a matter of time."""


@dataclass
class Decisions:
    """What a service decided, in order."""

    placements: list[tuple[str, str]] = field(default_factory=list)
    """Kind of work, and the instance that got it."""
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    """Tokens of each chunk, and those before them."""
    batches: list[list[int]] = field(default_factory=list)
    """Patches of each part."""

    def placed(self, instance: str, message: Message) -> None:
        if isinstance(message, Encode | Generate | Prefill):
            self.placements.append((type(message).__name__, instance))


def product(
    folder: Path, topology: str, questions: list[Any]
) -> tuple[Decisions, list[tuple[PlannedPrompt, SamplingParams]]]:
    """Ask a real service, with its processes' loops, channels and model. Returns what it decided, and the prompts."""
    found, prompts, sent = Decisions(), list[tuple[PlannedPrompt, SamplingParams]](), list[tuple[Address, Message]]()
    with pytest.MonkeyPatch.context() as patch:
        send, job, encode, submit = Channel.send, Runner.job, EncoderRunner.encode, RequestLifecycle.submit

        def sending(channel: Channel, to: Address, message: Message) -> None:
            sent.append((to, message))
            send(channel, to, message)

        def stepping(
            runner: Runner,
            chunks: Sequence[Chunk],
            media: MediaEmbeddings,
            sampling: Sequence[SamplingInput],
            after_layer: AfterLayer | None,
        ) -> Callable[[], StepOutput]:
            found.steps.append([(chunk.length, chunk.start) for chunk in chunks])
            return job(runner, chunks, media, sampling, after_layer)

        def encoding(runner: EncoderRunner, inputs: Sequence[EncoderInput]) -> Any:
            found.batches.append([len(one.patches) for one in inputs])
            return encode(runner, inputs)

        def submitting(
            own: RequestLifecycle,
            record: RequestRecord,
            prompt: PlannedPrompt,
            sampling: SamplingParams,
            *args: Any,
            **rest: Any,
        ) -> Any:
            if record.counted:
                prompts.append((prompt, sampling))
            return submit(own, record, prompt, sampling, *args, **rest)

        patch.setattr(Channel, "send", sending)
        patch.setattr(Runner, "job", stepping)
        patch.setattr(EncoderRunner, "encode", encoding)
        patch.setattr(RequestLifecycle, "submit", submitting)
        with served(folder, topology, engine=ENGINE, encode=ENCODE) as service:
            names = {one.channel.address: one.name for one in service.running.instances}
            for question in questions:
                service.text(question)
                service.settle()
    for to, message in sent:
        if to in names:
            found.placed(names[to], message)
    return found, prompts


def simulated(roles: dict[str, Role], prompts: list[tuple[PlannedPrompt, SamplingParams]]) -> Decisions:
    found = Decisions()

    def note(*what: Any) -> None:
        match what:
            case ("sent", name, message):
                found.placed(name, message)
            case (_, "step", chunks):
                found.steps.append([(length, end - length) for length, end in chunks])
            case (_, "batch", patches):
                found.batches.append(patches)

    service = SimulatedService(
        0,
        roles,
        LinearCosts(),
        model=SimulatedModel(vocab_size=2**20),
        settings=InstanceSettings(ENGINE, ENCODE),
        admission=AdmissionConfig(restart_hold=0.0),
        note=note,
    )
    service.clock.advance(2.0)
    for number, (prompt, sampling) in enumerate(prompts):
        record = RequestRecord(f"{number}", "POST", service.clock)
        stream = service.router.lifecycle.submit(record, prompt, sampling, [])
        assert service.until(lambda stream=stream: stream.record.finish_reason, 60.0)  # type: ignore[misc]
        service.clock.advance(1.0)
    service.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("contract") / "tiny")


@pytest.mark.parametrize(
    ("topology", "roles"),
    [
        ("1EPD", {"epd0": Role.EPD}),
        ("2E2PD", {"e0": Role.E, "e1": Role.E, "pd2": Role.PD, "pd3": Role.PD}),
        ("1E1P1D", {"e0": Role.E, "p1": Role.P, "d2": Role.D}),
    ],
)
def test_placements_steps_and_batches_are_those_of_the_product(
    folder: Path, topology: str, roles: dict[str, Role]
) -> None:
    questions = QUESTIONS + TWO_IMAGES * (topology == "1EPD")
    expected, prompts = product(folder, topology, questions)
    assert len(prompts) == len(questions)
    found = simulated(roles, prompts)
    assert found.placements == expected.placements
    assert found.batches == expected.batches
    assert found.steps == expected.steps
    assert len(expected.batches) >= 3
    assert len(expected.steps) > 30
