"""Lark grammars without recursion as regular expressions, which can be enforced within JSON strings."""

import re
from collections.abc import Callable

from triptych.errors import InvalidRequest
from triptych.prompt.formats.json_dump import SURROGATE

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*)
    | (?P<import>%import\s+common\s*(?:\.\s*(?P<one>\w+)|\((?P<several>[^)]*)\)))
    | (?P<rule>[?!]{0,2}[A-Za-z_]\w*(?:\.-?\d+)?)[ \t]*:
    | (?P<name>[A-Za-z_]\w*)
    | "(?P<text>(?:[^"\\\n]|\\.)*)"(?P<insensitive>i?)
    | /(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<flags>[imsx]*)
    | (?P<times>[?*+]|\{[\d\ ,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    | (?P<sign>[()\[\]|])
    | ->\s*(?P<alias>\w+)
    """,
    re.VERBOSE,
)
_COMMON = {
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Terminals that Lark has of its own."""
_MAX_LENGTH = 2**16
_MAX_DEPTH = 64
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIGN = re.compile(r"[\\.^$|?*+()\[\]{}]")

Piece = tuple[str, str]
"""A kind, and a part of a regular expression or a name."""


def lark_regex(grammar: str, param: str | None = None) -> str:
    """Return a regular expression for the texts that a grammar matches from its rule ``start`` on. Raises
    InvalidRequest, naming ``param``, for one that is recursive, that ignores terminals, or that is too large."""
    try:
        rules = _rules(grammar)
        made: dict[str, str] = {}
        return _of_rule("start", rules, made, ())
    except ValueError as error:
        raise InvalidRequest(f"the Lark grammar can't be enforced: {error}", param) from None


def _rules(grammar: str) -> dict[str, list[Piece]]:
    rules: dict[str, list[Piece]] = {}
    body: list[Piece] | None = None
    at = 0
    while at < len(grammar):
        token = _TOKEN.match(grammar, at)
        if token is None:
            raise ValueError(f"what begins with {grammar[at : at + 20]!r} isn't understood")
        at = token.end()
        if names := token["import"] and (token["one"] or token["several"]):
            for name in re.findall(r"\w+", names):
                if name not in _COMMON:
                    raise ValueError(f"common.{name} isn't known")
                rules[name] = [("regex", _COMMON[name])]
        elif token["rule"]:
            name = token["rule"].lstrip("?!").partition(".")[0]
            if name in rules:
                raise ValueError(f"it has the rule {name!r} twice")
            body = rules[name] = []
        elif (piece := _piece(token)) is not None:
            if body is None:
                raise ValueError(f"{token[0][:20]!r} is in no rule")
            body.append(piece)
    return rules


def _piece(token: re.Match[str]) -> Piece | None:
    if (text := token["text"]) is not None:
        exact = _SIGN.sub(r"\\\g<0>", _ESCAPE.sub(_unescaped, text)).replace("\n", "\\n")
        return "regex", f"(?i:{exact})" if token["insensitive"] else exact
    if (regex := token["regex"]) is not None:
        flags = "".join(sorted(set(token["flags"])))
        return "regex", f"(?{flags}:{regex})".replace(r"\/", "/")
    if times := token["times"].replace(" ", "") if token["times"] else "":
        if times.startswith("~"):
            least, _, most = times[1:].partition("..")
            times = f"{{{least.strip()},{(most or least).strip()}}}"
        return "times", times
    return next(((kind, token[kind]) for kind in ("name", "sign") if token[kind]), None)


def _unescaped(match: re.Match[str]) -> str:
    if code := match[1] or match[2] or match[3]:
        if SURROGATE.match(character := chr(int(code, 16))):
            raise ValueError(f"{match[0]} is no character")
        return character
    return _ESCAPES.get(match[4], match[4])


def _of_rule(name: str, rules: dict[str, list[Piece]], made: dict[str, str], around: tuple[str, ...]) -> str:
    """Return the expression of a rule. ``made`` are those of other rules, ``around`` the rules that it is within."""
    if name in made:
        return made[name]
    if name in around or len(around) > _MAX_DEPTH:
        raise ValueError(f"the rule {name!r} is recursive" if name in around else "its rules are nested too deeply")
    if not rules.get(name):
        raise ValueError(f"there is no rule {name!r}")
    made[name] = _joined(rules[name], lambda inner: _of_rule(inner, rules, made, (*around, name)))
    return made[name]


def _joined(pieces: list[Piece], of_rule: Callable[[str], str]) -> str:
    signs = {"(": "(?:", "[": "(?:", ")": ")", "]": ")?", "|": "|"}
    parts, length = [], 0
    for kind, text in pieces:
        part = signs[text] if kind == "sign" else f"(?:{of_rule(text)})" if kind == "name" else text
        parts.append(f"(?:{text})" if kind == "regex" else part)
        length += len(parts[-1])
        if length > _MAX_LENGTH:
            raise ValueError(f"it exceeds {_MAX_LENGTH} characters as a regular expression")
    return "".join(parts)
