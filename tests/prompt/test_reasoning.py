"""Thoughts, calls and text told apart, however the text is split."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.prompt.reasoning import Thought, ThoughtSplitter, thought_at_end
from triptych.prompt.tool_calls import Argued, Called, Event, Said, ToolCallParser

NAMES = ("weather", "time")


def split(text: str, thought: Thought, cuts: list[int]) -> tuple[str, str]:
    splitter = ThoughtSplitter(thought)
    parts = [splitter.push(piece) for piece in pieces(text, cuts)] + [splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def parsed(text: str, cuts: list[int]) -> list[Event]:
    """The events, those of a kind that follow each other joined."""
    parser = ToolCallParser(NAMES)
    events = [event for piece in pieces(text, cuts) for event in parser.push(piece)] + parser.finish()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + event.text)
        elif isinstance(event, Argued) and isinstance(last, Argued) and last.index == event.index:
            joined[-1] = Argued(last.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize(
    ("text", "thought", "expected"),
    [
        ("Hm.\n</think>\n\nYes.", Thought.OPEN, ("Hm.", "Yes.")),
        ("\nHm", Thought.OPEN, ("Hm", "")),
        ("Hm </thin", Thought.OPEN, ("Hm </thin", "")),
        ("</think>Yes.", Thought.OPEN, ("", "Yes.")),
        ("\n<think>\nHm.</think>\nYes.", Thought.POSSIBLE, ("Hm.", "Yes.")),
        ("<thi", Thought.POSSIBLE, ("", "<thi")),
        (" Yes. <think>no</think>", Thought.POSSIBLE, ("", " Yes. <think>no</think>")),
        ("<think>x</think>", Thought.NONE, ("", "<think>x</think>")),
    ],
)
def test_thoughts_are_split_from_the_rest(text: str, thought: Thought, expected: tuple[str, str]) -> None:
    assert split(text, thought, []) == expected
    assert split(text, thought, list(range(len(text)))) == expected


THOUGHT_PIECES = st.sampled_from(["<think>", "</think>", "<", "thi", "</", "nk>", " ", "\n", "x", "é"])


@given(st.lists(THOUGHT_PIECES).map("".join), st.sampled_from(Thought), st.lists(st.integers(0, 99)))
def test_thoughts_are_the_same_for_any_split(text: str, thought: Thought, cuts: list[int]) -> None:
    assert split(text, thought, cuts) == split(text, thought, [])


@pytest.mark.parametrize(
    ("prompt", "thought"),
    [
        ("<|im_start|>assistant\n<think>\n", Thought.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thought.NONE),
        ("see <think>\n<|im_start|>assistant\n", Thought.POSSIBLE),
    ],
)
def test_what_a_prompt_says_about_thoughts(prompt: str, thought: Thought) -> None:
    assert thought_at_end(prompt) is thought


def call(arguments: Any, name: str = "weather") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ROME = {"city": 'Ro"m}e </tool_call> \\'}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call ", [Said("no call ")]),
        (call(ROME), [Called(0, "weather"), Argued(0, json.dumps(ROME))]),
        (
            f"Let me see.\n\n{call({})}\n{call({'a': [{}]}, 'time')}\n",
            [Said("Let me see."), Called(0, "weather"), Argued(0, "{}"), Called(1, "time"), Argued(1, '{"a": [{}]}')],
        ),
        (f"{call({})}\nDone. ", [Called(0, "weather"), Argued(0, "{}"), Said("Done. ")]),
        ('<tool_call>{"arguments": {"x":1}, "name": "time"}</tool_call>', [Called(0, "time"), Argued(0, '{"x": 1}')]),
        ('<tool_call>{"name": "time"}</tool_call>', [Called(0, "time"), Argued(0, "{}")]),
        ('<tool_call>{"name": "time", "arguments": {}', [Called(0, "time"), Argued(0, "{}")]),
        ('<tool_call>{"name": "time", "arguments": "{}"}', [Called(0, "time"), Argued(0, "{}")]),
        ('<tool_call>{"name": "time", "arguments": {"a', [Called(0, "time"), Argued(0, '{"a')]),
        (f"x {call({}, 'rm')} y", [Said(f"x {call({}, 'rm')} y")]),
        ("x <tool_call>no JSON</tool_call>", [Said("x <tool_call>no JSON</tool_call>")]),
        ("x\n<tool_call>[" + "[" * 99_999, [Said("x\n<tool_call>[" + "[" * 99_999)]),
    ],
    ids=range(12),
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
    parser = ToolCallParser(NAMES)
    parser.push("<tool_call>")
    letters = random.Random(0).choices("abc{}", k=100_000)
    said = "".join(event.text for letter in letters for event in parser.push(letter) if isinstance(event, Said))
    said += "".join(event.text for event in parser.finish() if isinstance(event, Said))
    assert said == "<tool_call>" + "".join(letters)
