"""``/v1/messages``: the answers of chats in the form of Anthropic's Messages API."""

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from tests.support.reasoning import thinking_service
from tests.support.serving import Served, image
from tests.support.tools import CITY
from triptych.api.answers import ChoiceDelta
from triptych.api.anthropic_messages import ContentBlocks
from triptych.api.anthropic_schemas import CountTokensRequest, MessagesRequest
from triptych.api.security import add_security
from triptych.api.validation import parse_request
from triptych.config import FrontendConfig
from triptych.errors import InvalidRequest
from triptych.prompt.formats.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "tells the weather", "input_schema": CITY, "cache_control": {"type": "x"}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("anthropic") / "thinker") as service:
        yield service


def post(service: Served, path: str = PATH, **fields: Any) -> httpx.Response:
    body = {"model": service.model, "messages": [{"role": "user", "content": "Hello"}]} | fields
    if path == PATH:
        body = {"max_tokens": 24} | body
    with service.client() as client:
        return client.post(path, json=body)


def answer(service: Served, **fields: Any) -> dict[str, Any]:
    response = post(service, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(service: Served, **fields: Any) -> list[Any]:
    made = []
    for block in post(service, stream=True, **fields).text.strip().split("\n\n"):
        name, data = block.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def put_together(made: list[Any]) -> dict[str, Any]:
    """The message that a stream's events add up to, as Anthropic's clients do it."""
    assert [event["type"] for event in made[:2]] == ["message_start", "ping"]
    message = made[0]["message"]
    inputs: dict[int, str] = {}
    for event in made[2:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if event["index"] in inputs:
                    message["content"][event["index"]]["input"] = json.loads(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert made[-1]["type"] == "message_stop"
    return dict(message)


def the_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    whole = response.json()
    assert whole == {"type": "error", "error": {"type": kind, "message": whole["error"]["message"]}}
    return str(whole["error"]["message"])


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = {"output_tokens": message["usage"]["output_tokens"]}
    return message | {"id": "", "content": blocks, "usage": usage}


def test_the_answer_is_that_of_a_chat(service: Served) -> None:
    expected = service.text("Hello", max_tokens=24, temperature=0, ignore_eos=False)
    whole = answer(service, temperature=0.0)
    assert whole["content"] == [{"type": "text", "text": expected}]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert whole["usage"]["output_tokens"] == 24
    assert without_ids(put_together(events(service, temperature=0.0))) == without_ids(whole)


def test_tokens_in_the_cache_are_counted_apart(service: Served) -> None:
    messages = [{"role": "user", "content": "all the way down, " * 40}]
    first, second = (answer(service, messages=messages, max_tokens=1)["usage"] for _ in range(2))
    counted = post(service, f"{PATH}/count_tokens", messages=messages).json()["input_tokens"]
    assert second["cache_read_input_tokens"] > 0
    for usage in (first, second):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


def test_images(service: Served) -> None:
    """In base64 as in a URL of a chat, small and large."""
    for size in (96, 640):
        data = base64.b64encode(image(size, size, seed=3)).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        url = {"type": "url", "url": f"data:image/png;base64,{data}"}
        made = [
            answer(
                service,
                temperature=0.0,
                messages=[
                    {"role": "user", "content": [{"type": "image", "source": one}, {"type": "text", "text": "What?"}]}
                ],
            )
            for one in (source, url)
        ]
        assert made[0]["content"] == made[1]["content"]
        assert made[0]["usage"]["input_tokens"] + made[0]["usage"]["cache_read_input_tokens"] > 4


def test_a_stop_sequence(service: Served) -> None:
    text = answer(service, temperature=0.0)["content"][0]["text"]
    stop = text[4:6]
    whole = answer(service, temperature=0.0, stop_sequences=["never there", stop])
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == text[: text.find(stop)]
    streamed = put_together(events(service, temperature=0.0, stop_sequences=["never there", stop]))
    assert without_ids(streamed) == without_ids(whole)


def test_the_last_message_is_continued(service: Served) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The answer is"}]
    with service.client() as client:
        chat = client.post(
            "/v1/chat/completions",
            json={
                "model": service.model,
                "messages": messages,
                "continue_final_message": True,
                "max_tokens": 24,
                "temperature": 0,
            },
        ).json()
    assert (
        answer(service, messages=messages, temperature=0.0)["content"][0]["text"]
        == chat["choices"][0]["message"]["content"]
    )


def test_a_tool_that_must_be_called(thinker: Served) -> None:
    for kind in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        choice = kind | {"disable_parallel_tool_use": True}
        fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 1500, "temperature": 1.0}
        for message in (answer(thinker, **fields), put_together(events(thinker, **fields))):
            assert message["stop_reason"] == "tool_use"
            call = message["content"][0]
            assert (call["type"], call["name"]) == ("tool_use", "weather")
            assert call["id"].startswith("toolu_")
            assert set(call["input"]) == {"city", "days"}


def test_the_turn_after_a_call(thinker: Served) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Is it hot?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I'll ask.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I'll look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "days": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "hot"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    parsed = parse_request(MessagesRequest, json.dumps({"max_tokens": 5, "messages": messages, "system": "S"}).encode())
    roles = [(number, message.role) for number, message in parsed.chat_messages()]
    assert roles == [(0, "system"), (0, "user"), (1, "assistant"), (2, "tool"), (2, "user")]
    made = parsed.to_chat().messages[2]
    (call,) = made.tool_calls or []
    assert (made.reasoning_content, call.function.arguments) == ("I'll ask.", '{"city": "Rome", "days": 1}')
    answer(
        thinker, messages=messages, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}]
    )


@pytest.mark.parametrize(
    ("thinking", "reasons"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thinking_is_the_templates_switch(thinking: Any, reasons: bool) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "?"}], "thinking": thinking}
    made = parse_request(MessagesRequest, json.dumps(body).encode()).to_chat()
    assert made.chat_template_kwargs == {"enable_thinking": reasons, "thinking": reasons}


def test_thinking_comes_before_the_text(thinker: Served) -> None:
    fields: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 60}
    whole = answer(thinker, temperature=0.0, **fields)
    assert whole["content"][0]["type"] == "thinking"
    assert whole["content"][0]["signature"]
    assert without_ids(put_together(events(thinker, temperature=0.0, **fields))) == without_ids(whole)


def test_a_budget_ends_thinking(thinker: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0}
    budget = {"type": "enabled", "budget_tokens": 5}
    limited = answer(thinker, thinking=budget, **fields)
    assert [block["type"] for block in limited["content"]] == ["thinking", "text"]
    assert len(limited["content"][0]["thinking"]) < len(
        answer(thinker, thinking={"type": "adaptive"}, **fields)["content"][0]["thinking"]
    )


def test_a_model_without_reasoning_has_no_budget(service: Served) -> None:
    answer(service, thinking={"type": "enabled", "budget_tokens": 5})


def test_a_reference_to_a_tool_in_a_result_is_its_name() -> None:
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [reference]}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [result]}]}
    (message,) = parse_request(MessagesRequest, json.dumps(body).encode()).to_chat().messages
    assert isinstance(message.content, list)
    assert [part.model_dump()["text"] for part in message.content] == ["weather"]


def test_hints_of_other_apis_are_ignored() -> None:
    given = {"keep_alive": "5m", "litellm_metadata": {"a": 1}, "trace_id": "x", "user_profile_id": "x"}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "?"}]}
    plain, more = (parse_request(MessagesRequest, json.dumps(one).encode()) for one in (body, body | given))
    assert plain.to_chat() == more.to_chat()


def test_blocks_of_an_answer() -> None:
    """Each block starts and stops once, whatever the deltas bring together; input that was cut off is empty."""
    deltas: list[list[Event]] = [
        [ReasoningDelta("I "), ReasoningDelta("see"), TextDelta("Well")],
        [TextDelta(" then"), ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": ')],
        [ToolCallArguments(0, "1}"), ToolCallStart(1, "g"), ToolCallArguments(1, '{"b": "')],
    ]
    content = ContentBlocks()
    made = [one for found in deltas for one in content.add(ChoiceDelta(0, found, [], None))] + [*content.finish()]
    kinds = [block["type"] for block in content.blocks]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in content.blocks[2:]] == [{"a": 1}, {}]
    for kind in ("content_block_start", "content_block_stop"):
        assert [one["index"] for one in made if one["type"] == kind] == [0, 1, 2, 3]


def test_errors_have_anthropics_form(service: Served) -> None:
    assert "max_tokens" in the_error(post(service, max_tokens=None), 400, "invalid_request_error")
    assert "nope" in the_error(post(service, model="nope"), 404, "not_found_error")
    assert "cached" in the_error(post(service, cached=True), 400, "invalid_request_error")
    long = [{"role": "user", "content": "word " * 4000}]
    assert "prompt is too long: " in the_error(post(service, messages=long), 400, "invalid_request_error")
    room = the_error(post(service, max_tokens=100_000), 400, "invalid_request_error")
    assert "exceed context limit: " in room
    with service.client() as client:
        assert client.post(PATH, content=b"{").json()["error"]["type"] == "invalid_request_error"


def test_errors_name_the_requests_own_messages(service: Served) -> None:
    """The chat has a system message more, and two for the second message."""
    odd = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "so"}, odd]},
    ]
    assert "messages[2]" in the_error(post(service, system="S", messages=messages), 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], named: str) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "?"}]} | fields
    with pytest.raises(InvalidRequest) as refused:
        parse_request(MessagesRequest, json.dumps(body).encode())
    assert named in str(refused.value)


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_empty_messages(content: Any, role: str) -> None:
    body = {"messages": [{"role": "user", "content": "?"}, {"role": role, "content": content}]}
    assert not parse_request(CountTokensRequest, json.dumps(body).encode()).to_chat().continue_final_message


@pytest.mark.parametrize(
    ("headers", "is_accepted"),
    [
        ({}, False),
        ({"x-api-key": "two"}, False),
        ({"x-api-key": "one"}, True),
        ({"authorization": "Bearer one"}, True),
        ({"authorization": "Bearer two", "x-api-key": "one"}, True),
        ({"authorization": "one"}, False),
        ({"authorization": "Basic one", "x-api-key": ""}, False),
    ],
)
def test_keys(headers: dict[str, str], is_accepted: bool) -> None:
    """Anthropic's clients send ``X-Api-Key``, and a bearer's token if they have one."""
    app = add_security(PlainTextResponse("in"), FrontendConfig.of(api_key=("one",)))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(PATH, headers=headers)

    response = asyncio.run(ask())
    if is_accepted:
        assert response.text == "in"
    else:
        the_error(response, 401, "authentication_error")
