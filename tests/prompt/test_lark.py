"""Texts, regular expressions and schemas keep their meaning within a grammar."""

import json
import re
from typing import Any

import llguidance
import pytest

from triptych.errors import InvalidRequest
from triptych.prompt import lark

TOKENIZER = llguidance.LLTokenizer("byte")


def matches(expression: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, f"{lark.HEADER}\nstart: {expression}\n", log_level=0)
    assert not matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("text", ["a", "\x00\x1b\x7f\x85\u2028é😀\"\\/\n'", "#//x %json {", "</think>", r"\n"])
def test_literals_match_themselves(text: str) -> None:
    assert matches(lark.literal(text), text)
    assert matches(lark.choice([text, "b"]), text)
    assert not matches(lark.literal(text), text + "a")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb"), (r"\\/", "\\/"), (r"\\", "\\"),
     ("[/]+", "//"), ("a#b//c", "a#b//c"), (r"\d{2}", "12"), (".", "é")],
)  # fmt: skip
def test_regular_expressions_keep_their_meaning(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text)
    assert matches(lark.regex(pattern), text)
    assert not matches(lark.regex(pattern), text + text + "\0")


@pytest.mark.parametrize("pattern", ["\\", "a\\\\\\"])
def test_a_regular_expression_cannot_reach_beyond_itself(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="backslash"):
        lark.regex(pattern)


def test_white_space_in_json_is_bounded_whatever_a_schema_says() -> None:
    schema = lark.json_schema({"x-guidance": {"whitespace_flexible": False, "lenient": True}, "type": "array"})
    assert json.loads(f"[{' ' * 20}]") == []
    assert matches(schema, f"[{' ' * 20}]")
    assert not matches(schema, f"[{' ' * 21}]")


def test_until_ends_with_the_first_marker() -> None:
    grammar = f'"" head "b"\n{lark.until("head", lark.literal("</x>"))}'
    assert matches(grammar, "a<b</x>b")
    assert not matches(grammar, "a</x>a</x>b")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"pattern": "^[A-Z]{2}$"}, ["AB"], ["ABC", "xAB", "a"]),
        ({"pattern": "b|^c"}, ["abc", "cd"], ["ac"]),
        ({"pattern": r"[|]$|\$"}, ["a|", "a$b"], ["|a"]),
        ({"minLength": 2, "maxLength": 3}, ["é\n", "abc"], ["a", "abcd"]),
        ({"maxLength": 2, "pattern": "a"}, ["a", "ba"], ["b", "aaa"]),
        ({"minLength": 1}, ["a"], ["", "a</p>", "a</p>b"]),
    ],
)
def test_plain_text_keeps_within_a_schemas_limits(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = f'text\ntext[lazy]: TEXT "</p>"\nTEXT: {" & ".join([*lark.text_limits(schema), lark.without("</p>")])}'
    assert [text for text in right + wrong if matches(grammar, text + "</p>")] == right
