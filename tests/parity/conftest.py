"""Checkpoints and what transformers answers with them, made once."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.families import ANSWERED_IMAGES, ONE_INSTANCE, REPRESENTATIVE, SLOW_ANSWERS
from tests.support.image_cases import CASES, Case
from tests.support.reference import Reference
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder


@dataclass(frozen=True)
class Model:
    """A checkpoint and its expected answers to all cases."""

    folder: Path
    cases: Sequence[Case] = tuple(CASES)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.folder)

    @cached_property
    def prompts(self) -> list[PlannedPrompt]:
        builder = PromptBuilder(self.folder)
        return [builder.build(case.messages) for case in self.cases]

    @cached_property
    def answers(self) -> list[list[int]]:
        """Greedy tokens, one list per case."""
        answers = [self.reference.generate(p, c.images) for p, c in zip(self.prompts, self.cases, strict=True)]
        # a model that says the same whatever it sees would make every comparison pass
        assert len({tuple(answer) for answer in answers}) >= len(self.cases) - 1
        return answers


DENSE_ALONE = (
    "test_tokens",
    "test_split",
    "test_wide_split",
    "test_lost_generator",
    "test_prefix_cache",
    "test_prompt_logprobs",
    "test_kv_formats",
)
"""What these show doesn't depend on a layer's MLP: mixtures of experts are left to the slow suite."""

WITH_FEWER = tuple(
    f"[{name}-{topology}]" for name in ANSWERED_IMAGES if name not in ONE_INSTANCE for topology in ("1EPD", "1E1PD")
)
"""Left to the slow suite: in every run, the same models answer in 1E1P1D, and some in 1E1PD in chunks."""
OF_REPRESENTATIVE = ("test_an_encoder_that_is_lost", "test_first_token_logits", "test_chunks_through_a_receive_pool")
OTHERS = tuple(f"[{name}]" for name in ANSWERED_IMAGES if name not in REPRESENTATIVE)
"""Left to the slow suite, of these tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "parity" and any(name in item.name for name in SLOW_ANSWERS):
            item.add_marker(pytest.mark.slow)
        if item.path.stem in DENSE_ALONE and item.path.parent.name == "parity" and "moe" in item.name:
            item.add_marker(pytest.mark.slow)
        if item.name.startswith("test_images[") and item.name.endswith(WITH_FEWER):
            item.add_marker(pytest.mark.slow)
        if item.name.startswith(OF_REPRESENTATIVE) and item.name.endswith(OTHERS):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    yield Model(make_checkpoint(folder, moe=request.param == "moe", tied=request.param == "dense"))
    asyncio.set_event_loop(None)
