"""Reasoning, tool calls and text are separated, however the text is split."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.formats import joined
from triptych.prompt.formats.catalog import Formats
from triptych.prompt.formats.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from triptych.prompt.formats.hermes import Hermes
from triptych.prompt.formats.parser import AnswerParser
from triptych.prompt.formats.reasoning import THINK, Reasoning

TOOLS = {"weather": None, "time": None}


def split(text: str, reasoning: Reasoning, cuts: list[int]) -> tuple[str, str]:
    events = joined(AnswerParser(reasoning, (THINK,), (), {}), text, cuts)
    return (
        "".join(one.text for one in events if isinstance(one, ReasoningDelta)),
        "".join(one.text for one in events if isinstance(one, TextDelta)),
    )


def parsed(text: str, cuts: list[int]) -> list[Event]:
    return joined(AnswerParser(Reasoning.NONE, (), (Hermes(),), TOOLS), text, cuts)


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        ("Hm.\n</think>\n\nYes.", Reasoning.OPEN, ("Hm.", "Yes.")),
        ("\nHm", Reasoning.OPEN, ("Hm", "")),
        ("Hm </thin", Reasoning.OPEN, ("Hm </thin", "")),
        ("</think>Yes.", Reasoning.OPEN, ("", "Yes.")),
        ("\n<think>\nHm.</think>\nYes.", Reasoning.POSSIBLE, ("Hm.", "Yes.")),
        ("<thi", Reasoning.POSSIBLE, ("", "<thi")),
        (" Yes. <think>no</think>", Reasoning.POSSIBLE, ("", " Yes. <think>no</think>")),
        ("<think>x</think>", Reasoning.NONE, ("", "<think>x</think>")),
    ],
)
def test_thoughts_are_split_from_the_rest(text: str, reasoning: Reasoning, expected: tuple[str, str]) -> None:
    assert split(text, reasoning, []) == expected
    assert split(text, reasoning, list(range(len(text)))) == expected


THOUGHT_PIECES = st.sampled_from(["<think>", "</think>", "<", "thi", "</", "nk>", " ", "\n", "x", "é"])


@given(st.lists(THOUGHT_PIECES).map("".join), st.sampled_from(Reasoning), st.lists(st.integers(0, 99)))
def test_thoughts_are_the_same_for_any_split(text: str, reasoning: Reasoning, cuts: list[int]) -> None:
    assert split(text, reasoning, cuts) == split(text, reasoning, [])


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", Reasoning.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Reasoning.NONE),
        ("see <think>\n<|im_start|>assistant\n", Reasoning.POSSIBLE),
    ],
)
def test_reasoning_is_detected_from_the_prompt(prompt: str, reasoning: Reasoning) -> None:
    formats = Formats((THINK,), (), reasons=True, special={})
    assert formats.reasoning_at_end(prompt) is reasoning
    assert replace(formats, reasons=False).reasoning_at_end(prompt) is Reasoning.NONE


def call(arguments: Any, name: str = "weather") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ROME = {"city": 'Ro"m}e </tool_call> \\'}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call ", [TextDelta("no call ")]),
        (call(ROME), [ToolCallStart(0, "weather"), ToolCallArguments(0, json.dumps(ROME))]),
        (
            f"Let me see.\n\n{call({})}\n{call({'a': [{}]}, 'time')}\n",
            [
                TextDelta("Let me see."),
                ToolCallStart(0, "weather"),
                ToolCallArguments(0, "{}"),
                ToolCallStart(1, "time"),
                ToolCallArguments(1, '{"a": [{}]}'),
            ],
        ),
        (f"{call({})}\nDone. ", [ToolCallStart(0, "weather"), ToolCallArguments(0, "{}"), TextDelta("Done. ")]),
        (
            '<tool_call>{"arguments": {"x":1}, "name": "time"}</tool_call>',
            [ToolCallStart(0, "time"), ToolCallArguments(0, '{"x":1}')],
        ),
        ('<tool_call>{"name": "time"}</tool_call>', [ToolCallStart(0, "time"), ToolCallArguments(0, "{}")]),
        ('<tool_call>{"name": "time", "arguments": {}', [ToolCallStart(0, "time"), ToolCallArguments(0, "{}")]),
        ('<tool_call>{"name": "time", "arguments": "{}"}', [ToolCallStart(0, "time"), ToolCallArguments(0, "{}")]),
        ('<tool_call>{"name": "time", "arguments": {"a', [ToolCallStart(0, "time"), ToolCallArguments(0, '{"a')]),
        (
            f"x {call({}, 'rm')} y",
            [TextDelta("x"), ToolCallStart(0, "rm"), ToolCallArguments(0, "{}"), TextDelta("y")],
        ),
        (f"x {call({}, 'r m')} y", [TextDelta(f"x {call({}, 'r m')} y")]),
        (
            f"<tool_call> {call({})}",
            [TextDelta("<tool_call>"), ToolCallStart(0, "weather"), ToolCallArguments(0, "{}")],
        ),
        ("x <tool_call>no JSON</tool_call>", [TextDelta("x <tool_call>no JSON</tool_call>")]),
        ("x\n<tool_call>[" + "[" * 99_999, [TextDelta("x\n<tool_call>[" + "[" * 99_999)]),
    ],
    ids=range(14),
)
def test_calls_are_found(text: str, expected: list[Event]) -> None:
    for cuts in ([], list(range(len(text))) if len(text) < 1000 else [7, 20, 30_000, 65_540]):
        assert parsed(text, cuts) == expected


CALL_PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "time", ',
        '"arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "[",
        " ",
        "\n",
        "x",
        call({}),
        call(ROME, "time"),
        '{"name": "no"}',
        "<",
        "</tool",
        "_call>",
    ]
)


@given(st.lists(CALL_PIECES, max_size=12).map("".join), st.lists(st.integers(0, 400)))
def test_calls_are_the_same_for_any_split(text: str, cuts: list[int]) -> None:
    assert parsed(text, cuts) == parsed(text, [])


def test_a_long_call_costs_no_more_than_its_length() -> None:
    parser = AnswerParser(Reasoning.NONE, (), (Hermes(),), TOOLS)
    parser.push("<tool_call>")
    letters = random.Random(0).choices("abc{}", k=100_000)
    said = "".join(event.text for letter in letters for event in parser.push(letter) if isinstance(event, TextDelta))
    said += "".join(event.text for event in parser.finish() if isinstance(event, TextDelta))
    assert said == "<tool_call>" + "".join(letters)
