"""Grammars in EBNF match what they say."""

import llguidance
import pytest

from triptych.errors import InvalidRequest
from triptych.prompt import ebnf, lark

TOKENIZER = llguidance.LLTokenizer("byte")
NESTED = 'root ::= "(" root ")" | item\nitem ::= [a-z]+ ("," item)?'


def matches(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, f"{lark.HEADER}\n{ebnf.to_lark(grammar)}\n", log_level=0)
    assert not matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "maybe", "yesno"]),
        ('root ::= a b\na ::= "x"*\nb ::= "x" "y"', ["xy", "xxxy"], ["y", "x"]),
        ('# first\nroot ::= # why\n  "a"\n  | ("b" |) "c" # last', ["a", "bc", "c"], ["b", "ac"]),
        ('root ::= [a-c]{2} [0-9]{1,} "."{0,2} [^\\n]?', ["ab1", "cc12..x"], ["a1", "ab", "ab1\n"]),
        (r'root ::= "\"\\\n\x41\u00e9\U0001F600" [\]\-^"/]', ['"\\\nAé😀]', '"\\\nAé😀/'], ['"\\\nAé😀a']),
        ('root ::= [-a] [b-] "//" "#"', ["-b//#", "a-//#"], ["bb//#", "-b"]),
        ("root ::= [^a-c]", ["d", "é", "\n"], ["a", "c", ""]),
        ("root ::= . .", ["a\n", "é😀"], ["a"]),
        (NESTED, ["a", "((ab,c))"], ["(a", "a)", "()", "a,"]),
        ('root ::= expr\nexpr ::= expr "+" term | term\nterm ::= [0-9]+', ["1", "1+22+3"], ["+", "1+"]),
        ('root ::= some-rule other_rule.2\nsome-rule ::= "a"\nother_rule.2 ::= "b"', ["ab"], ["a"]),
        ('start ::= "x"\nroot ::= start "y"', ["xy"], ["x", "y"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "%json {" "<[5]>" "$&~"', ["%json {<[5]>$&~"], ["{}"]),
        (f"root ::= {' '.join(f'r{n}' for n in range(40))}\n" + "\n".join(f'r{n} ::= "a"?' for n in range(40)),
         ["", "a" * 40], ["a" * 41]),
    ],
)  # fmt: skip
def test_a_grammar_keeps_its_meaning(grammar: str, texts: list[str], others: list[str]) -> None:
    assert ebnf.is_ebnf(grammar)
    assert [text for text in texts if not matches(grammar, text)] == []
    assert [text for text in others if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start ::= "a"', "no rule 'root'"),
        ("root ::= a", "no rule 'a'"),
        ("root ::=", "'root' is empty"),
        ('root ::= "a"\nroot ::= "b"', "two rules 'root'"),
        ('root ::= "a', "in line 1"),
        ('root ::= "a"\n\n  %', "in line 3"),
        ('"a" root ::= "b"', "in line 1"),
        ("root ::= []", "class of characters is empty"),
        (r"root ::= [\U00110000]", "no character"),
        (r'root ::= "\uD800"', "no character"),
        ("root ::= @a", "unexpected '@'"),
    ],
)
def test_what_is_no_grammar_is_the_fields_error(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ebnf.to_lark(grammar, "structured_outputs.grammar")
    assert caught.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize("text", ["start: a\na: /x/", 'start: "a" | "b"'])
def test_lark_is_no_ebnf(text: str) -> None:
    assert not ebnf.is_ebnf(text)
