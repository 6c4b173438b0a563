"""Released models answer as transformers does, and sensibly: SmolLM2-135M-Instruct, and Gemma-3-270M, a base model.

Variables name their folders, which ``bench.gguf_checkpoint`` makes of GGUF files; ``scripts/demo --chat`` makes
SmolLM2's. Models without a folder are skipped.
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.harness import FLOAT32, running
from tests.support.reference import Reference
from triptych.prompt.prompt import PromptBuilder
from triptych.prompt.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
QUESTIONS = {
    "TRIPTYCH_SMOLLM2": "What is the capital of France?",
    "TRIPTYCH_GEMMA3": "Question: What is the capital of France?\nAnswer:",
}
"""By the variable that names a model's folder."""
SUBJECTS = (
    *("the sea", "a steam engine", "Paris", "photosynthesis", "a sonnet"),
    *("prime numbers", "rain", "Python", "tea", "a bicycle"),
)
TASKS = (
    "What is {}?",
    "Write a short story about {}.",
    "Explain {} to a child in three sentences.",
    "List five facts about {}.",
    "Translate 'I like {}' into French.",
)
PROMPTS = [task.format(subject) for task in TASKS for subject in SUBJECTS]
COUNT = int(os.environ.get("TRIPTYCH_RELEASED_PROMPTS", len(PROMPTS)))
TOKENS = 64


def messages(prompt: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": prompt}]


@pytest.fixture(scope="module", params=QUESTIONS)
def variable(request: pytest.FixtureRequest) -> str:
    if not os.environ.get(request.param):
        pytest.skip(f"{request.param} names no folder")
    return str(request.param)


@pytest.fixture(scope="module")
def folder(variable: str) -> Path:
    return Path(os.environ[variable])


def answered(folder: Path, topology: str, prompts: list[str]) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(folder, topology, FLOAT32) as service:
            return [
                answer
                for first in range(0, len(prompts), 8)
                for answer in await service.answers(
                    [messages(prompt) for prompt in prompts[first : first + 8]], max_tokens=TOKENS
                )
            ]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    reference, builder = Reference(folder), PromptBuilder(folder)
    return [reference.generate(builder.build(messages(prompt)), [], TOKENS) for prompt in PROMPTS[:COUNT]]


@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_answers(folder: Path, expected: list[list[int]], topology: str) -> None:
    assert answered(folder, topology, PROMPTS[:COUNT]) == expected


def test_the_capital_of_france(variable: str, folder: Path) -> None:
    [answer] = answered(folder, "1P1D", [QUESTIONS[variable]])
    assert "Paris" in Tokenizer(folder).decode(answer)
