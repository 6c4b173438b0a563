# ruff: noqa: E501
"""Grammars demand calls in the form that each family's parser reads."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.support.byte_vocabulary import ByteVocabulary
from tests.support.format_cases import ARGUMENTS, CASES, JSON, SCHEMA, FormatCase
from tests.support.formats import calls_of, find, read
from triptych.api.response_format import answer_grammar
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest
from triptych.prompt.formats.reasoning import Reasoning

STRICT = SCHEMA | {"required": list(ARGUMENTS), "additionalProperties": False}
LOOSE = SCHEMA | {"required": ["city", "days"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": STRICT}},
    {"type": "function", "function": {"name": "time"}},
]
DEMANDED = {
    "gpt-oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + JSON,
    "mistral-7": f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}]',
    "llama4": '[weather(city="Rö\\"m\\ne", days=2, dry=True, tags=["a", {"b": None}])]',
}
"""What grammars demand where it isn't just what the family writes of its own accord."""


def accepts(case: FormatCase, folder: Path, text: str, choice: str, parameters: Any = STRICT, **named: Any) -> bool:
    parallel = named.pop("parallel_tool_calls", True)
    formats, _ = find(folder, case, **named)
    formats = replace(formats, special={one: 256 + case.special.index(one) for one in formats.special})
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"parameters": parameters}}, *TOOLS[1:]]
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": tools,
        "tool_choice": choice,
    }
    body["parallel_tool_calls"] = parallel
    request = parse_request(ChatCompletionRequest, json.dumps(body).encode())
    grammar = answer_grammar(request, Reasoning.POSSIBLE if formats.reasons else Reasoning.NONE, formats)
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(ByteVocabulary(case.special))), grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for piece in re.split("(" + ("|".join(map(re.escape, case.special)) or "(?!)") + ")", text):
        tokens += [256 + case.special.index(piece)] if piece in case.special else piece.encode()
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


NAMED = {
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rome'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather"><steptml:parameter '
    'name="city">Rome</steptml:parameter><steptml:parameter name="days">2</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
    "<｜tool_calls_end｜>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n"
    "</function>\n</seed:tool_call>",
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]',
    "granite-20b-fc": '<function_call> {"name": "weather", "arguments": {"city": "Rome", "days": 2}}',
    "longcat": '<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</longcat_tool_call>',
    "xlam": '[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]',
    "olmo3": '<function_calls>weather(city="Rome", days=2)</function_calls>',
    "lfm2": '<|tool_call_start|>[weather(city="Rome", days=2)]<|tool_call_end|>',
    "pythonic": '[weather(city="Rome", days=2)]',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
    "dots": '<dots_function_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n<parameter name="days">2'
    "</parameter>\n</invoke>\n</dots_function_call>",
}


@pytest.mark.parametrize("name", NAMED)
def test_formats_by_name_are_demanded(tmp_path: Path, name: str) -> None:
    formats, _ = find(tmp_path / "a", CASES["qwen3"], tool_call_parser=name)
    assert calls_of(read(formats, NAMED[name], [])) == [("weather", {"city": "Rome", "days": 2})]
    case = replace(CASES["qwen3"], special=())
    assert accepts(case, tmp_path / "b", NAMED[name], "required", LOOSE, tool_call_parser=name)
    assert not accepts(case, tmp_path / "c", NAMED[name].replace("2", "x"), "required", LOOSE, tool_call_parser=name)


@pytest.mark.parametrize("name", ["qwen3.5", "glm4.5", "minimax-m2"])
def test_strings_outside_of_json_keep_to_their_schemas(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    city = {"type": "string", "pattern": "^R.*m", "maxLength": 9}
    properties: Any = SCHEMA["properties"]
    limited = SCHEMA | {"properties": properties | {"city": city}, "required": list(ARGUMENTS)}
    answer = re.sub(r"Look\.\s*", "", case.answer).rstrip()
    assert accepts(case, tmp_path / "a", answer, "required", limited)
    assert not accepts(case, tmp_path / "b", answer.replace("R", "T"), "required", limited)
    assert not accepts(case, tmp_path / "c", answer.replace("R", "Rrrrr"), "required", limited)


@pytest.mark.parametrize("name", CASES)
def test_a_demanded_call_has_the_familys_form(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    text = DEMANDED.get(name) or re.sub(r"Look\.\s*", "", case.answer).rstrip()
    assert accepts(case, tmp_path / "a", text, "required")
    formats, _ = find(tmp_path / "b", case)
    assert calls_of(read(formats, text, []))[0] == ("weather", ARGUMENTS)
    wrong = re.sub(r'(days.*?[=:>\s"]+)2', r"\1x", text, count=1, flags=re.DOTALL)
    assert wrong != text
    assert not accepts(case, tmp_path / "c", wrong, "required"), "the schema holds"
    assert not accepts(case, tmp_path / "d", "Look.", "required")


@pytest.mark.parametrize("name", [name for name in CASES if name not in {"gpt-oss", "mistral-7", "llama3", "llama4"}])
def test_strict_calls_are_valid_within_text(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    assert accepts(case, tmp_path / "a", case.answer, "auto")
    assert accepts(case, tmp_path / "b", "Look.", "auto")
    assert not accepts(case, tmp_path / "c", case.answer.replace("weather", "rm"), "auto")


@pytest.mark.parametrize(
    ("name", "before", "plain"),
    [
        (
            "gpt-oss",
            "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant",
            "<|channel|>final<|message|>Look.",
        ),
        ("llama3", "", " Look: {}"),
        ("llama4", "", " Look: []"),
    ],
)
def test_strict_calls_are_valid_where_text_could_look_like_calls(
    tmp_path: Path, name: str, before: str, plain: str
) -> None:
    case, call = CASES[name], DEMANDED.get(name) or CASES[name].answer
    for number, text in enumerate((call, before + call, plain)):
        assert accepts(case, tmp_path / str(number), text, "auto")
    assert not accepts(case, tmp_path / "c", before + call.replace("weather", "rm"), "auto")
    assert not accepts(case, tmp_path / "d", call.replace("2", "x", 1), "auto")


def test_a_family_that_writes_a_message_for_each_call_may_write_several(tmp_path: Path) -> None:
    call = DEMANDED["gpt-oss"]
    text = f"{call}<|end|><|start|>assistant{call}"
    assert accepts(CASES["gpt-oss"], tmp_path / "a", text, "required")
    assert not accepts(CASES["gpt-oss"], tmp_path / "b", text, "required", parallel_tool_calls=False)
    formats, _ = find(tmp_path / "c", CASES["gpt-oss"])
    assert len(calls_of(read(formats, text, []))) == 2


XLAM_TEXT = " Look: [1]. {}"


def test_text_beside_strict_tools_has_no_call_in_another_of_the_familys_forms(tmp_path: Path) -> None:
    case = replace(CASES["qwen3"], special=())
    call = NAMED["xlam"]
    for number, (text, right) in enumerate(
        [(call, True), (XLAM_TEXT, True), (call.replace("weather", "rm"), False), (f"Look. <tool_call>{call}", False)]
    ):
        assert accepts(case, tmp_path / str(number), text, "auto", LOOSE, tool_call_parser="xlam") == right
    assert not accepts(CASES["qwen3.5"], tmp_path / "x", "Look. <function=rm></function>", "auto")


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/node"},
        "kind": {"enum": ["a b", 1, None, True]},
        "many": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 2},
        "either": {"anyOf": [{"type": "number", "minimum": 1}, {"type": "boolean"}]},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "any": {},
    },
    "required": ["kind"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
            "required": ["value"],
        }
    },
}
NESTED_CASES: list[tuple[dict[str, Any], bool]] = [
    ({"tree": {"left": {"value": 2}, "value": 1}, "kind": "a b"}, True),
    ({"kind": 1, "many": ["ab"]}, True),
    ({"kind": None, "many": ["a", "b"], "either": False}, True),
    ({"kind": True, "either": 1.5, "map": {"x": 1, "y": 2}, "any": [{"x": [None, "t"]}, {}, []]}, True),
    ({"kind": True, "map": {}}, True),
    ({"tree": {"value": 1}}, False),
    ({"tree": {"left": {}, "value": 1}, "kind": 1}, False),
    ({"kind": "a"}, False),
    ({"kind": 1, "many": []}, False),
    ({"kind": 1, "many": ["a", "b", "c"]}, False),
    ({"kind": 1, "many": ["abc"]}, False),
    ({"kind": 1, "either": 0.5}, False),
    ({"kind": 1, "map": {"x": "1"}}, False),
]


@pytest.mark.parametrize(
    ("name", "family"), [("gemma4", ""), ("qwen3", "lfm2"), ("qwen3", "functiongemma"), ("qwen3", "olmo3")]
)
def test_values_in_other_forms_than_json_are_those_of_the_schema(tmp_path: Path, name: str, family: str) -> None:
    named = {"tool_call_parser": family} if family else {}
    formats, _ = find(tmp_path / "x", CASES[name], **named)
    for number, (arguments, right) in enumerate(NESTED_CASES):
        text = formats.calls[0].form.text([("weather", arguments)])
        assert accepts(CASES[name], tmp_path / str(number), text, "required", NESTED, **named) == right, arguments
        assert calls_of(read(formats, text, [])) == [("weather", arguments)]


@pytest.mark.parametrize("name", ["qwen3.5", "gemma4", "llama4"])
def test_a_tool_that_is_not_strict_beside_one_that_is_may_have_any_arguments(tmp_path: Path, name: str) -> None:
    formats, _ = find(tmp_path / "x", CASES[name])
    for number, arguments in enumerate(({}, {"zone": "CET"}, {"zone": "CET", "at": 5})):
        text = formats.calls[0].form.text([("time", arguments)])
        assert accepts(CASES[name], tmp_path / str(number), text, "auto")
        assert calls_of(read(formats, text, [])) == [("time", arguments)]


REFUSED = [
    ({"p": {"not": {}}}, "'not'"),
    ({"p": {"allOf": [{"type": "object"}, {}]}}, "'allOf'"),
    ({"p": {"oneOf": [{"type": "object"}, {"type": "integer"}]}}, "'oneOf'"),
    ({"p": {"anyOf": [{"type": "integer"}], "type": "integer"}}, "beside"),
    ({"p": {"$ref": "#/$defs/nothing"}}, "reference"),
    ({"p": {"type": "array", "minItems": "2"}}, "'minItems' of this type"),
    ({"a b": {"type": "integer"}}, "the name 'a b'"),
    ({"p": {"type": "thing"}}, "'thing'"),
    ({"p": json.loads('{"items": ' * 70 + "{}" + "}" * 70)}, "so deep"),
]


@pytest.mark.parametrize(("properties", "reason"), REFUSED)
def test_what_cannot_be_enforced_is_refused(tmp_path: Path, properties: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        accepts(CASES["gemma4"], tmp_path / "a", "", "required", {"type": "object", "properties": properties})
    assert raised.value.param == "tools[0].function.parameters"
