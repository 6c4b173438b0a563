"""Gemma 4 answers about audio as transformers does: whatever the file, the topology, the chunks and the pools, alone
and beside images and videos."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.audio_cases import CASES
from tests.support.checkpoints import load_reference
from tests.support.harness import FLOAT32
from tests.support.stage_loops import answer_of_two_encoders, first_logits
from tests.support.tiny import make_tiny
from tests.support.video_cases import MORE, RUNS, Model, answered


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    torch.set_num_threads(1)
    yield Model(make_tiny(tmp_path_factory.mktemp("audio"), "gemma4+gemma4_vision"), CASES)
    asyncio.set_event_loop(None)


@pytest.mark.parametrize(
    ("topology", "chunk", "pool"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE)]
)
def test_as_the_reference(model: Model, topology: str, chunk: int, pool: dict[str, Any]) -> None:
    engine = replace(FLOAT32, max_num_batched_tokens=chunk, **pool)
    assert answered(model, topology, engine) == model.answers


@pytest.mark.slow
def test_an_encoder_that_is_lost_in_the_middle_of_a_clip(model: Model) -> None:
    name = "several windows"
    number = list(CASES).index(name)
    [item] = model.prompts[number].items
    assert answer_of_two_encoders(model.folder, CASES[name], item.plan.rows) == model.answers[number]


def test_first_token_logits(model: Model) -> None:
    """Within 1e-4 in float32, through the transfer of E to PD."""
    recorded = first_logits(model.folder, CASES.values())
    reference = load_reference(model.folder)
    for name, prompt, logits in zip(CASES, model.prompts, recorded, strict=True):
        with torch.inference_mode():
            expected = reference(**model.reference_inputs(prompt)).logits[0, -1]
        assert (logits - expected).abs().max() < 1e-4, name
