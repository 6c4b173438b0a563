"""``/v1/responses``: the answers of chats in the format of OpenAI's Responses API."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from tests.support.chat import the_error
from tests.support.reasoning import thinking_service
from tests.support.responses import answer, post
from tests.support.serving import Served, image, image_part, text_part
from tests.support.tools import CITY, ZONE, weather
from triptych.api.answers import ChoiceDelta
from triptych.api.response_items import OutputItems
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.validation import parse_request
from triptych.prompt.formats.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

NAMED = [{"type": "function", "name": f"tool{number}"} for number in range(128)]
TOOL = {"type": "function", "name": "weather", "description": "tells the weather", "parameters": CITY, "strict": True}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("responses") / "thinker") as service:
        yield service


def events(service: Served, **fields: Any) -> list[Any]:
    text = post(service, stream=True, **fields).text
    made: list[Any] = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(made)
        made.append(event)
    return made


def without_ids(item: Any) -> Any:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def check_stream(made: list[Any], whole: Any) -> None:
    """Check that the events add up to the answer ``whole``, item by item."""
    assert [event["type"] for event in made[:2]] == ["response.created", "response.in_progress"]
    last = made[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert [without_ids(item) for item in last["response"]["output"]] == [without_ids(i) for i in whole["output"]]
    for index, item in enumerate(last["response"]["output"]):
        of_item = [event for event in made if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[-1]["type"] == "response.output_item.done"
        assert of_item[-1]["item"] == item
        full_text = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert full_text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert {event["item_id"] for event in of_item[1:-1]} == {item["id"]}


def test_vllms_fields_mean_what_they_do_in_chats(service: Served) -> None:
    """vLLM's ``bench serve`` sends some of them to every endpoint."""
    for fields in (
        {"ignore_eos": True, "temperature": 0},
        {"ignore_eos": True, "temperature": 1.3, "seed": 5, "top_k": 7, "repetition_penalty": 1.2, "min_p": 0.01},
        {"temperature": 0, "structured_outputs": {"choice": ["a cat", "two dogs"]}},
        {"temperature": 0, "ignore_eos": True, "stop": ["e"], "logit_bias": {"5": -3.0}, "min_tokens": 2},
    ):
        expected = service.text("Hello", **{"max_tokens": 24, "ignore_eos": False} | fields)
        whole = answer(service, max_output_tokens=24, **fields)
        assert whole["output"][0]["content"][0]["text"] == expected
    the_error(post(service, min_tokens=9), 400, "min_tokens")
    both = {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}
    assert "only one" in the_error(post(service, **both), 400, "structured_outputs")
    the_error(post(service, prompt_logprobs=1), 400, "prompt_logprobs")


def test_the_answer_is_that_of_a_chat(service: Served) -> None:
    settings = {"temperature": 0.0, "max_output_tokens": 24}
    expected = service.text("Hello", max_tokens=24, temperature=0, ignore_eos=False)
    whole = answer(service, **settings)
    (message,) = whole["output"]
    assert message["content"][0]["text"] == expected
    assert (whole["object"], whole["status"], whole["store"]) == ("response", "incomplete", False)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == 24
    check_stream(events(service, **settings), whole)
    content = [{"type": "input_text", "text": "Hello"}]
    again = answer(service, input=[{"role": "user", "content": content}], model=None, **settings)
    assert again["output"][0]["content"] == message["content"]


def test_instructions_and_images_and_earlier_answers(service: Served) -> None:
    data = image(seed=9)
    part = image_part(data)["image_url"]["url"]
    items = [
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": part}, {"type": "input_text", "text": "What?"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "A square.", "annotations": []}],
        },
        {"role": "user", "content": "And now?"},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image_part(data), text_part("What?")]},
        {"role": "assistant", "content": [text_part("A square.")]},
        {"role": "user", "content": "And now?"},
    ]
    made = answer(service, instructions="Be brief.", input=items, temperature=0.0)
    assert made["output"][0]["content"][0]["text"] == service.text(messages=messages, temperature=0, ignore_eos=False)


def test_calls_and_reasoning_are_separate_items(thinker: Served) -> None:
    settings: dict[str, Any] = {
        "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 300,
    }  # fmt: skip
    whole = answer(thinker, **settings, temperature=0.0)
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["status"], whole["status"]) == (
        "function_call", "weather", "completed", "completed",
    )  # fmt: skip
    assert json.loads(call["arguments"])["days"] in (1, 22)
    check_stream(events(thinker, **settings, temperature=0.0), whole)
    items = [
        {"role": "user", "content": "Rome?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": call["call_id"], "name": "weather", "arguments": call["arguments"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"},
    ]
    assert answer(thinker, input=items, tools=[TOOL])["output"]


def test_a_forced_call_and_a_format_of_text(thinker: Served) -> None:
    """The format applies to text, and the answer has none."""
    text = {"format": {"type": "json_schema", "name": "zone", "schema": ZONE}}
    for forced in ("required", {"type": "function", "name": "weather"}):
        (call,) = answer(
            thinker, text=text, tools=[TOOL], tool_choice=forced, parallel_tool_calls=False, max_output_tokens=300
        )["output"]
        assert json.loads(call["arguments"])["days"] in (1, 22)


def test_earlier_items_become_one_message() -> None:
    items = [
        {"role": "user", "content": "Rome?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "And warm."},
    ]
    request = parse_request(ResponsesRequest, json.dumps({"model": "m", "input": items}).encode())
    messages = request.to_chat().messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert (messages[1].reasoning_content, messages[1].content) == ("Hm.", "Let me see.")
    assert [call.id for call in messages[1].tool_calls or ()] == ["c1", "c2"]


def test_text_format_and_log_probabilities(service: Served) -> None:
    text = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    settings = {"text": text, "max_output_tokens": 300, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = answer(service, **settings, temperature=0.0)
    (part,) = whole["output"][0]["content"]
    assert json.loads(part["text"])["days"] in (1, 22)
    assert whole["status"] == "completed"
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"]
    check_stream(events(service, **settings, temperature=0.0), whole)


@pytest.mark.parametrize(
    ("fields", "param", "expected_message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "store: false"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "item_reference 'msg_1'"),
        ({"input": [{"role": "user", "content": "x"}, {"id": "msg_1"}]}, "input[1]", "store: false"),
        ({"background": True}, "background", "False"),
        ({"conversation": "c"}, "conversation", "null"),
        ({"include": ["all"]}, "include[0]", "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs", "less"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "'computer_call' is not supported; use one of 'mess"),
        ({"input": [{"type": ["message"]}]}, "input[0].type", "required"),
        ({"input": [{"role": "user", "content": [{"type": "file", "x": 1}]}]}, "input[0].content[0].type", "file"),
        ({"input": [{"role": "user", "content": "see <|image_pad|>"}]}, "input[0].content", "media"),
        ({"tools": [{"type": "telepathy", "name": "x"}]}, "tools[0].type", "'telepathy' is not supported"),
        ({"tools": [{"name": "x"}]}, "tools[0].type", "required"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "required"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name", "pattern"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0]", "'custom'"),
        ({"tools": [{"type": "namespace", "name": "n" * 125, "tools": [TOOL]}]}, "tools[0].tools[0].name", "128"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL] * 2}]}, "tools[0].tools[1].name", "another"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": NAMED}, TOOL]}, "tools", "129"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' is never called"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.name", "required"),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": [TOOL]}, "tools", "template"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "can't be changed"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "context"),
        ({"temperature": 3}, "temperature", "less"),
    ],
)  # fmt: skip
def test_invalid_requests(service: Served, fields: dict[str, Any], param: str | None, expected_message: str) -> None:
    assert expected_message.lower() in the_error(post(service, **fields), 400, param).lower()


def test_a_failure_in_the_middle_is_an_error_event(service: Served) -> None:
    service.steps.delay = 0.02
    made = events(service, max_output_tokens=3000, timeout=0.5)
    assert [event["type"] for event in made[-2:]] == ["error", "response.failed"]
    assert made[-2]["code"] == "deadline_exceeded"
    assert made[-1]["response"]["status"] == "failed"
    the_error(
        post(service, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]), 400,
        "input[0].content[0].image_url",
    )  # fmt: skip


BAD_IMAGE = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "place"),
    [
        ([{"role": "user", "content": "x"}, {"role": "user", "content": BAD_IMAGE}], "input[1].content[1].image_url"),
        (
            [
                {"type": "reasoning", "content": []},
                CALL,
                {"type": "function_call_output", "call_id": "a", "output": BAD_IMAGE},
            ],
            "input[2].output[1].image_url",
        ),
    ],
)
def test_errors_name_the_item(thinker: Served, items: list[Any], place: str) -> None:
    """Instructions and items that are one answer number the chat's messages otherwise."""
    message = the_error(post(thinker, input=items, instructions="Be brief."), 400, place)
    assert "messages[" not in message


def test_openais_client_works_unchanged(thinker: Served) -> None:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        made = client.responses.create(model=thinker.model, input="Hello", max_output_tokens=12, temperature=0)
        assert made.output_text
        with client.responses.stream(model=thinker.model, input="Hello", max_output_tokens=12, temperature=0) as stream:
            full_text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert full_text == made.output_text
        parsed = client.responses.parse(model=thinker.model, input="Hello", text_format=weather, max_output_tokens=300)
        assert isinstance(parsed.output_parsed, weather)
        tool: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
        called = client.responses.create(
            model=thinker.model,
            input="Hello",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
        )
        (call,) = called.output
        assert call.type == "function_call"
        history: Any = [
            {"role": "user", "content": "Hello"},
            *called.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ]
        assert client.responses.create(model=thinker.model, input=history, tools=[tool], max_output_tokens=4).output


def logprob(token: str | bytes) -> msgspec.Raw:
    """An entry of ``ChoiceDelta.logprobs``."""
    data = token.encode() if isinstance(token, str) else token
    return msgspec.Raw(msgspec.json.encode({"token": data.decode(errors="replace"), "bytes": list(data)}))


def thought(text: str) -> list[Any]:
    return [ReasoningDelta(text)] if text else []


Said = tuple[list[str | bytes], str, list[Any]]
"""The tokens of a delta, its reasoning, and its events."""
TEXT, START, ARGUMENTS = TextDelta, ToolCallStart(0, "weather"), ToolCallArguments(0, "{}")


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([(["Hi"], "", [TEXT("Hi")]), (["!"], "", [TEXT("!")])], ["Hi", "!"]),
        ([(["<think>"], "", []), (["ok"], "ok", []), (["</think>"], "", []), (["Hi"], "", [TEXT("Hi")])], ["Hi"]),
        # white space that the parser drops, within tokens of its own and within the first of the text
        ([(["ok"], "ok", []), (["</think>"], "", []), (["\n\n"], "", []), ([" Hi"], "", [TEXT("Hi")])], [" Hi"]),
        # several tokens in one delta
        ([(["ok", "</think>", "Hi", "!"], "ok", [TEXT("Hi!")])], ["Hi", "!"]),
        ([(["o"], "o", []), (["k", "</think>", "Hi"], "k", [TEXT("Hi")]), ([" k"], "", [TEXT(" k")])], ["Hi", " k"]),
        # text that is held back until it is certain: not a tag, a whole character
        ([(["ok"], "ok", []), (["</think>", "<"], "", []), (["b>"], "", [TEXT("<b>")])], ["<", "b>"]),
        ([(["</think>"], "", []), ([b"\xc3"], "", []), ([b"\xa9"], "", [TEXT("\u00e9")])], 2),
        # text before and after a call
        (
            [
                (["Hm"], "", [TEXT("Hm")]),
                (["<tool_call>"], "", []),
                (["{"], "", [START]),
                (["{}"], "", [ARGUMENTS]),
                (["</tool_call>"], "", []),
                (["Hi"], "", [TEXT("Hi")]),
            ],
            ["Hm", "Hi"],
        ),
        # a call alone, and reasoning alone
        ([(["<tool_call>"], "", []), (["{"], "", [START]), (["{}"], "", [ARGUMENTS])], []),
        ([(["ok"], "ok", [])], []),
    ],
)  # fmt: skip
def test_text_has_the_log_probabilities_of_its_own_tokens(deltas: list[Said], expected: list[str] | int) -> None:
    """Those of reasoning, tags and calls are left out, of a stream and of the whole."""
    output = OutputItems()
    changes = [
        change
        for tokens, reasoning, events in deltas
        for change in output.add(
            ChoiceDelta(0, thought(reasoning) + events, [logprob(token) for token in tokens], None)
        )
    ] + list(output.finish("completed"))
    whole = [one for item in output.items for part in item.get("content", ()) for one in part.get("logprobs", ())]
    streamed = [one for kind, change in changes if kind == "response.output_text.delta" for one in change["logprobs"]]
    assert whole == streamed
    if isinstance(expected, int):
        assert len(whole) == expected
    else:
        assert [json.loads(bytes(one))["token"] for one in whole] == expected


def test_reasoning_is_streamed_as_items(thinker: Served) -> None:
    """Tests the items alone: this API lacks the chat fields that make the model reason."""
    output = OutputItems()
    deltas = [
        ChoiceDelta(0, [ReasoningDelta("Hm")], [], None),
        ChoiceDelta(0, [ReasoningDelta("."), TextDelta("Yes")], [], None),
        ChoiceDelta(0, [ToolCallStart(0, "weather"), ToolCallArguments(0, "{")], [], None),
        ChoiceDelta(0, [ToolCallArguments(0, "}"), TextDelta("Done.")], [], "stop"),
    ]
    changes = [change for delta in deltas for change in output.add(delta)] + list(output.finish("completed"))
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "message"]
    assert output.items[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert output.items[2]["arguments"] == "{}"
    assert all(item["status"] == "completed" for item in output.items)
    assert [kind for kind, _ in changes if "reasoning" in kind] == ["response.reasoning_text.delta"] * 2 + [
        "response.reasoning_text.done"
    ]
