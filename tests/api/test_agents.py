"""Requests of agents and OpenAI's own clients: tool choices, refusals, earlier items, hints."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.chat import the_error
from tests.support.reasoning import thinking_service
from tests.support.responses import answer, post
from tests.support.serving import Served, image_part
from tests.support.tools import TOOLS, choice
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest

HELLO = {"role": "user", "content": "Hello"}
RESPONSE_TOOLS = [one["function"] | {"type": "function"} for one in TOOLS]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("agents") / "thinker") as service:
        yield service


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, json.dumps({"model": "m", "messages": [HELLO]} | fields).encode())


def responses(**fields: Any) -> ResponsesRequest:
    return parse_request(ResponsesRequest, json.dumps({"model": "m", "input": "x"} | fields).encode())


# ── choices of tools ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["weather", "time"])
def test_only_allowed_tools_are_called(thinker: Served, name: str) -> None:
    one_call: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    made = choice(thinker, tool_choice=allowed("required", name), seed=2, **one_call)
    assert {call["function"]["name"] for call in made["message"]["tool_calls"]} == {name}
    assert made["finish_reason"] == "tool_calls"
    same = choice(thinker, tools=[one for one in TOOLS if one["function"]["name"] == name], seed=2, tool_choice="auto")
    free = choice(thinker, tools=TOOLS, tool_choice=allowed("auto", name), seed=2)
    assert free["message"]["content"] == same["message"]["content"], "the prompt has only the allowed tools"


def test_allowed_tools_of_responses(thinker: Served) -> None:
    wanted = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    made = answer(thinker, tools=RESPONSE_TOOLS, tool_choice=wanted, max_output_tokens=300, temperature=0.0)
    assert {item["name"] for item in made["output"]} == {"time"}
    assert made["tool_choice"] == wanted


def test_an_allowed_tool_must_be_there() -> None:
    for wrong, param in (
        (allowed("auto", "weather", "wether"), "tool_choice.allowed_tools.tools[1].function.name"),
        (allowed("never", "weather"), "tool_choice.allowed_tools.mode"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "custom", "custom": {"name": "weather"}}, "tool_choice.custom.name"),
        ({"type": "telepathy", "function": {"name": "weather"}}, "tool_choice.type"),
        (5, "tool_choice"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            chat(tools=TOOLS, tool_choice=wrong)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="only for requests with tools"):
        chat(tool_choice=allowed("auto", "weather"))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_earlier_refusal_becomes_the_assistants_message(service: Served) -> None:
    def history(**assistant: Any) -> list[dict[str, Any]]:
        return [HELLO, {"role": "assistant"} | assistant, HELLO]

    expected = service.text(messages=history(content="I won't."), temperature=0)
    part = {"type": "refusal", "refusal": "I won't."}
    for refusal in ({"content": [part]}, {"content": None, "refusal": "I won't."}, {"refusal": "I won't."}):
        assert service.text(messages=history(**refusal), temperature=0) == expected
    items = [HELLO, {"role": "assistant", "content": [part]}, HELLO]
    made = answer(service, input=items, temperature=0.0, max_output_tokens=8, ignore_eos=True)
    assert made["output"][0]["content"][0]["text"] == expected
    the_error(service.post(messages=[HELLO | {"content": [part]}]), 400, "messages[0].content[0].refusal")
    the_error(service.post(messages=[HELLO | {"refusal": "no"}]), 400, "messages[0].refusal")
    both = {"role": "assistant", "content": "a", "refusal": "b"}
    the_error(service.post(messages=[HELLO, both, HELLO]), 400, "messages[1].refusal")


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_openais_client_dumps_can_be_sent_back(thinker: Served) -> None:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        tools: Any = RESPONSE_TOOLS
        ask: dict[str, Any] = {"model": thinker.model, "tools": tools, "max_output_tokens": 300, "temperature": 0}
        called = client.responses.create(input="Hello", tool_choice="required", parallel_tool_calls=False, **ask)
        sent = client.responses.create(input="Hello", model=thinker.model, max_output_tokens=4)
        for by_alias in (False, True):
            dumped: Any = [item.model_dump(by_alias=by_alias) for item in (*sent.output, *called.output)]
            (call,) = [item for item in dumped if item["type"] == "function_call"]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
            history: Any = [HELLO, *dumped, output, HELLO]
            assert client.responses.create(input=history, **ask | {"max_output_tokens": 4}).output


def test_the_result_of_a_call_may_have_parts() -> None:
    def messages(output: Any) -> Any:
        call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
        return (
            responses(input=[call, {"type": "function_call_output", "call_id": "c", "output": output}])
            .to_chat()
            .messages
        )

    text = {"type": "input_text", "text": "sunny"}
    assert messages([text])[1].content == messages("sunny")[1].content == "sunny"
    assert messages([text, text])[1].content == "sunny\nsunny"
    assert messages([])[1].content == ""
    picture = {"type": "input_image", "image_url": image_part()["image_url"]["url"]}
    (first, second) = messages([text, picture])[1].content
    assert (first.text, second.image_url.url) == ("sunny", picture["image_url"])
    with pytest.raises(InvalidRequest) as caught:
        messages([{"type": "input_text"}])
    assert caught.value.param == "input[1].output[0].text"


def test_fields_that_agents_send_are_accepted(service: Served) -> None:
    """Fields of Codex and OpenAI's Agents SDK without effect here; docs/api.md has the reasons."""
    plain = answer(service, temperature=0.0)["output"][0]["content"]
    sent = {
        "store": False, "prompt_cache_key": "conversation-1", "prompt_cache_retention": "in_memory",
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"},
        "service_tier": "auto", "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "truncation": "disabled",
        "client_metadata": {"session_id": "a", "x": {"y": [1]}}, "tools": [{"type": "mcp", "a": {"b": 1}}],
        "max_tool_calls": 3, "conversation": None, "prompt": None, "parallel_tool_calls": True, "tool_choice": "auto",
    }  # fmt: skip
    made = answer(service, temperature=0.0, **sent)
    assert made["output"][0]["content"] == plain
    assert made["reasoning"] == {"effort": None, "summary": "auto"}
    assert not responses(include=["reasoning.encrypted_content"]).wants_logprobs
    for field, value, param in (
        ("text", {"verbosity": "high"}, "text.verbosity"),
        ("reasoning", {"summary": "long"}, "reasoning.summary"),
        ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ("tools", [{"type": "telepathy"}], "tools[0].type"),
    ):
        the_error(post(service, **sent | {field: value}), 400, param)


def test_prompts_share_prefixes_whatever_their_cache_key(service: Served) -> None:
    """The key is a hint, not a salt: agents use one per conversation, and all conversations share a prefix."""
    text = "A beginning that two conversations have, longer than a page of the cache. " * 3

    def cached(**fields: Any) -> int:
        usage = service.post(text, max_tokens=1, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    before = cached(prompt_cache_key="a")
    assert cached(prompt_cache_key="a") > before + 100
    assert cached(prompt_cache_key="b") > before + 100
    assert cached(prompt_cache_key="a", cache_salt="mine") == 0
