"""SmolLM2-135M-Instruct, as released, answers as transformers does, and sensibly.

``TRIPTYCH_SMOLLM2`` names the folder that ``scripts/demo --chat`` makes; without it these tests are skipped.
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.harness import FLOAT32, running
from tests.support.reference import Reference
from triptych.prompt.prompt import PromptBuilder
from triptych.prompt.tokenizer import Tokenizer

FOLDER = Path(os.environ.get("TRIPTYCH_SMOLLM2", ""))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("TRIPTYCH_SMOLLM2"), reason="TRIPTYCH_SMOLLM2 names no folder"),
]
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
COUNT = int(os.environ.get("TRIPTYCH_SMOLLM2_PROMPTS", len(PROMPTS)))
TOKENS = 64


def messages(prompt: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": prompt}]


def answered(topology: str, prompts: list[str]) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(FOLDER, topology, FLOAT32) as service:
            return [
                answer
                for first in range(0, len(prompts), 8)
                for answer in await service.answers(
                    [messages(prompt) for prompt in prompts[first : first + 8]], max_tokens=TOKENS
                )
            ]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    reference, builder = Reference(FOLDER), PromptBuilder(FOLDER)
    return [reference.generate(builder.build(messages(prompt)), [], TOKENS) for prompt in PROMPTS[:COUNT]]


@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_answers(expected: list[list[int]], topology: str) -> None:
    assert answered(topology, PROMPTS[:COUNT]) == expected


def test_the_capital_of_france() -> None:
    [answer] = answered("1P1D", ["What is the capital of France?"])
    assert "Paris" in Tokenizer(FOLDER).decode(answer)
