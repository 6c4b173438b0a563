"""Custom tools of ``/v1/chat/completions``, whose input is text."""

import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.chat import the_error
from tests.support.reasoning import thinking_service
from tests.support.serving import Served
from tests.support.tools import CITY, tool
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.tool_calls import ToolCalls
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest
from triptych.prompt.formats.events import Event, ToolCallArguments, ToolCallStart


def custom(name: str, syntax: str = "", definition: str = "") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}} if syntax else {"type": "text"}
    return {"type": "custom", "custom": {"name": name, "description": f"the {name}", "format": form}}


DIAL, PATCH, NOTE = custom("dial", "regex", "^[0-9]{3}$"), custom("patch", "lark", "start: /a/+"), custom("note")
WEATHER = tool("weather", CITY, strict=True)
TOOLS = [WEATHER, DIAL, PATCH, NOTE]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("tools") / "thinker") as service:
        yield service


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_request(ChatCompletionRequest, json.dumps(body).encode())


def named(name: str, kind: str = "custom") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def test_they_are_functions_for_the_model() -> None:
    functions = [one.function for one in chat(tools=TOOLS).functions]
    assert [one.name for one in functions] == ["weather", "dial", "patch", "note"]
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert functions[3].parameters == text | {"additionalProperties": False}
    assert [one.parameters["properties"]["input"]["pattern"] for one in functions[1:3] if one.parameters] == [
        "^(?:[0-9]{3})$",
        "^(?:(?:(?:a))+)$",
    ]
    assert "start: /a/+" in (functions[2].description or "")
    allowed = {"mode": "auto", "tools": [named("dial"), named("weather", "function")]}
    chosen = chat(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [one.function.name for one in chosen.callable_tools] == ["weather", "dial"]


def test_an_earlier_call_is_that_of_the_function() -> None:
    calls = [{"id": "1", "type": "custom", "custom": {"name": "note", "input": 'say "hi"'}}]
    calls += [{"id": "2", "type": "custom", "custom": {"name": "note"}}]
    made = chat(messages=[{"role": "assistant", "tool_calls": calls}]).messages[0].calls()
    assert [(id_, call.name, json.loads(call.arguments or "")) for id_, call in made] == [
        ("1", "note", {"input": 'say "hi"'}),
        ("2", "note", {"input": ""}),
    ]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [custom("a", "abnf", "x")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [custom("a", "regex")]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [WEATHER, custom("weather")]}, "tools[1].custom.name"),
        ({"tools": [custom("a", "lark", 'start: "(" start? ")"')]}, "tools[0].custom.format.grammar.definition"),
        (
            {"tools": [custom(name, "lark", "start: /a/" + " " * 2**15) for name in "ab"]},
            "tools[1].custom.format.grammar.definition",
        ),
        ({"tools": TOOLS, "tool_choice": named("dial", "function")}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": named("weather")}, "tool_choice.custom.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]},
            "messages[0].tool_calls[0].custom",
        ),
    ],
)
def test_wrong_ones_are_named(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(**wrong)
    assert raised.value.param == param


def test_a_grammar_that_cannot_be_enforced_is_named(thinker: Served) -> None:
    refused = thinker.post(tools=[custom("a", "regex", "(?=a)a")], tool_choice="required")
    the_error(refused, 400, "tools[0].custom.format.grammar.definition")


@pytest.mark.parametrize("text", ["", "one\ntwo", 'a "b" \\ {"input": 1}', "日本 😀\u2028"])
def test_a_stream_cut_anywhere_gives_the_whole_input(text: str) -> None:
    source = random.Random(0)
    arguments = [json.dumps({"input": text}), '{"city": "Rome"}', json.dumps({"other": text}), text]
    names = ["note", "weather", "note", "note"]
    for _ in range(50):
        events: list[list[Event]] = []
        for number, (name, whole) in enumerate(zip(names, arguments, strict=True)):
            events.append([ToolCallStart(number, name)])
            begin = 0
            while begin < len(whole):
                end = begin + source.randrange(1, 9)
                if source.random() < 0.7:
                    events.append([])
                events[-1].append(ToolCallArguments(number, whole[begin:end]))
                begin = end
        calls = ToolCalls({"note"})
        put_together: list[dict[str, Any]] = []
        for place, some in enumerate(events):
            for delta in calls.add(some, ended=place == len(events) - 1):
                if delta["index"] == len(put_together):
                    put_together.append({name: delta[name] for name in delta if name != "index"})
                    continue
                assert "id" not in delta
                (kind,) = set(delta) - {"index"}
                for member, more in delta[kind].items():
                    put_together[delta["index"]][kind][member] += more
        assert put_together == calls.whole
        own = [call["custom"]["input"] for call in calls.whole if call["type"] == "custom"]
        assert own == [text, json.dumps({"other": text}), text]
        assert calls.whole[1]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


def test_openais_client_calls_them(thinker: Served) -> None:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        client: Any = opened  # requests and answers are plain objects here
        ask: dict[str, Any] = {"model": thinker.model, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
        question: dict[str, Any] = {"role": "user", "content": "Hello"}
        made = client.chat.completions.create(messages=[question], tool_choice=named("dial"), **ask).choices[0]
        assert made.finish_reason == "stop"  # as of every call that the request names
        (call,) = made.message.tool_calls
        assert call.type == "custom" and call.custom.name == "dial"
        assert call.custom.input.isdecimal() and len(call.custom.input) == 3
        stream = client.chat.completions.create(messages=[question], tool_choice=named("dial"), stream=True, **ask)
        deltas: list[Any] = [one for chunk in stream for one in chunk.choices[0].delta.tool_calls or ()]
        assert (deltas[0].type, deltas[0].custom["name"]) == ("custom", "dial")
        assert "".join(one.custom["input"] for one in deltas) == call.custom.input
        history = [question, made.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
        assert client.chat.completions.create(messages=history, **(ask | {"max_tokens": 4})).choices
