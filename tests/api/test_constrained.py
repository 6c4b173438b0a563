# ruff: noqa: E501
"""Grammars demand calls in the form that each family's parser reads."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.support.format_cases import ARGUMENTS, CASES, JSON, SCHEMA, FormatCase
from tests.support.formats import calls_of, find, read
from triptych.api.response_format import answer_grammar
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.prompt.formats.reasoning import Reasoning

STRICT = SCHEMA | {"required": list(ARGUMENTS), "additionalProperties": False}
LOOSE = SCHEMA | {"required": ["city", "days"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": STRICT}},
    {"type": "function", "function": {"name": "time"}},
]
TAGGED = f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>'
DEMANDED = {
    "gpt-oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + JSON,
    "mistral-7": f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}]',
    "llama4": TAGGED,
    "gemma4": "<|channel>thought\nHm.<channel|>" + TAGGED,
}
"""What grammars demand where it isn't just what the family writes of its own accord."""


class ByteVocabulary:
    """A token for each byte, then the special ones and the end."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [b"\xff" + one.encode() for one in (*special, "<end>")]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def accepts(case: FormatCase, folder: Path, text: str, choice: str, parameters: Any = STRICT, **named: str) -> bool:
    formats, _ = find(folder, case, **named)
    formats = replace(formats, special={one: 256 + case.special.index(one) for one in formats.special})
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"parameters": parameters}}, *TOOLS[1:]]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
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
    "dots": '<dots_function_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n<parameter name="days">2'
    "</parameter>\n</invoke>\n</dots_function_call>",
}


@pytest.mark.parametrize("name", NAMED)
def test_formats_by_name_are_demanded(tmp_path: Path, name: str) -> None:
    formats, _ = find(tmp_path / "a", CASES["qwen3"], tool_call_parser=name)
    assert calls_of(read(formats, NAMED[name], [], constrained=True)) == [("weather", {"city": "Rome", "days": 2})]
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
    assert calls_of(read(formats, text, [], constrained=True))[0] == ("weather", ARGUMENTS)
    wrong = text.replace("2", "x", 1) if '"city"' in text else text.replace("\n2\n", "\nx\n").replace(">2<", ">x<")
    assert wrong != text
    assert not accepts(case, tmp_path / "c", wrong, "required"), "the schema holds"
    assert not accepts(case, tmp_path / "d", "Look.", "required")


@pytest.mark.parametrize("name", [name for name in CASES if name not in {*DEMANDED, "llama3"}])
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
