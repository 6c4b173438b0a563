# ruff: noqa: E501
"""Each family's format is found from its template, and parses what models write, however it is cut."""

import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.format_cases import ARGUMENTS, CASES
from tests.support.formats import TOOLS, calls_of, find, read, text_of
from triptych.errors import ConfigError
from triptych.prompt.formats.catalog import Formats
from triptych.prompt.formats.events import ReasoningDelta, ToolCallStart
from triptych.prompt.formats.reasoning import Reasoning
from triptych.prompt.formats.typed import parameter_types, to_json
from triptych.prompt.template import ChatTemplate


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Formats, ChatTemplate]]:
    folder = tmp_path_factory.mktemp("families")
    return {name: find(folder / name, case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_familys_format_is_found(found: dict[str, tuple[Formats, ChatTemplate]], name: str) -> None:
    formats, _ = found[name]
    assert (formats.reasoning_parser, formats.tool_call_parser) == (CASES[name].reasoning, CASES[name].calls)
    assert set(formats.special) <= set(CASES[name].special)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_same_however_they_are_cut(found: dict[str, tuple[Formats, ChatTemplate]], name: str) -> None:
    formats, case = found[name][0], CASES[name]
    whole = read(formats, case.answer, [])
    assert calls_of(whole) == [("weather", ARGUMENTS), ("time", {})]
    assert text_of(whole) == case.text
    assert "".join(one.text for one in whole if isinstance(one, ReasoningDelta)) == ("Hm." if case.reasoning else "")
    assert read(formats, case.answer, list(range(len(case.answer)))) == whole
    for end in range(len(case.answer)):
        some = random.Random(end).choices(range(len(case.answer)), k=8)
        assert read(formats, case.answer[:end], some) == read(formats, case.answer[:end], [])


@pytest.mark.parametrize("name", CASES)
def test_history_is_read_back(found: dict[str, tuple[Formats, ChatTemplate]], name: str) -> None:
    formats, template = found[name]
    calls = [
        {"id": "call_1234", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
        {"id": "call_5678", "type": "function", "function": {"name": "time", "arguments": {}}},
    ]
    history = formats.with_ids(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    )
    if name == "deepseek-v3.1":
        for call in history[1]["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    text = template.render(history, add_generation_prompt=False)
    text = text.removeprefix(template.render(history[:1]).removesuffix("\n").removesuffix("<think>"))
    assert calls_of(read(formats, text, [])) == [("weather", ARGUMENTS), ("time", {})]


FRAGMENTS = sorted(
    {one for case in CASES.values() for one in case.special}
    | {
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "weather",
        "time",
    }
    | {
        "functools[",
        "]",
        "[",
        "{",
        "}",
        '"',
        "'",
        ",",
        ":",
        "(",
        ")",
        "=",
        ">",
        "\\",
        "\n",
        " ",
        "call:",
        "final",
        "x",
        "é",
    }
    | {
        '{"name": "time", "arguments": ',
        "analysis",
        "to=functions.time ",
        "functions.time:0",
        "thought\n",
        "5",
        "<arg_key>",
    }
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(Reasoning),
)
def test_hostile_answers_are_the_same_however_they_are_cut(
    found: dict[str, tuple[Formats, ChatTemplate]], name: str, text: str, cuts: list[int], reasoning: Reasoning
) -> None:
    whole = read(found[name][0], text, [], reasoning)
    assert read(found[name][0], text, cuts, reasoning) == whole
    assert read(found[name][0], text, list(range(len(text))), reasoning) == whole
    assert not any(one in text_of(whole) for one in found[name][0].special), "markers are never text"


@pytest.mark.parametrize("name", CASES)
def test_endless_answers_take_time_in_proportion(found: dict[str, tuple[Formats, ChatTemplate]], name: str) -> None:
    """Each opener again and again, never closed, in pieces; and the deepest values."""
    form, case = found[name][0].calls[0], CASES[name]
    openers = [*form.openers, *form.first_openers]
    cut = case.answer.index("weather") + 12
    for text in (*(one * 4000 for one in openers), case.answer[:cut] * 300, case.answer[:cut] + '[{"a":' * 6000):
        started = time.process_time()
        parser = found[name][0].parser(Reasoning.POSSIBLE, TOOLS)
        for at in range(0, len(text), 50):
            parser.push(text[at : at + 50])
        parser.finish()
        assert time.process_time() - started < 2


def test_names_decide(tmp_path: Path) -> None:
    formats, _ = find(tmp_path / "a", CASES["qwen3"], reasoning_parser="deepseek_r1", tool_call_parser="glm47")
    assert (formats.reasoning_parser, formats.tool_call_parser) == ("qwen3", "glm45")
    assert formats.reasoning_at_end("<|im_start|>assistant\n") is Reasoning.OPEN, "as vLLM's parser of that name"
    for named in ({"reasoning_parser": "hermes"}, {"tool_call_parser": "qwen3"}):
        with pytest.raises(ConfigError, match="is not one of"):
            find(tmp_path / next(iter(named)), CASES["qwen3"], **named)


@pytest.mark.parametrize(("name", "own"), [("jamba", "minimax"), ("granite4", "hermes"), ("step3p5", "qwen3_coder")])
def test_other_parsers_names_stand_for_the_same_format(tmp_path: Path, name: str, own: str) -> None:
    formats, _ = find(tmp_path / "a", CASES["qwen3"], tool_call_parser=name)
    assert formats.tool_call_parser == own


@pytest.mark.parametrize(
    ("reasoning", "calls", "own"),
    [
        ("deepseek-r1", "deepseekv31", ("qwen3", "deepseek_v31")),
        ("gpt-oss", "gpt-oss", ("openai_gptoss", "openai")),
        ("qwen3-thinking", "qwen25", ("qwen3", "hermes")),
        ("minimax", "minimax-m2", ("qwen3", "minimax_m2")),
    ],
)
def test_sglangs_names(tmp_path: Path, reasoning: str, calls: str, own: tuple[str, str]) -> None:
    formats, _ = find(tmp_path / "a", CASES["qwen3"], reasoning_parser=reasoning, tool_call_parser=calls)
    assert (formats.reasoning_parser, formats.tool_call_parser) == own


@pytest.mark.parametrize("flag", ["reasoning_parser", "tool_call_parser"])
def test_vllms_other_names_are_refused_for_what_they_are(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match="inkling: vLLM's format of that name is not served"):
        find(tmp_path / "a", CASES["qwen3"], **{flag: "inkling"})


OWN_WAYS = {
    "longcat": '<longcat_tool_call>{"name": "weather", "arguments": A}</longcat_tool_call>\n<longcat_tool_call>{"name": "time", "arguments": {}}</longcat_tool_call>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": A}, {"name": "time", "arguments": {}}]',
    "granite-20b-fc": '<function_call> {"name": "weather", "arguments": A} <function_call> {"name": "time", "arguments": {}}',
    "ernie45": '<tool_call>\n{"name": "weather", "arguments": A}\n</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n',
    "seed_oss": "<seed:tool_call>\n<function=weather>\nX</function>\n<function=time>\n</function>\n</seed:tool_call>",
    "olmo3": "<function_calls>weather(P)\ntime()</function_calls>",
    "lfm2": "<|tool_call_start|>[weather(P), time()]<|tool_call_end|>",
    "xlam": '```json\n[{"name": "weather", "arguments": A}, {"name": "time", "arguments": {}}]\n```',
    "dots": '<dots_function_call>\n<invoke name="weather">\nM</invoke>\n<invoke name="time">\n</invoke>\n</dots_function_call>',
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">S</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="time"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\nD</｜DSML｜invoke>\n<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "functiongemma": "<start_function_call>call:weather{G}<end_function_call><start_function_call>call:time{}<end_function_call>",
}
"""Answers of formats that only their names choose. Letters stand for the arguments in each way to write them."""
WRITTEN = {
    "A": '{"city": "Rome", "days": 2}',
    "X": "<parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n",
    "P": 'city="Rome", days=2',
    "M": '<parameter name="city">Rome</parameter>\n<parameter name="days">2</parameter>\n',
    "S": '<steptml:parameter name="city">Rome</steptml:parameter><steptml:parameter name="days">2</steptml:parameter>',
    "D": '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n',
    "G": "city:<escape>Rome<escape>,days:2",
}


@pytest.mark.parametrize("name", OWN_WAYS)
def test_formats_by_name_alone_are_read_however_they_are_cut(tmp_path: Path, name: str) -> None:
    formats, _ = find(tmp_path / "a", CASES["qwen3"], tool_call_parser=name)
    answer = "Look. " + re.sub(r"\b[AXPMSDG]\b", lambda one: WRITTEN[one[0]], OWN_WAYS[name])
    whole = read(formats, answer, [])
    assert calls_of(whole) == [("weather", {"city": "Rome", "days": 2}), ("time", {})]
    assert text_of(whole) == "Look."
    for end in range(len(answer)):
        assert read(formats, answer[:end], list(range(end))) == read(formats, answer[:end], [])


UNKNOWN = replace(CASES["qwen3"], template="{% if tools %}{% endif %}{{ messages[-1].content }}", special=())


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm4.5", "phi4-mini", "internlm2.5", "kimi-k2", "gemma4"])
def test_calls_are_found_in_answers_of_models_whose_templates_show_none(tmp_path: Path, name: str) -> None:
    """By the special tokens of the vocabulary and by widespread tags; calls of histories are written like that, too."""
    formats, _ = find(tmp_path / "a", replace(UNKNOWN, special=CASES[name].special))
    assert formats.tool_call_parser == (CASES[name].calls if CASES[name].special else None)
    assert calls_of(read(formats, "Look.\n" + formats.write([("weather", ARGUMENTS), ("time", {})]), [])) == [
        ("weather", ARGUMENTS),
        ("time", {}),
    ]
    assert calls_of(read(formats, CASES[name].answer, [])) == [("weather", ARGUMENTS), ("time", {})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>Hm <tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call></think>So", ("Hm", "So", ["time"])),
        ("<think>Hm <tool_call>no</tool_call> x</think>So", ("Hm <tool_call>no</tool_call> x", "So", [])),
        ("<think>a</think>b</think>c", ("a", "b</think>c", [])),
        ("a <think>b</think>", ("", "a <think>b</think>", [])),
        ("<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>", ("", "", ["rm"])),
        ("<think><tool_call>{\"name\": \"rm\"}</tool_call>a</think>b", ("<tool_call>{\"name\": \"rm\"}</tool_call>a", "b", [])),
        ("<think>a <tool_call> b</think><tool_call>{\"name\": \"time\"}</tool_call>", ("a <tool_call> b", "", ["time"])),
        ("{\"name\": \"rm\"}", ("", "{\"name\": \"rm\"}", [])),
        ("a</tool_call><tool_call>{\"name\": \"time\"}</tool_call>b</tool_call>c", ("", "a</tool_call>bc", ["time"])),
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(
    found: dict[str, tuple[Formats, ChatTemplate]], text: str, expected: tuple[str, str, list[str]]
) -> None:
    events = read(found["qwen3"][0], text, [])
    reasoning = "".join(one.text for one in events if isinstance(one, ReasoningDelta))
    names = [one.name for one in events if isinstance(one, ToolCallStart)]
    assert (reasoning, text_of(events), names) == expected


def test_stray_markers_are_text_only_if_special_tokens_are(found: dict[str, tuple[Formats, ChatTemplate]]) -> None:
    for name, text in (("gemma4", "a<tool_call|>b"), ("gpt-oss", "a<|call|>b")):
        formats = found[name][0]
        assert text_of(read(formats, text, [])) == "ab"
        assert text_of(read(formats, text, [], skip_special_tokens=False)) == text


VALUES = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({"type": "integer"}, " 5\n", 5),
    ({"type": "integer"}, "5.5", "5.5"),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "number"}, "inf", "inf"),
    ({"type": "number"}, "9" * 5000, "9" * 5000),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x7", "x7"),
    ({"$ref": "#/$defs/n"}, "7", 7),
    ({"$ref": "#/properties/p"}, "7", 7),
    ({"enum": [1, 2]}, "2", 2),
    ({"const": "2"}, "2", "2"),
    ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
    ({"type": "array"}, "[" * 20_000, "[" * 20_000),
    ({"type": "array"}, '["\\ud800"]', ["\ud800"]),
    ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
    ({}, "x y", "x y"),
    ({}, "12", 12),
    (None, "[1]", [1]),
    ({"type": "integer", "nonsense": 3}, "", ""),
    ({"type": {"bad": 1}}, "a", "a"),
]


@pytest.mark.parametrize(("schema", "text", "expected"), VALUES)
def test_plain_values_have_the_types_of_the_schema(schema: Any, text: str, expected: Any) -> None:
    parameters = {"properties": {"p": schema}, "$defs": {"n": {"type": "integer"}}}
    assert json.loads(to_json(text, parameter_types(parameters, "p"))) == expected
