"""Hints are ignored, other names are served, and demands are refused by name, at every level of a request."""

import json
from typing import Any

import pytest

from triptych.api.anthropic_schemas import MessagesRequest
from triptych.api.completion_schemas import CompletionRequest
from triptych.api.field_rules import Alias, Hint, Off
from triptych.api.field_table import CHAT, MESSAGE, REQUEST
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest

HI = {"role": "user", "content": "x"}
TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}


def chat(**fields: Any) -> dict[str, Any]:
    """What remains of a chat request with these fields."""
    body = json.dumps({"messages": [HI]} | fields).encode()
    return parse_request(ChatCompletionRequest, body).model_dump(exclude_unset=True, by_alias=True)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


PLAIN = chat()
LEVELS: list[tuple[Any, Any]] = [
    (lambda extra: {"messages": [HI | extra]}, "messages[0]."),
    (lambda extra: {"messages": [{"role": "user", "content": [IMAGE | extra]}]}, "messages[0].content[0]."),
    (lambda extra: {"tools": [{"type": "function", "function": LOOK} | extra]}, "tools[0]."),
    (lambda extra: {"tools": [{"type": "function", "function": LOOK | extra}]}, "tools[0].function."),
    (lambda extra: {"stream": True, "stream_options": {} | extra}, "stream_options."),
    (lambda extra: {"response_format": {"type": "json_object"} | extra}, "response_format."),
    (lambda extra: {"structured_outputs": {"regex": "a"} | extra}, "structured_outputs."),
    (lambda extra: extra, ""),
]


@pytest.mark.parametrize(("fields", "path"), LEVELS)
def test_null_and_clients_own_fields_are_ignored_at_every_level(fields: Any, path: str) -> None:
    assert chat(**fields({"unheard_of": None, "x_mine": 1, "x-mine": {}})) == chat(**fields({}))


@pytest.mark.parametrize(("fields", "path"), LEVELS)
@pytest.mark.parametrize(
    "extra", [{"unheard_of": False}, {"unheard_of": []}, {"unheard_id": 7}, {"my_metadata": {"a": 1}}]
)
def test_unknown_fields_that_demand_nothing_are_ignored(fields: Any, path: str, extra: dict[str, Any]) -> None:
    """By their value, as of a feature that is off, or by their name, as of what the request belongs to."""
    assert chat(**fields(extra)) == chat(**fields({}))


@pytest.mark.parametrize(("fields", "path"), LEVELS[1:])
def test_an_unknown_field_is_refused_by_name(fields: Any, path: str) -> None:
    error = refused(**fields({"unheard_of": 0}))
    assert (error.param, error.code) == (f"{path}unheard_of", "unknown_parameter")


def test_what_describes_an_earlier_message_is_ignored() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    extra = {"extra_content": {"google": {}}, "thought_signature": "s"}
    messages: list[dict[str, Any]] = [HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    more: list[dict[str, Any]] = [
        HI | {"extra_field": "0"},
        {"id": "m", "annotations": [], "audio": None, **messages[1]},
    ]
    messages.append({"role": "assistant", "content": [TEXT, {"type": "refusal", "refusal": "no"}]})
    more.append({"role": "assistant", "content": [part | {"role": "assistant"} for part in messages[2]["content"]]})
    more[1] |= {"tool_calls": [call | extra | {"index": 0, "function": call["function"] | extra}]}
    assert chat(messages=more) == chat(messages=messages)


def test_what_describes_an_earlier_text_is_ignored_in_every_api() -> None:
    noted = {"role": "assistant", "refusal": None, "status": "completed", "id": "1"}
    items = [
        {"role": "assistant", "content": [{"type": kind, "text": "x"} | noted]}
        for kind in ("output_text", "input_text")
    ]
    answer: Any = parse_request(ResponsesRequest, json.dumps({"model": "m", "input": items}).encode())
    assert [message.content[0].text for message in answer.input] == ["x", "x"]
    block = {"role": "assistant", "content": [TEXT | noted]}
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": [block]}).encode()
    asked: Any = parse_request(MessagesRequest, body)
    assert asked.messages[0].content[0].text == "x"


@pytest.mark.parametrize("name", [name for name, rule in CHAT.by_name.items() if isinstance(rule, Hint)])
@pytest.mark.parametrize("value", [{"type": "ephemeral"}, "24h"])
def test_a_hint_may_have_any_value(name: str, value: Any) -> None:
    assert chat(**{name: value}) == PLAIN


@pytest.mark.parametrize("name", [name for name, rule in CHAT.by_name.items() if isinstance(rule, Off)])
def test_a_feature_that_is_off_may_be_named_but_not_demanded(name: str) -> None:
    rule = CHAT.by_name[name]
    assert isinstance(rule, Off)
    for value in (None, *rule.neutral):
        assert chat(**{name: value}) == PLAIN, value
    error = refused(**{name: ["demanded"]})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    if any(one is True for one in rule.accepted):
        assert refused(**{name: False}).param == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_json": {"type": "object"}}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"reasoning": {"effort": "low", "exclude": True}}, {"reasoning_effort": "low", "include_reasoning": False}),
        ({"reasoning_format": "none"}, {"separate_reasoning": False}),
        (
            {"response_format": {"type": "json_object", "value": {"type": "object"}}},
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        ),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_another_name_means_the_same(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert chat(**given) == chat(**meant)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"regex": "a", "structured_outputs": {"regex": "b"}}, "regex"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"regex": "a", "structured_outputs": "b"}, "regex"),
        ({"reasoning": {"unheard_of": 1}}, "reasoning.unheard_of"),
        ({"thinking": "yes"}, "thinking"),
        ({"messages": [HI | {"images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [HI | {"prefix": True}]}, "messages[0].prefix"),
        ({"messages": [{"role": "user", "content": [TEXT | IMAGE | TEXT]}]}, "messages[0].content[0].image_url"),
    ],
)
def test_two_names_with_different_values_and_demands_within_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_completions_and_responses_have_the_same_table() -> None:
    shared = {"cache_prompt": True, "repeat_penalty": 1.1, "use_beam_search": False, "ignore_eos": None}
    completion = parse_request(CompletionRequest, json.dumps({"prompt": "x"} | shared).encode())
    response = parse_request(ResponsesRequest, json.dumps({"model": "m", "input": "x"} | shared).encode())
    assert completion.repetition_penalty == response.repetition_penalty == 1.1
    assert completion.model is None


def test_other_names_are_those_of_served_fields() -> None:
    for rules, served in ((CHAT, ChatCompletionRequest), (MESSAGE, None), (REQUEST, CompletionRequest)):
        targets = {rule.target.split(".")[0] for rule in rules.by_name.values() if isinstance(rule, Alias)}
        if served is not None:
            assert targets <= served.model_fields.keys()
