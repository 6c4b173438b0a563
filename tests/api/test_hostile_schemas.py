"""Schemas of tools that take long to read: time and memory are in proportion to their size, and errors are typed."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.support.format_cases import CASES
from tests.support.formats import find
from triptych.api.response_format import answer_grammar
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest
from triptych.prompt.formats.catalog import Formats
from triptych.prompt.formats.reasoning import Reasoning

Schema = dict[str, Any]
MANY = 1000


def of(properties: Schema, definitions: Schema | None = None) -> Schema:
    return {"type": "object", "properties": properties, "$defs": definitions or {}}


def named(name: str, spelling: int = 0) -> Schema:
    """A reference, in one of many spellings."""
    return {"$ref": f"#{spelling or ''}/$defs/{name}"}


def doubling() -> Schema:
    """Each schema refers to the next one eight times."""
    levels = {f"s{number}": {"anyOf": [named(f"s{number + 1}")] * 8} for number in range(20)}
    return of({"a": named("s0")}, levels | {"s20": {"type": "string"}})


def spellings() -> Schema:
    members = {f"p{number}": {"type": "string"} for number in range(MANY)}
    return of({"a": {"anyOf": [named("big", number) for number in range(MANY)]}}, {"big": of(members)})


def unions() -> Schema:
    """All properties are of one union of many types."""
    union = {"anyOf": [{"type": "string"} for _ in range(2 * MANY)]}
    return of({f"p{number}": named("union") for number in range(MANY)}, {"union": union})


def equal_tags() -> Schema:
    big = of({f"p{number}": {"const": f"{number}"} for number in range(MANY)}) | {"required": [f"p{MANY - 1}"]}
    return of({"a": {"oneOf": [named("big")] * MANY}}, {"big": big})


def long_definitions() -> Schema:
    long = {"type": "string", "description": "x" * 2**20}
    return of({f"p{number}": {"type": "integer"} for number in range(MANY)}, {"long": long})


def long_pattern() -> Schema:
    return of({"a": {"type": "string", "pattern": "ab" * 2**18}})


@pytest.fixture(scope="module", params=["qwen3.5", "gemma4"])
def formats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Formats:
    """Arguments apart, strings as plain text and other values as JSON; and values in a form of their own."""
    return find(tmp_path_factory.mktemp("formats") / "model", CASES[request.param])[0]


def written(formats: Formats, parameters: Schema) -> float:
    """Write the grammar of a demanded call, unless it is refused. Returns the seconds that it took."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    request = parse_request(ChatCompletionRequest, json.dumps(body).encode())
    began = time.process_time()
    with suppress(InvalidRequest):
        answer_grammar(request, Reasoning.NONE, formats)
    return time.process_time() - began


@pytest.mark.parametrize("make", [doubling, spellings, unions, equal_tags, long_definitions, long_pattern])
def test_they_take_time_in_proportion(formats: Formats, make: Callable[[], Schema]) -> None:
    assert written(formats, make()) < 2


ODD: list[Any] = [5, "a", {"a": 1}, [[1]], [{}], True]


@pytest.mark.parametrize(
    "keyword", ["type", "enum", "anyOf", "oneOf", "$ref", "required", "properties", "pattern", "minLength", "minItems"]
)
def test_keywords_of_other_types_are_refused_or_without_effect(formats: Formats, keyword: str) -> None:
    for odd in ODD:
        tagged = [{"$ref": odd}, of({"t": {"const": "a"}}) | {"required": odd}]
        for one in ({keyword: odd}, {"type": "string", keyword: odd}, {"oneOf": tagged}):
            written(formats, of({"a": one}))
