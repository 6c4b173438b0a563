"""Grammars are tried out in a sandboxed worker before they are compiled here."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triptych.demo import MODEL_DIR
from triptych.errors import InvalidRequest
from triptych.language import grammar
from triptych.language.grammar import GrammarCompiler
from triptych.messages.work import GrammarKind, GrammarSpec
from triptych.models.config_files import load_config
from triptych.sandbox.protocol import Limits


def made() -> GrammarCompiler:
    folder = Path(MODEL_DIR)
    return GrammarCompiler(folder, load_config(folder)["text_config"]["vocab_size"], lambda: None)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = made()
    yield compiler
    compiler.close()


def compiled(compiler: GrammarCompiler, kind: str, text: str) -> bool:
    """Whether the grammar lets an answer begin in more than one way."""
    future = compiler.start(GrammarSpec(GrammarKind(kind), text), frozenset({0}))
    return bool(future.result(120).bitmask().count_nonzero())


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[a-z]+@[a-z]+"),
        ("json_object", ""),
        ("choice", '["yes", "no"]'),
        ("json_schema", json.dumps(nested(3))),
        ("json_schema", json.dumps({"enum": list(range(12_000))})),  # more than a message between processes has
        ("grammar", 'root ::= "a" | root root'),
    ],
)
def test_grammars_that_make_sense(compiler: GrammarCompiler, kind: str, text: str) -> None:
    assert compiled(compiler, kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "("),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000),
        ("json_schema", "["),
        ("json_schema", "[" * 60_000),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**9})),
        ("grammar", "root ::="),
        ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
)
def test_grammars_that_make_none(compiler: GrammarCompiler, kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the {kind} can't be used") as caught:
        compiled(compiler, kind, text)
    assert ".cc" not in str(caught.value)
    assert compiled(compiler, "regex", "a+")


def test_a_grammar_beyond_the_limits_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LIMITS", Limits(memory_bytes=2**26, seconds=0.5))
    compiler = made()
    try:
        for kind, text in (("json_schema", json.dumps(nested(11))), ("regex", "(a*)*" * 12_000)):
            with pytest.raises(InvalidRequest, match=r"longer than 0.5 s|more memory|crashed"):
                compiled(compiler, kind, text)
            assert compiled(compiler, "regex", "a+")
    finally:
        compiler.close()


def test_what_is_known_is_not_tried_again(compiler: GrammarCompiler) -> None:
    assert compiled(compiler, "regex", "ab+")
    (pid,) = compiler._workers.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        assert compiled(compiler, "regex", "ab+")
    finally:
        os.kill(pid, signal.SIGCONT)
