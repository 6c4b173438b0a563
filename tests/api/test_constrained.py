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
    "deepseek-v3.1": "<think>Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather"
    + f"\n```json\n{JSON}"
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
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


def accepts(case: FormatCase, folder: Path, text: str, choice: str) -> bool:
    formats, _ = find(folder, case)
    formats = replace(formats, special={one: 256 + case.special.index(one) for one in formats.special})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}
    request = parse_request(ChatCompletionRequest, json.dumps(body).encode())
    grammar = answer_grammar(request, Reasoning.POSSIBLE if formats.reasons else Reasoning.NONE, formats)
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(ByteVocabulary(case.special))), grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for piece in re.split("(" + ("|".join(map(re.escape, case.special)) or "(?!)") + ")", text):
        tokens += [256 + case.special.index(piece)] if piece in case.special else piece.encode()
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


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
