"""Released models answer as transformers does, and sensibly: SmolLM2-135M-Instruct, and Gemma-3-270M, a base model.

Variables name their folders, which ``bench.gguf_checkpoint`` makes of GGUF files; ``scripts/demo --chat`` makes
SmolLM2's. Others name the GGUF files, which are served as they are: activations are rounded, so that of tokens that are
almost equally likely another one may be chosen. Models without a folder or file are skipped.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.harness import FLOAT32, running
from tests.support.reference import Reference
from triptych.checkpoint.gguf.folder import gguf_folder
from triptych.config import EngineConfig
from triptych.prompt.prompt import PromptBuilder
from triptych.prompt.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
QUESTIONS = {
    "TRIPTYCH_SMOLLM2": "What is the capital of France?",
    "TRIPTYCH_GEMMA3": "Question: What is the capital of France?\nAnswer:",
}
"""By the variable that names a model's folder."""
FILES = ("TRIPTYCH_SMOLLM2_GGUF", "TRIPTYCH_GEMMA3_GGUF")
NEAR_TIE = 0.5
"""How much less likely a token may be than the likeliest one, in nats."""
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


def answered(folder: Path, topology: str, prompts: list[Any], engine: EngineConfig = FLOAT32) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(folder, topology, engine) as service:
            return [
                answer
                for first in range(0, len(prompts), 8)
                for answer in await service.answers(prompts[first : first + 8], max_tokens=TOKENS)
            ]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    reference, builder = Reference(folder), PromptBuilder(folder)
    return [reference.generate(builder.build(messages(prompt)), [], TOKENS) for prompt in PROMPTS[:COUNT]]


@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_answers(folder: Path, expected: list[list[int]], topology: str) -> None:
    assert answered(folder, topology, [messages(prompt) for prompt in PROMPTS[:COUNT]]) == expected


def test_the_capital_of_france(variable: str, folder: Path) -> None:
    [answer] = answered(folder, "1P1D", [messages(QUESTIONS[variable])])
    assert "Paris" in Tokenizer(folder).decode(answer)


@pytest.fixture(scope="module", params=FILES)
def file(request: pytest.FixtureRequest) -> Path:
    if not os.environ.get(request.param):
        pytest.skip(f"{request.param} names no GGUF file")
    return Path(os.environ[request.param])


@pytest.fixture(scope="module")
def dequantized(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.mark.parametrize("topology", ["1PD", "1P1D"])
def test_files_as_they_are(file: Path, dequantized: Any, topology: str) -> None:
    """Each token is the likeliest one of the dequantized model after the tokens before it, or nearly as likely."""
    folder = gguf_folder(file)
    builder = PromptBuilder(folder)
    has_template = (folder / "chat_template.jinja").is_file()
    prompts: list[Any] = [messages(prompt) if has_template else prompt for prompt in PROMPTS[:COUNT]]
    answers = answered(folder, topology, prompts, EngineConfig(device="cpu", threads=1))
    apart, same = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = (builder.build(prompt) if has_template else builder.build_text(prompt)).tokens
        with torch.inference_mode():
            likely = dequantized(torch.tensor([[*tokens, *answer]])).logits[0, len(tokens) - 1 : -1].log_softmax(dim=1)
        gaps = likely.amax(dim=1) - likely.gather(1, torch.tensor(answer)[:, None])[:, 0]
        same += int(gaps.max() == 0)
        apart += [gap for gap in gaps.tolist() if gap > 0]
    assert len(answers[0]) == TOKENS
    furthest = max(apart, default=0.0)
    print(
        f"{file.name}, {topology}: {same} of {len(prompts)} answers, all but {len(apart)} tokens; {furthest:.2g} nats"
    )
    assert furthest < NEAR_TIE
    assert len(apart) < 0.04 * len(prompts) * TOKENS
