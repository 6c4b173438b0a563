"""Pieces of work that a profile measures, on the bundled model's real parts."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.harness import FLOAT32
from triptych.clock import SystemClock
from triptych.config import ServeConfig
from triptych.costs.profile import step_values
from triptych.demo import MODEL_DIR
from triptych.measure.profile.stages import Stages, file_of
from triptych.measure.profile.work import (
    BatchWork,
    DecodeGaps,
    Image,
    ItemGaps,
    Plans,
    PreprocessWork,
    Repeats,
    RequestGaps,
    StepWork,
)
from triptych.messages.channel import Channel
from triptych.messages.work import Encoded, Tokens
from triptych.prompt.probe import probe_image
from triptych.topology import Role

ONCE = Repeats(1, 1, 0.0, warm_up=0)


@pytest.fixture(scope="module")
def sink() -> Iterator[Channel]:
    channel = Channel(SystemClock())
    yield channel
    channel.close()


@pytest.fixture(scope="module")
def stages(sink: Channel) -> Iterator[Stages]:
    config = ServeConfig(model=MODEL_DIR, engine=replace(FLOAT32, threads=1, kv_cache_tokens=2048))
    with Stages(config.instance(Role.EPD, "all", "127.0.0.1:1"), sink.address) as made:
        yield made


def test_steps_are_those_asked_for(stages: Stages) -> None:
    facts = stages.facts()
    for chunks in (((64, 0),), ((16, 100), (1, 40)), ((1, 5),) * 8):
        timed = stages.measure(StepWork(chunks), ONCE)
        assert timed is not None
        assert timed.values == step_values(chunks)
        assert 0 < timed.seconds[0] < 10
    assert stages.measure(StepWork(((16, facts.context_length),)), ONCE) is None
    assert stages.measure(StepWork(((1, 1000),) * 3), ONCE) is None, "more pages than the cache has"
    assert stages.measure(StepWork(((1, 1000),) * 2), ONCE) is not None, "pages are released again"


def test_images_are_planned_and_encoded(stages: Stages) -> None:
    images = (Image(64, 64), Image(224, 96, "JPEG"), Image(96, 64, "WEBP"))
    sizes = stages.gaps(Plans(images))
    for image, one in zip(images, sizes, strict=True):
        header = probe_image(file_of(image))
        assert (header.width, header.height, header.format) == (image.width, image.height, image.format)
        assert one.file_bytes == len(file_of(image))
        timed = stages.measure(PreprocessWork(image), Repeats(2, 2, 0.0))
        assert timed is not None and timed.values == {"pixels": image.pixels} and len(timed.seconds) == 2
    timed = stages.measure(BatchWork(images), ONCE)
    assert timed is not None
    patches = [one.patches for one in sizes]
    assert timed.values == {"parts": 3, "patches": sum(patches), "pairs": sum(one * one for one in patches)}


def test_loops_answer_what_they_are_timed_with(stages: Stages, sink: Channel) -> None:
    gaps = stages.gaps(DecodeGaps(sequences=3, steps=5, runs=2))
    gaps += stages.gaps(RequestGaps(prompt_tokens=20, count=2))
    gaps += stages.gaps(ItemGaps(Image(64, 64), count=2))
    assert len(gaps) == 6 and all(0 <= gap < 5 for gap in gaps)
    received = [message for _ in range(3) for message in sink.receive(0.2)]
    ended = [message for message in received if isinstance(message, Tokens) and message.finish_reason]
    assert len(ended) == 2 * 3 + 2
    assert sum(isinstance(message, Encoded) for message in received) == 2
