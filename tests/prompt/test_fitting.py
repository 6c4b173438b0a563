"""Conversations of every shape with templates that behave as those of released models do."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.conversations import CONVERSATIONS, assistant, calls, result, system, texts, user
from tests.support.templates import ODD_TEMPLATES, TEMPLATES, made, serve
from triptych.errors import InvalidRequest
from triptych.prompt.template_forms import PROBE_TOOLS

WORD = re.compile(r"(?:system|user|answer|result|weather|Rome|broken)\d")
RESULTS_ALONE = {"result alone", "result of no call"}
"""Conversations that OpenAI's API refuses itself."""
WITHOUT_TOOLS = {"llama2", "gemma2", "gemma3", "llava", "system last"}
"""Templates that raise an error for a tool's result, or leave it out."""


def words(value: Any) -> list[str]:
    if isinstance(value, str):
        return WORD.findall(value)
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
    return [word for member in members for word in words(member)]


@pytest.mark.parametrize("tools", [None, PROBE_TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", [*TEMPLATES, *ODD_TEMPLATES])
def test_nothing_is_lost(name: str, tools: Any) -> None:
    """Every text is in the prompt, as itself, or an error names the message: one of a tool, and the model has none."""
    template, fitter = made(name, with_tools=bool(tools))
    if tools and not template.supports_tools:
        return
    for shape, messages in CONVERSATIONS.items():
        try:
            text = serve(template, fitter, messages, tools=tools)
        except InvalidRequest as error:
            has_result = any(message["role"] == "tool" for message in messages)
            assert shape in RESULTS_ALONE or (has_result and name in WITHOUT_TOOLS), (shape, error)
            assert re.match(r"messages\[\d\]", error.param or ""), error
            assert str(error).startswith(f"{error.param}: the model's chat template "), shape
            continue
        missing = set(words(messages)) - set(words(text))
        assert not missing, (shape, text)
        for printed in ("'type'", '"type": "text"', "'city'", "None", "Undefined", '\\"city'):
            assert printed not in text, (shape, text)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "qwen2-vl", "llama3", "kimi-k2", "llama4", "ministral-3"])
def test_images_have_their_place_in_every_role(name: str) -> None:
    content = [*texts("result0"), {"type": "image"}, *texts("result1")]
    last = calls("c"), result("c", content)
    for messages in ([system(content), user()], [user(), assistant(content), user("user1")], [user(), *last]):
        text = serve(*made(name), messages)
        assert re.search(r"result0(\s|\\n)*<\|image\|>(\s|\\n)*result1", text), text
        assert text.count("<|image|>") == 1


@pytest.mark.parametrize("name", [*TEMPLATES, *ODD_TEMPLATES])
def test_reasoning_is_continued(name: str) -> None:
    template, fitter = made(name)
    reasoning = {"reasoning": "answer0", "reasoning_content": "answer0"}
    for last in (assistant("") | reasoning, assistant("<think>\nanswer0"), assistant("answer0")):
        fitted = fitter.fit([user(), last], continues=True)
        text = template.render([one.message for one in fitted], False, True)
        assert text.endswith("answer0") and text.count("answer0") == 1


@pytest.mark.parametrize("name", ["mistral-small-3", "mistral-7b-v0.3"])
@pytest.mark.parametrize(
    "ids", [("c", "d"), ("call_abcdefghijkl", "call_abcdefghijkm"), ("é" * 9, "a b c d e"), ("", "0")]
)
def test_ids_are_those_that_the_template_takes(name: str, ids: tuple[str, str]) -> None:
    _, fitter = made(name)
    asked, *results = fitter.fit([user(), calls(*ids), result(ids[0]), result(ids[1])])[1:]
    given = [call["id"] for call in asked.message["tool_calls"]]
    assert given == [one.message["tool_call_id"] for one in results]
    assert len(set(given)) == 2
    assert all(re.fullmatch("[0-9a-z]{9}", one) for one in given)


def test_calls_are_before_their_results() -> None:
    """Results keep their order, which is that of media; a call without one is last."""
    messages = [user(), calls("a", "b", "c", content="answer0"), result("c"), result("a", "result1"), user("user1")]
    fitted = made("llama3")[1].fit(messages)
    shown = [
        one.message["tool_calls"][0]["id"] if one.kind == "calls" else one.message.get("tool_call_id", one.kind)
        for one in fitted
    ]
    assert shown == ["user", "assistant", "c", "c", "a", "a", "b", "user"]


def test_results_of_unmatched_calls_end_before_the_next_message() -> None:
    """Many calls of one message are split in the time of one pass."""
    many = [f"id{n}" for n in range(2000)]
    fitted = made("llama3")[1].fit([user(), calls(*many), *(result(one) for one in reversed(many))])
    assert len(fitted) == 4001
