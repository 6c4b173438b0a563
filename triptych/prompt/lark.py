"""Text of grammars in llguidance's dialect of Lark.

A grammar is a list of rules, of which ``start`` is the first. Text in it never matches special tokens."""

import json
import re
from collections.abc import Iterable
from typing import Any

from triptych.errors import InvalidRequest

MAX_WHITESPACE = 20
"""White space characters in a row within JSON: enough to indent, but a model can't loop on them."""

HEADER = '%llguidance {"no_forcing": true}'
"""First line of a grammar. Otherwise only the tokens that the tokenizer would choose for a text could come."""

TEXT = "/(?s:.*)/"
"""Any text."""

_IN_REGEX = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_JSON_OPTIONS = {"whitespace_pattern": rf"[ \t\r\n]{{1,{MAX_WHITESPACE}}}", "lenient": False}


def literal(text: str) -> str:
    """Return a terminal for exactly this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def choice(texts: Iterable[str]) -> str:
    """Return an expression for one of the texts."""
    return "(" + " | ".join(map(literal, texts)) + ")"


def regex(pattern: str) -> str:
    """Return a terminal for texts that a regular expression matches as a whole. Raises InvalidRequest for one that
    ends within an escape."""
    if len(pattern) % 2 != len(pattern.rstrip("\\")) % 2:
        raise InvalidRequest("the regex can't be used: it ends with a backslash")
    # what is escaped stays as it is; a line break can't be within a terminal
    parts = re.sub(r"\\\n|\\.|[/\n]", lambda one: _IN_REGEX.get(one[0], one[0]), pattern)
    return f"/{parts}/"


def json_schema(schema: dict[str, Any]) -> str:
    """Return an expression for JSON that a schema allows. Options for llguidance in it have no effect."""
    return f"%json {json.dumps(schema | {'x-guidance': _JSON_OPTIONS})}"


def token(number: int) -> str:
    """Return an expression for one token, such as a special one."""
    return f"<[{number}]>"


def until(name: str, marker: str) -> str:
    """Return a rule for any text up to and including the first ``marker``, which a terminal such as ``literal``
    gives."""
    return f"{name}[lazy]: {TEXT} {marker}"
