"""Sampling defaults from a checkpoint's ``generation_config.json``."""

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.api.context import GenerationDefaults
from triptych.errors import CheckpointError


def defaults(folder: Path, **values: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return GenerationDefaults.load(folder)


def test_openais_defaults_without_a_file_or_with_an_empty_one(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(temperature=1.0, top_k=0, top_p=1.0)
    assert defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}])
def test_greedy_unless_it_samples(tmp_path: Path, do_sample: dict[str, Any]) -> None:
    found = defaults(tmp_path, temperature=0.7, repetition_penalty=1.1, **do_sample)
    assert found == GenerationDefaults(temperature=0.0, repetition_penalty=1.1)  # which greedy choices heed as well


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, GenerationDefaults(0.7, 20, 0.8)),
        ({"temperature": None, "top_k": None, "top_p": None}, GenerationDefaults()),
        ({"temperature": 0, "top_k": 0, "top_p": 1}, GenerationDefaults(0.0, 0, 1.0)),
        ({"top_k": -1}, GenerationDefaults(top_k=-1)),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, GenerationDefaults(min_p=0.1, repetition_penalty=1.05)),
        ({"max_new_tokens": "many"}, GenerationDefaults()),
        ({"temperature": 1e-6}, GenerationDefaults(temperature=0.01)),
        ({"temperature": 0.001}, GenerationDefaults(temperature=0.01)),
    ],
    ids=["unset", "numbers", "null", "neutral", "no limit", "more numbers", "others", "nearly 0", "too low"],
)
def test_supported_fields(tmp_path: Path, values: dict[str, Any], expected: GenerationDefaults) -> None:
    assert defaults(tmp_path, do_sample=True, **values) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_p", -1),
        ("top_p", 1.5),
        ("top_p", [0.5]),
        ("top_k", -2),
        ("top_k", 20.5),
        ("top_k", True),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", float("inf")),
        ("min_p", float("nan")),
        ("repetition_penalty", "high"),
        ("do_sample", "yes"),
    ],
)
def test_invalid_fields_are_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        defaults(tmp_path, **({"do_sample": True} | {name: value}))
    assert f"{tmp_path / 'generation_config.json'}: {name} {value!r}: " in str(caught.value)
