"""What the Python clients share: the questions, and one line printed per check."""

import base64
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

URL = os.environ["COMPAT_URL"]
MODEL = os.environ["COMPAT_MODEL"]
CONTEXT = int(os.environ["COMPAT_CONTEXT"])
"""Tokens."""
CHECKPOINT = os.environ["COMPAT_CHECKPOINT"]
"""The model's folder, for clients that count tokens."""
FOLDER = Path(os.environ["COMPAT_FOLDER"])
IMAGE = Path(os.environ["COMPAT_IMAGE"])
PICTURE = base64.b64encode(IMAGE.read_bytes()).decode()
PICTURE_URL = f"data:image/png;base64,{PICTURE}"
LONG = Path(os.environ["COMPAT_LONG"]).read_text()
WEATHER = "What is the weather in Paris?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
"""Arguments of ``get_weather``."""
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Tells it.", "parameters": CITY}}


class NotApplicable(Exception):
    """The client has no such thing."""


def expect(answer: object, wanted: str) -> None:
    """Raise AssertionError unless an answer has this text."""
    if wanted not in str(answer):
        raise AssertionError(f"answer: {str(answer)[:200]!r}")


def failure(kind: type[E], function: Callable[..., object], *args: Any, **settings: Any) -> E:
    """The error of this kind that a call raises. Raises AssertionError for none, and other errors as they are."""
    try:
        answer = function(*args, **settings)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {str(answer)[:200]!r}")


def lacks(reason: str) -> Callable[[], None]:
    """A check of something that the client hasn't."""

    def check() -> None:
        raise NotApplicable(reason)

    return check


def command(*arguments: object) -> str:
    """Run a command; return its output. Raises AssertionError with the end of that."""
    words = [str(argument) for argument in arguments]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-280:]
    return done.stdout


def run(checks: Mapping[str, Callable[[], object]]) -> None:
    """Run the checks one after another, and print how each ended."""
    for name, check in checks.items():
        try:
            check()
            line = f"{name}: ok"
        except NotApplicable as error:
            line = f"{name}: n/a {error}"
        except Exception as error:  # noqa: BLE001 - whatever a client raises is the check's result
            line = f"{name}: failed {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(line, flush=True)
