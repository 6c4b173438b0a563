"""Custom tools, namespaces and built-in tools of ``/v1/responses``."""

import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.chat import the_error
from tests.support.reasoning import thinking_service
from tests.support.responses import answer, post
from tests.support.serving import Served
from tests.support.tools import CITY, ZONE
from triptych.api.answers import ChoiceDelta
from triptych.api.custom_input import CustomInput
from triptych.api.response_items import OutputItems
from triptych.api.response_tools import ToolTarget
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.validation import parse_request
from triptych.prompt.formats.events import ToolCallArguments, ToolCallStart

WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
TIME = {"type": "function", "name": "time", "parameters": ZONE, "strict": True}
DIGITS = {"type": "custom", "name": "dial", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
FREE: dict[str, Any] = {"type": "custom", "name": "free", "description": "takes text", "format": {"type": "text"}}
TEAM = {"type": "namespace", "name": "team", "description": "Of the team.", "tools": [WEATHER, DIGITS]}
BUILT_IN = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}, {"type": "mcp", "x": [1]}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("tools") / "thinker") as service:
        yield service


def request(**fields: Any) -> ResponsesRequest:
    return parse_request(ResponsesRequest, json.dumps({"model": "m", "input": "x"} | fields).encode())


def test_a_custom_tools_input_however_its_arguments_are_cut() -> None:
    rng = random.Random(0)
    letters = ["a", "é", "✓", "😀", '"', "\\", "\n", "\t", "{", "}", "/", "\u2028", "\x00", "u", "0"]
    for case in range(300):
        text = "".join(rng.choices(letters, k=rng.randrange(12)))
        arguments = json.dumps({"input": text}, ensure_ascii=bool(case % 2), indent=case % 3 or None)
        reader, pieces = CustomInput(), []
        while arguments:
            cut = rng.randrange(1, 6)
            pieces.append(reader.push(arguments[:cut]))
            arguments = arguments[cut:]
        pieces.append(reader.finish())
        assert "".join(pieces) == reader.text == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a', "a"),  # cut at the limit of tokens
        ('{"input": "a\\', "a"),
        ('{"input": "\\ud83d', ""),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"why": 1, "input": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_arguments_of_another_form(arguments: str, expected: str) -> None:
    reader = CustomInput()
    pieces = [reader.push(letter) for letter in arguments]
    assert "".join([*pieces, reader.finish()]) == reader.text == expected


def test_tools_become_functions_of_a_chat() -> None:
    made = request(tools=[TIME, TEAM, FREE, PATCH, *BUILT_IN], tool_choice={"type": "custom", "name": "free"}).to_chat()
    functions = {tool.function.name: tool.function for tool in made.functions}
    assert list(functions) == ["time", "team__weather", "team__dial", "free", "patch"]
    assert functions["team__weather"].description == "Of the team."
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert functions["free"].parameters == text | {"additionalProperties": False}
    assert functions["team__dial"].parameters["properties"]["input"]["pattern"] == "^(?:[0-9]{3})$"  # type: ignore[index]
    assert "start: /a/" in (functions["patch"].description or "")
    assert functions["patch"].parameters["properties"]["input"]["pattern"] == "^(?:(?:(?:a)))$"  # type: ignore[index]
    assert made.named_tool == "free"
    in_chats_form = {"type": "function", "function": {"name": "time"}}
    assert request(tools=[TIME], tool_choice=in_chats_form).to_chat().named_tool == "time"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, TIME | {"parameters": None}]}
    with pytest.raises(Exception, match=r"tool_choice\.tools\[1\]"):
        request(tools=[TIME], tool_choice=allowed)
    allowed["tools"] = [{"type": "web_search"}, {"type": "function", "name": "weather", "namespace": "team"}]
    assert [one.function.name for one in request(tools=[TIME, TEAM], tool_choice=allowed).to_chat().callable_tools] == [
        "team__weather"
    ]
    alone = request(tools=BUILT_IN, tool_choice="auto").to_chat()
    assert (alone.tools, alone.tool_choice) == (None, None)


def test_earlier_calls_have_the_names_of_the_chat() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "free", "input": 'say "hi"', "id": "ctc_1"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "namespace": "team", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "xyz"},
        {"type": "message", "role": "assistant", "phase": "final_answer", "status": "completed", "content": "Sunny."},
    ]
    messages = request(input=items).to_chat().messages
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    assert [(call.name, json.loads(call.arguments or "")) for call in calls] == [
        ("free", {"input": 'say "hi"'}),
        ("team__weather", {}),
    ]
    assert [message.role for message in messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert (messages[-1].reasoning_content, messages[-1].content) == ("Hm.", "Sunny.")


def test_calls_are_streamed_as_items_of_their_tools() -> None:
    targets = {"free": ToolTarget("free", None, True), "team__weather": ToolTarget("weather", "team")}
    output = OutputItems(targets)
    events: list[Any] = [
        *(ToolCallStart(0, "free"), ToolCallArguments(0, '{"inp'), ToolCallArguments(0, 'ut": "a\\n')),
        *(ToolCallArguments(0, 'b"'), ToolCallArguments(0, "}")),
        *(ToolCallStart(1, "team__weather"), ToolCallArguments(1, "{}")),
    ]
    changes = [change for event in events for change in output.add(ChoiceDelta(0, [event], [], None))]
    changes += output.finish("completed")
    custom, function = output.items
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "free", "a\nb")
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "weather", "team")
    kinds = [kind.removeprefix("response.") for kind, _ in changes]
    call = ["custom_tool_call_input.delta"] * 2 + ["custom_tool_call_input.done"]
    assert kinds[:5] == ["output_item.added", *call, "output_item.done"]
    assert "".join(change["delta"] for kind, change in changes if kind.endswith("input.delta")) == "a\nb"


def test_openais_client_calls_them(thinker: Served) -> None:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for tool_choice, kind in (
            ({"type": "custom", "name": "dial", "namespace": "team"}, "custom_tool_call"),
            ({"type": "function", "name": "weather", "namespace": "team"}, "function_call"),
        ):
            ask: dict[str, Any] = {"model": thinker.model, "tools": [TEAM, FREE, *BUILT_IN], "tool_choice": tool_choice}
            ask |= {"temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": False}
            made = client.responses.create(input="Hello", **ask)
            call: Any
            (call,) = made.output
            assert (call.type, call.namespace) == (kind, "team")
            text = call.input if call.type == "custom_tool_call" else json.loads(call.arguments)["city"]
            assert text.isdecimal() and len(text) == 3 if kind == "custom_tool_call" else text in ("Köln", "Rome")
            with client.responses.stream(input="Hello", **ask) as stream:
                deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
            assert "".join(deltas) == (text if kind == "custom_tool_call" else "")
            output = {"type": f"{kind}_output", "call_id": call.call_id, "output": "done"}
            history: Any = ["Hello", *made.output, output]
            history[0] = {"role": "user", "content": "Hello"}
            ask |= {"tool_choice": "auto", "max_output_tokens": 4}
            assert client.responses.create(input=history, **ask).output


def test_hostile_tools(thinker: Served) -> None:
    the_error(post(thinker, tools=[FREE | {"name": "x" * 129}]), 400, "tools[0].name")
    the_error(post(thinker, tools=[FREE, FREE]), 400, "tools[1].name")
    the_error(post(thinker, tools=[[]]), 400, "tools[0]")
    the_error(post(thinker, tools=[{"type": {}}]), 400, "tools[0].type")
    lookahead = {"type": "grammar", "syntax": "regex", "definition": "(?=a)a"}
    the_error(post(thinker, tools=[FREE | {"format": lookahead}]), 400, "tools")
    recursive = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    group = {"type": "namespace", "name": "n", "tools": [FREE | {"format": recursive}]}
    the_error(post(thinker, tools=[FREE, group]), 400, "tools[1].tools[0].format.definition")
    half = {"type": "grammar", "syntax": "lark", "definition": "start: /a/" + " " * 2**15}
    both = [FREE | {"name": name, "format": half} for name in ("a", "b")]
    the_error(post(thinker, tools=both), 400, "tools[1].format.definition")
    assert answer(thinker, tools=[{"type": "namespace", "name": "n", "tools": []}], tool_choice="auto")["tools"]
