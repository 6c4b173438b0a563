"""Text of grammars in llguidance's dialect of Lark.

A grammar is a list of rules, of which ``start`` is the first. Text in it never matches special tokens."""

import json
import re
from collections.abc import Iterable
from typing import Any

from triptych.errors import InvalidRequest
from triptych.prompt.json_schema import prepared

MAX_WHITESPACE = 20
"""White space characters in a row within JSON: enough to indent, but a model can't loop on them."""

HEADER = '%llguidance {"no_forcing": true}'
"""First line of a grammar. Otherwise only the tokens that the tokenizer would choose for a text could come."""

JSON = "%json "
"""Begins an expression for JSON."""
TEXT = "/(?s:.*)/"
"""Any text."""

_ANCHORED = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_IN_REGEX = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
# with escapes such as \\u0061, a further property could have the name of one that the schema restricts
_JSON_OPTIONS = {
    "whitespace_pattern": rf"[ \t\r\n]{{1,{MAX_WHITESPACE}}}",
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
}


def literal(text: str) -> str:
    """Return a terminal for exactly this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def choice(texts: Iterable[str]) -> str:
    """Return an expression for one of the texts."""
    return "(" + " | ".join(map(literal, texts)) + ")"


def regex(pattern: str, param: str | None = None) -> str:
    """Return a terminal for texts that a regular expression matches as a whole. Raises InvalidRequest, naming
    ``param``, for one that ends within an escape."""
    if len(pattern) % 2 != len(pattern.rstrip("\\")) % 2:
        raise InvalidRequest("the regex can't be used: it ends with a backslash", param)
    # what is escaped stays as it is; a line break can't be within a terminal
    parts = re.sub(r"\\\n|\\.|[/\n]", lambda one: _IN_REGEX.get(one[0], one[0]), pattern)
    return f"/{parts}/"


def without(text: str) -> str:
    """Return a terminal for any text that doesn't contain this one."""
    return f"~({TEXT} {literal(text)} {TEXT})"


def text_limits(schema: dict[str, Any], param: str | None = None) -> list[str]:
    """Return terminals that together match the strings which a schema's length and pattern allow; none if it has
    neither. Raises InvalidRequest, naming ``param``."""
    found = []
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        found.append(regex(f"(?s:.{{{least or 0},{'' if most is None else most}}})"))
    if isinstance(pattern := schema.get("pattern"), str):
        found.append(regex(f"(?:{'|'.join(map(_anywhere, _alternatives(pattern)))})", param))
    return found


def _anywhere(pattern: str) -> str:
    """Return an expression for texts that have a match anywhere, which anchors at its ends prevent."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if _ANCHORED.search(pattern) else "(?s:.*)"
    body = pattern[1:] if not begin else pattern
    return f"{begin}(?:{body[:-1] if not end else body}){end}"


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of an expression that aren't within groups."""
    parts: list[list[str]] = [[]]
    depth, in_set = 0, False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        if piece in "[]":
            in_set = piece == "[" or (in_set and piece != "]")
        depth += 0 if in_set else (piece == "(") - (piece == ")")
        if piece == "|" and not depth and not in_set:
            parts.append([])
        else:
            parts[-1].append(piece)
    return ["".join(one) for one in parts]


def json_schema(schema: dict[str, Any], param: str | None = None) -> str:
    """Return an expression for JSON that a schema allows. Options for llguidance in it have no effect. Raises
    InvalidRequest, naming ``param``."""
    try:
        return f"{JSON}{json.dumps(prepared(schema, param) | {'x-guidance': _JSON_OPTIONS}, allow_nan=False)}"
    except (ValueError, RecursionError):
        raise InvalidRequest("the JSON schema can't be used: it isn't JSON, or too deeply nested", param) from None


def token(number: int) -> str:
    """Return an expression for one token, such as a special one."""
    return f"<[{number}]>"


def until(name: str, marker: str) -> str:
    """Return a rule for any text up to and including the first ``marker``, which a terminal such as ``literal``
    gives."""
    return f"{name}[lazy]: {TEXT} {marker}"
