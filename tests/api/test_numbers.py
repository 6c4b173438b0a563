"""Numeric fields at and beyond their bounds: accepted values are safe in float32, at every endpoint."""

import json
from typing import Any, get_args

import msgspec
import pytest
from pydantic import BaseModel

from triptych.api.completion_schemas import CompletionRequest
from triptych.api.fields import StrictModel
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.errors import BadMessage, InvalidRequest
from triptych.messages.codec import decode, encode
from triptych.messages.work import Generate, SamplingParams
from triptych.types import Address, RequestId

BODIES: dict[type[StrictModel], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
}
BOUNDS: dict[str, tuple[list[float], list[float]]] = {
    # the least and the most, and what is just beyond
    "temperature": ([0, 2], [-1e-9, 2.0001]),
    "top_p": ([0, -0.0, 1e-300, 1], [-1e-9, 1.0001]),
    "min_p": ([0, 1], [-1e-9, 1.0001]),
    "top_k": ([-1, 2**20], [-2, 2**20 + 1]),
    "repetition_penalty": ([0.01, 100], [0, 1e-45, 1e-40, 0.0099, 100.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "seed": ([-(2**63), -1, 0, 2**63 - 1], [-(2**63) - 1, 2**63]),
    "min_tokens": ([0, 2**24], [-1, 2**24 + 1]),
    "thinking_token_budget": ([-1, 2**24], [-2, 2**24 + 1]),
    "priority": ([0, 2**31 - 1], [-1, 2**31]),
    "timeout": ([1e-9, 86_400], [0, -1, 86_401]),
    "n": ([1, 64], [0, 65]),
    "max_tokens": ([1, 2**24], [-1, 2**24 + 1]),
    "max_completion_tokens": ([1, 2**24], [0, 2**24 + 1]),
    "max_output_tokens": ([1, 2**24], [0, 2**24 + 1]),
    "prompt_logprobs": ([0, 20], [-1, 21]),
    "max_tool_calls": ([1, 2**31 - 1], [0, 2**31]),
}
KINDS_AND_FIELDS = [(kind, field) for kind in BODIES for field in BOUNDS if field in kind.model_fields]


def parsed(kind: type[StrictModel], **fields: Any) -> Any:
    return parse_request(kind, json.dumps(BODIES[kind] | fields).encode())


def numeric(kind: type[BaseModel]) -> list[str]:
    """Return the fields that are a single number."""
    return [
        name
        for name, field in kind.model_fields.items()
        if {int, float} & {field.annotation, *(getattr(one, "__origin__", one) for one in get_args(field.annotation))}
    ]


@pytest.mark.parametrize(("kind", "field"), KINDS_AND_FIELDS)
def test_bounds_are_accepted_and_values_beyond_are_refused_by_name(kind: type[StrictModel], field: str) -> None:
    fine, wrong = BOUNDS[field]
    for number in fine:
        parsed(kind, **{field: number})
    for number in [*wrong, float("nan"), float("inf"), float("-inf"), 1e400]:
        with pytest.raises(InvalidRequest) as caught:
            parsed(kind, **{field: number})
        assert caught.value.param == field, number


def test_every_number_is_tested() -> None:
    others = {"logprobs", "top_logprobs", "best_of"}
    assert {name for kind in BODIES for name in numeric(kind)} <= BOUNDS.keys() | others


@pytest.mark.parametrize(
    ("given", "taken"),
    [(0, 0), (1e-300, 0.01), (1e-30, 0.01), (1e-5, 0.01), (0.0099, 0.01), (0.01, 0.01), (0.5, 0.5)],
)
@pytest.mark.parametrize("kind", BODIES)
def test_low_temperatures_are_greedy_or_the_lowest_that_can_be_computed(
    kind: type[StrictModel], given: float, taken: float
) -> None:
    assert parsed(kind, temperature=given).temperature == taken


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("place", "param"),
    [
        ('"logit_bias": {"1": %s}', "logit_bias.1"),
        ('"structured_outputs": {"json": {"maximum": %s}}', "structured_outputs.json"),
        ('"tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": [{"b": %s}]}}}]', None),
        ('"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": %s}}}', None),
        ('"mm_processor_kwargs": {"fps": %s}', "mm_processor_kwargs.fps"),
        ('"chat_template_kwargs": {"a": %s}', "chat_template_kwargs.a"),
    ],
)
def test_no_number_anywhere_is_infinite(place: str, param: str | None, number: str) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "x"}], ' + place % number + "}"
    with pytest.raises(InvalidRequest) as caught:
        parse_request(ChatCompletionRequest, body.encode())
    assert param in (None, caught.value.param)


@pytest.mark.parametrize("bias", [-100.1, 100.1, float("nan")])
def test_biases_are_bounded(bias: float) -> None:
    parsed(CompletionRequest, logit_bias={"1": 100, "2": -100})
    with pytest.raises(InvalidRequest):
        parsed(CompletionRequest, logit_bias={"1": bias})


def generate(**sampling: Any) -> bytes:
    """Return a message with values that no frontend would send."""
    message = Generate(RequestId("r"), [1], b"", 0.0, [], SamplingParams(max_tokens=1), [], Address("frontend"))
    fields = msgspec.msgpack.decode(encode(message))
    fields["sampling"] |= sampling
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 101.0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": 1e30},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: 101.0}},
        {"top_k": 2**63},
        {"top_p": 0.0},
        {"min_p": float("nan")},
        {"seed": -1},
    ],
    ids=str,
)
def test_instances_validate_sampling_parameters(wrong: dict[str, Any]) -> None:
    assert isinstance(decode(generate(temperature=0.01, repetition_penalty=0.01, logit_bias={1: -100.0})), Generate)
    with pytest.raises(BadMessage):
        decode(generate(**wrong))
