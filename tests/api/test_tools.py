"""Tools and reasoning over HTTP: grammars make a random model call tools, and biases end its reasoning."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.chat import events, the_error
from tests.support.completions import answer
from tests.support.reasoning import IDS, thinking_service
from tests.support.serving import Served, image_part, text_part, wait_for
from tests.support.tools import CITY, FREE, THINKING, TOOLS, choice, put_together, tool, weather, without_ids
from triptych.api.response_format import answer_grammar
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.demo import MODEL_DIR
from triptych.engine.grammar.compiler import Compiler
from triptych.errors import InvalidRequest
from triptych.prompt.formats.reasoning import Reasoning
from triptych.prompt.grammar_check import GrammarToCheck, check


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with thinking_service(tmp_path_factory.mktemp("tools") / "thinker") as service:
        yield service


def check_call(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert arguments["city"] in ("Köln", "Rome")
        assert arguments["days"] in (1, 22)
    else:
        assert call["function"]["name"] == "time"
        assert arguments["zone"] in ("a", "b")


@pytest.mark.parametrize("content", ["Hello", [image_part(), text_part("x")]], ids=["text", "image"])
def test_a_required_call_is_made(thinker: Served, content: Any) -> None:
    for seed in range(3):
        settings = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
        made = choice(thinker, content, **settings)
        assert (made["finish_reason"], made["message"]["content"]) == ("tool_calls", None)
        (call,) = made["message"]["tool_calls"]
        check_call(call)
        streamed = put_together(events(thinker, thinker.body(content, **(FREE | settings))))
        assert without_ids(streamed) == without_ids(made)


def test_several_calls_are_made_at_once(thinker: Served) -> None:
    """The bias makes the separator of two calls likelier than the end."""
    newline = answer(thinker, "/tokenize", prompt="\n")["tokens"][0]
    bias = {str(newline): 100}
    settings = {"tools": TOOLS, "tool_choice": "required", "seed": 1, "logit_bias": bias, "max_tokens": 700}
    made = choice(thinker, **settings)
    calls = made["message"]["tool_calls"]
    assert len(calls) > 1
    for call in calls[:-1]:  # the last may have been cut off
        check_call(call)
    streamed = put_together(events(thinker, thinker.body(**(FREE | settings))))
    assert without_ids(streamed) == without_ids(made)


def test_a_named_tool_is_called(thinker: Served) -> None:
    for name in ("weather", "time"):
        wanted = {"type": "function", "function": {"name": name}}
        made = choice(thinker, tools=TOOLS, tool_choice=wanted)
        assert [call["function"]["name"] for call in made["message"]["tool_calls"]] == [name]
        assert made["finish_reason"] == "stop"
        check_call(made["message"]["tool_calls"][0])


SAID = 'Look:\n<tool_call>\n{"name": "%s", "arguments": {"city": "x"}}\n</tool_call>'


LOOK = {str(ord("L") - ord("!")): 50}
"""A bias towards text where text or a call may begin. This tokenizer's tokens are bytes, in order."""


def regex(text: str) -> dict[str, str]:
    return {"regex": "".join(f"\\{letter}" if letter in '\\{}[]()*+?.|^$/"' else letter for letter in text)}


def test_the_model_may_call_or_not(thinker: Served) -> None:
    """The text is forced; the parser must find the call in it."""
    made = choice(thinker, tools=TOOLS, structured_outputs=regex(SAID % "weather"), logit_bias=LOOK)
    assert made["message"]["content"] == "Look:"
    assert made["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "x"}'}
    assert made["finish_reason"] == "tool_calls"
    plain = choice(thinker, structured_outputs=regex(SAID % "weather"))
    assert plain["message"]["content"] == SAID % "weather", "without tools it is text"
    none = choice(thinker, tools=TOOLS, tool_choice="none", structured_outputs=regex(SAID % "weather"))
    assert none["message"]["content"] == SAID % "weather"
    assert none["finish_reason"] == "stop"


def test_generation_stops_after_one_call(thinker: Served) -> None:
    """With parallel_tool_calls false, and no grammar to enforce it."""
    two = SAID % "weather" + "\n" + SAID % "time"
    settings = {"tools": TOOLS, "structured_outputs": regex(two), "logit_bias": LOOK}
    both = choice(thinker, **settings)
    one = choice(thinker, **settings, parallel_tool_calls=False)
    assert len(both["message"]["tool_calls"]) == 2
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["weather"]
    assert one["finish_reason"] == "tool_calls"
    wait_for(thinker.everything_is_back)


def test_strict_tools_get_valid_arguments(thinker: Served) -> None:
    bias = {str(IDS["<tool_call>"]): 20}
    settings = {"tools": [tool("weather", CITY, strict=True)], "logit_bias": bias, "parallel_tool_calls": False}
    made = [choice(thinker, **settings, seed=seed) for seed in range(3)]
    calls = [call for one in made for call in one["message"].get("tool_calls", [])]
    assert calls
    for call in calls:
        check_call(call)


def test_calls_and_their_results_are_in_the_prompt(thinker: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "And Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    tokens = answer(thinker, "/tokenize", messages=messages, tools=TOOLS)["tokens"]
    prompt = answer(thinker, "/detokenize", tokens=tokens)["prompt"]
    assert json.dumps(TOOLS[0], ensure_ascii=False) in prompt
    assert '<think>Hm.</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny" in prompt
    assert choice(thinker, messages=messages, tools=TOOLS, max_tokens=4)["message"]


@pytest.mark.parametrize("schema", [{"type": 3}, {"$ref": "#/nowhere"}])
def test_invalid_tools(thinker: Served, schema: dict[str, Any]) -> None:
    answer = thinker.post(tools=[tool("x", schema)], tool_choice="required")
    assert " at #: " in the_error(answer, 400, "tools[0].function.parameters")
    assert thinker.text()


def test_the_answers_grammar_has_a_maximum_size() -> None:
    big = tool("x", {"type": "object", "properties": {"a": {"enum": ["y" * 2**18]}}})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [big], "tool_choice": "required"}
    with pytest.raises(InvalidRequest, match="262144"):
        answer_grammar(parse_request(ChatCompletionRequest, json.dumps(body).encode()), Reasoning.NONE)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


GOOD, BAD = tool("a", {"type": "object"}), tool("b", {"type": "array", "uniqueItems": True})


@pytest.mark.parametrize(
    ("tool_choice", "param"),
    [
        ("auto", None),
        ({"type": "function", "function": {"name": "a"}}, None),
        ({"type": "function", "function": {"name": "b"}}, "tools[1].function.parameters"),
        ("required", "tools[1].function.parameters"),
        (allowed("auto", "a", "b"), None),
        (allowed("required", "a"), None),
        (allowed("required", "b"), "tools[1].function.parameters"),
    ],
)
def test_only_enforced_tools_are_checked(tool_choice: Any, param: str | None) -> None:
    strict = {"type": "function", "function": GOOD["function"] | {"strict": True}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [strict, BAD]}
    request = parse_request(ChatCompletionRequest, json.dumps(body | {"tool_choice": tool_choice}).encode())
    grammar = answer_grammar(request, Reasoning.NONE)
    assert grammar is not None
    result = check(Compiler(Path(MODEL_DIR)), GrammarToCheck(grammar.text, grammar.parts))
    assert result.param == param
    assert ("'uniqueItems'" in result.message) == bool(param)


def test_a_template_without_tools_refuses_them(service: Served) -> None:
    the_error(service.post(tools=TOOLS), 400, "tools")
    assert service.text(tools=TOOLS, tool_choice="none") == service.text()


# ── reasoning ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reasoning_is_separated_from_the_answer(thinker: Served) -> None:
    for seed in range(3):
        settings = THINKING | {"seed": seed, "max_tokens": 120, "ignore_eos": True}
        response = thinker.post(**(FREE | settings)).json()
        message = response["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"]
        assert "</think>" not in message["reasoning"]
        assert 0 < response["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 120
        streamed = put_together(events(thinker, thinker.body(**(FREE | settings))))
        assert streamed["message"] == message
    plain = thinker.post(**(FREE | {"logit_bias": THINKING["logit_bias"]})).json()
    assert "reasoning" not in plain["choices"][0]["message"]
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("form", [{}, {"structured_outputs": {"choice": ["yes", "no"]}}], ids=["free", "choice"])
def test_reasoning_is_ended_by_its_budget(thinker: Served, budget: int, form: dict[str, Any]) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 30, "seed": 1, **form}
    ends = [IDS["</think>"], *thinker.running.frontend.api.tokenizer.eos_token_ids]
    unlikely = {"logit_bias": {str(token): -100 for token in ends}}
    limited = thinker.post(**(FREE | thinks | unlikely | {"thinking_token_budget": budget})).json()
    rest = 3 if form else 0  # bytes of a character, which a grammar takes whole
    assert budget + 1 <= limited["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 1 + rest
    message = limited["choices"][0]["message"]
    assert bool(message["content"]) and "</think>" not in message["content"]
    if form:
        assert message["content"] in ("yes", "no")
    endless = choice(thinker, **(thinks | unlikely | {"thinking_token_budget": -1}))
    assert not endless["message"]["content"]
    the_error(thinker.post(thinking_token_budget=-2), 400, "thinking_token_budget")


@pytest.mark.parametrize("budget", [1, 2])
def test_reasoning_within_a_character_ends_after_it(thinker: Served, budget: int) -> None:
    """A grammar takes only whole characters."""
    begin, _ = answer(thinker, "/tokenize", prompt="ß", add_special_tokens=False)["tokens"]
    form: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}, "logit_bias": {str(begin): 100}}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 30, "seed": 1}
    limited = thinker.post(**(FREE | thinks | form | {"thinking_token_budget": budget})).json()
    assert limited["choices"][0]["message"]["content"] in ("yes", "no")
    assert limited["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"structured_outputs": {"grammar": 'root ::= "x" | "y"'}},
    ],
    ids=["schema", "choice", "regex", "grammar"],
)
def test_the_text_format_does_not_apply_to_reasoning(thinker: Served, form: dict[str, Any]) -> None:
    message = choice(thinker, **THINKING, **form, seed=1)["message"]
    assert message["reasoning"]
    patterns = {"choice": ("yes", "no"), "grammar": ("x", "y")}
    (kind,) = form.get("structured_outputs", form)
    if kind in patterns:
        assert message["content"] in patterns[kind]
    elif kind == "regex":
        assert set(message["content"]) <= {"a", "b"}
        assert len(message["content"]) == 3
    else:
        assert json.loads(message["content"])["days"] in (1, 22)


def test_reasoning_precedes_calls(thinker: Served) -> None:
    made = choice(thinker, **THINKING, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=2)
    assert made["message"]["reasoning"]
    check_call(made["message"]["tool_calls"][0])


# ── OpenAI's client ──────────────────────────────────────────────────────────────────────────────────────────────


def test_openais_client_parses_calls_and_answers(thinker: Served) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        made = client.chat.completions.parse(
            model=thinker.model,
            messages=messages,
            tools=[openai.pydantic_function_tool(weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=1,
        )
        (call,) = made.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, weather)
        answered = client.chat.completions.parse(
            model=thinker.model, messages=messages, response_format=weather, seed=1
        )
        assert isinstance(answered.choices[0].message.parsed, weather)
        with client.chat.completions.stream(
            model=thinker.model,
            messages=messages,
            tools=[openai.pydantic_function_tool(weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=1,
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        assert (final.choices[0].message.tool_calls or [])[
            0
        ].function.parsed_arguments == call.function.parsed_arguments
        # what came back can be sent back
        messages += [
            made.choices[0].message.model_dump(
                exclude={"parsed": True, "tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}
            ),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        assert client.chat.completions.create(model=thinker.model, messages=messages, max_tokens=4).choices
