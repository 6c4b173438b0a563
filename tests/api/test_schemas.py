"""Errors name the field, for every kind of mistake in a body."""

import json
from typing import Any

import pytest

from triptych.api.fields import MAX_STOP_STRINGS
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def with_content(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}]} | fields


CONTENT = "messages[0].content"
TOOLS = [{"type": "function", "function": {"name": "look"}}]
NAMED = {"type": "function", "function": {"name": "hear"}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
MISTAKES: list[tuple[Any, str | None, str]] = [
    ({"model": "m"}, "messages", "required"),
    ({"model": "m", "messages": []}, "messages", "at least 1"),
    ({"model": "m", "messages": {}}, "messages", "array"),
    (with_content("x", model=3), "model", "string"),
    ({"model": "m", "messages": ["x"]}, "messages[0]", "object"),
    ({"model": "m", "messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "assistant"),
    ({"model": "m", "messages": [{"role": "function", "content": "x"}]}, "messages[0].name", "required"),
    (
        with_content("x", messages=[{"role": "user", "content": "x", "function_call": {"name": "f"}}]),
        "messages[0].function_call",
        "ass",
    ),
    ({"model": "m", "messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "required"),
    (with_content("x", messages=[{"role": "assistant"}]), CONTENT, "required"),
    (
        with_content("x", messages=[{"role": "user", "content": "x", "tool_calls": [CALL]}]),
        "messages[0].tool_calls",
        "ass",
    ),
    (with_content([{"type": "image_url", "image_url": None}]), f"{CONTENT}[0].image_url", "uuid"),
    (with_content([{"type": "image_url", "image_url": None, "uuid": "u" * 129}]), f"{CONTENT}[0].uuid", "128"),
    ({"model": "m", "messages": [{"role": "user"}]}, CONTENT, "required"),
    (with_content(None), CONTENT, "string or an array"),
    (with_content(3), CONTENT, "string or an array"),
    (with_content({"type": "text", "text": "x"}), CONTENT, "string or an array"),
    (with_content([7]), f"{CONTENT}[0]", "object"),
    (with_content([{"text": "x"}]), f"{CONTENT}[0].type", "required"),
    (with_content([IMAGE, {"type": "file_url", "file_url": {"url": "x"}}]), f"{CONTENT}[1].type", "'file_url'"),
    (with_content([{"type": "text"}]), f"{CONTENT}[0].text", "required"),
    (with_content([IMAGE, {"type": "text", "text": 3}]), f"{CONTENT}[1].text", "string"),
    (with_content([{"type": "text", "text": "x", "more": 1}]), f"{CONTENT}[0].more", "unknown"),
    (with_content([{"type": "image_url"}]), f"{CONTENT}[0].image_url", "required"),
    (with_content([{"type": "image_url", "image_url": 7}]), f"{CONTENT}[0].image_url", "object"),
    (with_content([{"type": "image_url", "image_url": {"url": 3}}]), f"{CONTENT}[0].image_url.url", "string"),
    (with_content([{"type": "image_url", "image_url": {}}]), f"{CONTENT}[0].image_url", "uuid"),
    (
        with_content([{"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}]),
        f"{CONTENT}[0].image_url.detail",
        "'auto', 'low', 'high' or 'original'",
    ),
    (with_content([{"type": "image_url", "image_url": {"url": "", "fps": 1}}]), f"{CONTENT}[0].image_url.fps", "unkn"),
    (with_content("x", stop=3), "stop", "string or an array"),
    (with_content("x", stop=""), "stop", "at least 1"),
    (with_content("x", stop=["a", 3]), "stop[1]", "string"),
    (with_content("x", stop=["a", ""]), "stop[1]", "at least 1"),
    (with_content("x", stop=["a"] * (MAX_STOP_STRINGS + 1)), "stop", "at most"),
    (with_content("x", stop_token_ids=[1, "x"]), "stop_token_ids[1]", "integer"),
    (with_content("x", stop_token_ids=[-1]), "stop_token_ids[0]", "greater"),
    (with_content("x", temperature="1"), "temperature", "number"),
    (with_content("x", temperature=2.1), "temperature", "less"),
    (with_content("x", temperature=float("nan")), "temperature", "finite"),
    (with_content("x", temperature=float("inf")), "temperature", "finite"),
    (with_content("x", top_p=-1), "top_p", "greater"),
    (with_content("x", top_p=float("nan")), "top_p", "finite"),
    (with_content("x", top_k=1.5), "top_k", "integer"),
    (with_content("x", max_tokens=0), "max_tokens", "greater"),
    (with_content("x", max_tokens=True), "max_tokens", "integer"),
    (with_content("x", max_completion_tokens=10**400), "max_completion_tokens", "less"),
    (with_content("x", seed=2**63), "seed", "less"),
    (with_content("x", n=0), "n", "1"),
    (with_content("x", n=65), "n", "64"),
    (with_content("x", logprobs=1), "logprobs", "boolean"),
    (with_content("x", top_logprobs=2), "top_logprobs", "logprobs: true"),
    (with_content("x", logprobs=True, top_logprobs=21), "top_logprobs", "20"),
    (with_content("x", presence_penalty=2.5), "presence_penalty", "2"),
    (with_content("x", repetition_penalty=0), "repetition_penalty", "0"),
    (with_content("x", min_p=1.5), "min_p", "1"),
    (with_content("x", logit_bias={"the": 1}), "logit_bias.the", "pattern"),
    (with_content("x", logit_bias={"5": 101}), "logit_bias.5", "100"),
    (with_content("x", cache_salt=""), "cache_salt", "1 character"),
    (with_content("x", response_format={"type": "xml"}), "response_format.type", "json_schema"),
    (with_content("x", stream="yes"), "stream", "boolean"),
    (with_content("x", stream_options={"include_usage": 1}), "stream_options.include_usage", "boolean"),
    (with_content("x", stream_options={"more": 1}), "stream_options.more", "unknown"),
    (with_content("x", stream_options={"include_usage": True}), "stream_options", "stream: true"),
    (with_content("x", tools=[{"type": "retrieval"}]), "tools[0].type", "'function'"),
    (with_content("x", tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name", "pattern"),
    (with_content("x", tools=TOOLS * 2), "tools[1].function.name", "look"),
    (with_content("x", tool_choice="auto"), "tool_choice", "requests with tools"),
    (with_content("x", tools=TOOLS, tool_choice="any"), "tool_choice", "'required'"),
    (with_content("x", tools=TOOLS, tool_choice=3), "tool_choice", "string or an object"),
    (with_content("x", tools=TOOLS, tool_choice=NAMED), "tool_choice.function.name", "'hear'"),
    (with_content("x", functions=[{"name": "f"}]), "functions", "use tools"),
    (with_content("x", priority=-1), "priority", "greater than or equal to 0"),
    (with_content("x", timeout=0), "timeout", "greater"),
    (with_content("x", cache_salt="s" * 129), "cache_salt", "128"),
    (with_content("x", chat_template="{{ 1 }}"), "chat_template", "not supported"),
    (with_content("x", chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages", "string"),
    (with_content("x", mm_processor_kwargs=[]), "mm_processor_kwargs", "object"),
    (with_content("x", mm_processor_kwargs={str(n): 1 for n in range(33)}), "mm_processor_kwargs", "32"),
    (with_content("x", continue_final_message=True), "continue_final_message", "assistant"),
    (with_content("x", continue_final_message=True, add_generation_prompt=True), "continue_final_message", "exclude"),
    (with_content("x", reasoning_effort="much"), "reasoning_effort", "'low'"),
    (with_content("x", **{"two words": 1}), "two words", "two words"),
    (with_content("x", **{"": 1}), None, "unknown"),
    ([], None, "object"),
    (None, None, "object"),
]


@pytest.mark.parametrize(("body", "param", "expected_message"), MISTAKES)
def test_an_error_names_the_field(body: Any, param: str | None, expected_message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(ChatCompletionRequest, json.dumps(body).encode())
    assert caught.value.param == param
    assert expected_message.lower() in str(caught.value).lower()
    assert (param or "") in str(caught.value), "the message names the field too"
    assert "<" not in str(caught.value), "nothing of how the types are declared"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":"\\ud800"}',
        b'{"seed":' + b"9" * 9999 + b"}",
    ],
    ids=["empty", "cut", "not utf-8", "deep array", "deep object", "half surrogate", "huge number"],
)
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"not valid JSON: [a-zE]"):
        parse_request(ChatCompletionRequest, body)


def test_the_default_fields_of_openai_clients_are_accepted() -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "temperature": 1,
    }
    neutral |= {"response_format": {"type": "text"}, "user": "u", "stream": False, "stream_options": None}
    request = parse_request(
        ChatCompletionRequest, json.dumps(with_content([IMAGE, {"type": "text", "text": "x"}], **neutral)).encode()
    )
    assert request.temperature == 1.0
    assert request.stop_strings == []


def test_results_that_name_no_call_belong_to_calls_in_order() -> None:
    calls = [CALL | {"id": name} for name in "abc"]
    results: list[dict[str, Any]] = [{"role": "tool", "content": text} for text in "123"]
    results[0]["tool_call_id"] = "a"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}, *results]
    request = parse_request(ChatCompletionRequest, json.dumps({"messages": messages}).encode())
    assert [message.tool_call_id for message in request.messages[2:]] == ["a", "b", "c"]
    again = json.dumps({"messages": [*messages, results[1]]}).encode()
    with pytest.raises(InvalidRequest, match=r"messages\[5\]\.tool_call_id"):
        parse_request(ChatCompletionRequest, again)


def test_a_tool_itself_may_be_the_choice() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}, "strict": True}}
    body = with_content("x", tools=[tool], tool_choice=tool)
    request = parse_request(ChatCompletionRequest, json.dumps(body).encode())
    assert request.model_dump()["tool_choice"] == {"type": "function", "function": {"name": "look"}}


def test_a_message_names_all_fields_with_the_same_error() -> None:
    cases = (
        ({"frob": 1, "nicate": 2}, "frob", "nicate"),
        ({"logit_bias": {"x": 1, "7": 1, "y": 1}}, "logit_bias.x", "logit_bias.y"),
    )
    for fields, first, others in cases:
        with pytest.raises(InvalidRequest, match=f"^{first}, {others}: ") as raised:
            parse_request(ChatCompletionRequest, json.dumps(with_content("x", **fields)).encode())
        assert raised.value.param == first
