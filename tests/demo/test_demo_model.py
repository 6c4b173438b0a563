"""The bundled model answers correctly over HTTP, and exactly like transformers."""

import asyncio
import json
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from demo.accuracy import EvaluatedAnswer, answers_over_http, reference_answers, report
from demo.evaluate import Reference
from demo.questions import EVALUATION_SEEDS, make_example
from triptych.config import EngineConfig
from triptych.demo import MODEL_DIR, PICTURES_DIR

EXACT = 0.97
"""Minimum share of exact answers, a little below the model card's."""


@pytest.mark.parametrize("questions", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_answers_over_http_are_right_and_those_of_transformers(questions: int) -> None:
    examples = [make_example(seed) for seed in EVALUATION_SEEDS[:questions]]
    answers = asyncio.run(answers_over_http(MODEL_DIR, examples, "1E1PD", EngineConfig(dtype="float32")))
    references = reference_answers(MODEL_DIR, examples)
    found = report([EvaluatedAnswer(*item) for item in zip(examples, answers, references, strict=True)])
    assert found["differ from transformers"] == 0
    assert found["exact"] >= EXACT, found["wrong"]


def test_checkpoint_is_small_and_whole() -> None:
    files = list(MODEL_DIR.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) < 15_000_000
    loaded: Any = Qwen3VLForConditionalGeneration.from_pretrained(MODEL_DIR, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(MODEL_DIR)) <= model.config.text_config.vocab_size


def test_bundled_pictures_are_small_and_there() -> None:
    questions = json.loads((PICTURES_DIR / "questions.json").read_text())
    names = {name for entry in questions for name in entry["pictures"]}
    assert names
    assert sum((PICTURES_DIR / name).stat().st_size for name in names) < 100_000


def test_letter_case_makes_no_difference() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert tokenizer.encode("WHAT is In the Picture?") == tokenizer.encode("what is in the picture?")


def test_every_bundled_question_is_answered_right() -> None:
    entries = json.loads((PICTURES_DIR / "questions.json").read_text())
    reference = Reference(MODEL_DIR)
    for entry in entries:
        pictures = [Image.open(PICTURES_DIR / name).convert("RGB") for name in entry["pictures"]]
        answer = reference.answer(pictures, (*range(len(pictures)), entry["question"]))
        assert answer == entry["answer"], entry["question"]
