"""Grammars in the EBNF of llama.cpp (GBNF) and xgrammar, rewritten in Lark.

``root ::= …`` is the first rule. What isn't recursive becomes one terminal, which matches exactly; terminals within
recursive rules take as much text as they can."""

import re
from collections.abc import Iterator

from triptych.errors import InvalidRequest
from triptych.prompt.lark import literal

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\#[^\n]*)+)
    | (?P<rule>[A-Za-z_][\w.-]*)\s*::=
    | (?P<name>[A-Za-z_][\w.-]*)
    | "(?P<text>(?:[^"\\\n]|\\.)*)"
    | \[(?P<letters>\^?(?:[^\]\\]|\\.)*)\]
    | (?P<times>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<sign>[()|])
    | (?P<any>\.)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_ROOT = "root"


def is_ebnf(text: str) -> bool:
    """Return whether a grammar is in EBNF rather than in Lark."""
    return "::=" in text


def to_lark(text: str, param: str | None = None) -> str:
    """Return an EBNF grammar in Lark. Raises InvalidRequest, naming ``param``."""
    try:
        return _to_lark(dict(_rules(text)))
    except ValueError as error:
        raise InvalidRequest(f"the grammar can't be used: {error}", param) from None


def _to_lark(rules: dict[str, list[tuple[str, str]]]) -> str:
    if _ROOT not in rules:
        raise ValueError("it has no rule 'root'")
    for name, body in rules.items():
        if not body:
            raise ValueError(f"the rule {name[:64]!r} is empty")
        for kind, value in body:
            if kind == "name" and value not in rules:
                raise ValueError(f"there is no rule {value[:64]!r}")
    recursive = _recursive(rules)
    names = {name: f"r{number}" if name in recursive else f"T{number}" for number, name in enumerate(rules)}
    lines = [f"start: {names[_ROOT]}"]
    for name, body in rules.items():
        written = [names[value] if kind == "name" else _expression(kind, value) for kind, value in body]
        lines.append(f"{names[name]}: {' '.join(written)}")
    return "\n".join(lines)


def _rules(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each rule's name, and its body's kinds and values of tokens."""
    seen: set[str] = set()
    body: list[tuple[str, str]] | None = None
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None or (body is None and token.lastgroup not in ("space", "rule")):
            line = text.count("\n", 0, place) + 1
            raise ValueError(f"unexpected {text[place]!r} in line {line}")
        place = token.end()
        kind, value = token.lastgroup or "", token[token.lastgroup or 0]
        if kind == "rule":
            if value in seen:
                raise ValueError(f"there are two rules {value[:64]!r}")
            seen.add(value)
            body = []
            yield value, body
        elif kind != "space" and body is not None:
            if kind == "sign" and body and value in "|)" and body[-1] in (("sign", "("), ("sign", "|")):
                body.append(("text", ""))  # an empty alternative
            body.append((kind, value))


def _recursive(rules: dict[str, list[tuple[str, str]]]) -> set[str]:
    """Return the rules that can reach a rule that reaches itself."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    left = {}
    for name, body in rules.items():
        used = {value for kind, value in body if kind == "name"}
        left[name] = len(used)
        for one in used:
            users[one].append(name)
    ready = [name for name, number in left.items() if number == 0]
    recursive = set(rules)
    while ready:
        name = ready.pop()
        recursive.discard(name)
        for user in users[name]:
            left[user] -= 1
            if left[user] == 0:
                ready.append(user)
    return recursive


def _expression(kind: str, value: str) -> str:
    match kind:
        case "text":
            return literal("".join(_unescaped(value)))
        case "letters":
            return _class(value)
        case "any":
            return "/(?s:.)/"
        case "times":
            return re.sub(r"\s", "", value)
    return value


def _unescaped(value: str) -> Iterator[str]:
    for two, four, eight, escaped, plain in _ESCAPE.findall(value):
        number = int(two or four or eight or "0", 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise ValueError(f"U+{number:X} is no character")
        yield chr(number) if two or four or eight else _LETTERS.get(escaped, escaped) or plain


def _class(value: str) -> str:
    negated = value.startswith("^")
    spelled = _ESCAPE.finditer(value.removeprefix("^"))
    letters = [("-" if one[0] == "-" else "", "".join(_unescaped(one[0]))) for one in spelled]
    ranges, number = [], 0
    while number < len(letters):
        first = last = letters[number][1]
        if number + 2 < len(letters) and letters[number + 1][0]:
            last = letters[number + 2][1]
            number += 2
        number += 1
        ranges.append(f"\\x{{{ord(first):X}}}-\\x{{{ord(last):X}}}")
    if not ranges:
        raise ValueError("a class of characters is empty")
    return f"/[{'^' if negated else ''}{''.join(ranges)}]/"
