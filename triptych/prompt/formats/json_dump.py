"""Values as JSON."""

import json
import re
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")


def dumps(value: Any) -> str:
    """Return a value as JSON, in characters of its own but for halves of surrogate pairs, which UTF-8 lacks."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if SURROGATE.search(text) else text


def escaped(text: str) -> str:
    """Return a piece of text as it stands within a JSON string."""
    return dumps(text)[1:-1]
