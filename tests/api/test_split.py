"""The API with prefill and decode apart: answers equal those of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import SOON, Served, image_part, served, text_part, wait_for

CONTENT = [image_part(), text_part("What is it?")]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
BODIES: list[dict[str, Any]] = [
    {"n": 3, "seed": 5, "temperature": 1.0, "logprobs": True, "top_logprobs": 2},
    {"n": 2, "temperature": 0, "stop": ["e"], "max_tokens": 16},
    {
        "n": 2,
        "seed": 1,
        "ignore_eos": False,
        "max_tokens": 32,
        "response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}},
    },
]


@pytest.fixture(scope="module")
def split(folder: Path) -> Iterator[Served]:
    with served(folder, "1E1P1D") as service:
        yield service


@pytest.mark.parametrize("settings", BODIES, ids=["seeded", "stop", "structured"])
def test_choices_equal_those_of_one_process(service: Served, split: Served, settings: dict[str, Any]) -> None:
    together, apart = (one.post(CONTENT, **settings).json()["choices"] for one in (service, split))
    assert len(together) == settings["n"]
    assert [choice["message"] for choice in apart] == [choice["message"] for choice in together]
    assert [choice["finish_reason"] for choice in apart] == [choice["finish_reason"] for choice in together]
    for one, other in zip(apart, together, strict=True):
        for mine, theirs in zip(*((c["logprobs"] or {}).get("content", []) for c in (one, other)), strict=True):
            assert mine["token"] == theirs["token"]
            assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
    wait_for(split.everything_is_back, SOON)
