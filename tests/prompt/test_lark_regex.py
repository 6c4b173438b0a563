"""Lark grammars as regular expressions: llguidance, which reads both, matches the same texts."""

import json
import re
import time

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.support.byte_vocabulary import ByteVocabulary
from triptych.errors import InvalidRequest
from triptych.prompt import lark
from triptych.prompt.lark_regex import lark_regex

EDITS = """
// edits of files
start: "BEGIN" LF edit+ end
end: "END" LF?
?edit.2: ("add " | "drop " /[a-z]+/ ":") NAME LF line* -> an_edit

line: "+" /(.*)/ LF
    | "-" ~ 1..2 [" "] LF
NAME: /[^\\n"]+/
%import common.LF
"""
CASES = [
    (EDITS, ["BEGIN\nadd a\\b\nEND", "BEGIN\nadd x\n+\n+y \\\"\n-- \ndrop f:g\nEND\n"],
     ["BEGIN\nEND", "BEGIN\nadd x\n---\nEND"]),
    ('start: "a.b"i | /[é\\/]{2}/\n', ["A.b", "é/"], ["acb", "é"]),
    ("start: (INT /,/?)+ \n%import common (INT, WS)\n", ["1,2", "12"], [",", "1 2"]),
    ("start: A{2,3} B? \"\\u00e9\\\"\"\nA: /a/i\nB: \"\\n\"", ["aA\né\"", "aaaé\""], ["aé\"", "aa é\""]),
    ("start: CNAME\n%import common.CNAME", ["a_1"], ["é", "1a", "aé"]),
    ("!start: /./s /x y/", ["\nx y"], ["\nxy"]),
]  # fmt: skip


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(ByteVocabulary(()))), grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES)
def test_it_matches_what_the_grammar_does(grammar: str, right: list[str], wrong: list[str]) -> None:
    pattern = lark_regex(grammar)
    within_json = f"{lark.HEADER}\nstart: " + lark.json_schema({"type": "string", "pattern": f"^(?:{pattern})$"})
    alone = f"{lark.HEADER}\nstart: {lark.regex(pattern)}"
    for text in (*right, *wrong):
        assert bool(re.fullmatch(pattern, text)) == (text in right), text
        assert accepts(alone, text) == (text in right), text
        assert accepts(within_json, json.dumps(text, ensure_ascii=False)) == (text in right), text


HOSTILE = ["\n", "?", "{ ", "a ", "a: ", '"', "/", "%import common (", "~ ", "(", "//\n", "a: a\n"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_grammars_take_time_in_proportion(text: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        lark_regex(text * 30_000)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "recursive"),
        ("start: a", "no rule 'a'"),
        ("other: /a/", "no rule 'start'"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: X\n%import common.PYTHON", "common.PYTHON"),
        ("%import python.NAME\nstart: NAME", "python"),
        ('"a"', "in no rule"),
        ("start: a a a a a a a a\n"
         + "".join(f"{x}:{f' {y}' * 8}\n" for x, y in zip("abcdef", "bcdefg", strict=True)) + 'g: "x"', "exceeds"),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(100)) + 'a100: "x"', "too deeply"),
        ("start: <tool>", "isn't understood"),
        ('start: "a"\nstart: "b"', "the rule 'start' twice"),
        (r'start: "\ud800"', "is no character"),
        (r'start: "\U00110000"', "can't be enforced"),
    ],
)  # fmt: skip
def test_what_no_regular_expression_matches_is_refused(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        lark_regex(grammar, "tools[0].format.definition")
    assert raised.value.param == "tools[0].format.definition"
