"""Finds the name that was probably meant by one that doesn't exist."""

from collections.abc import Callable, Mapping
from typing import Any

from triptych.cli.other_projects import INSTEAD

Fits = Callable[[Any], bool]
"""Whether a name can have a value; None is no value."""

MAX_DISTANCE = 2
LETTERS_PER_EDIT = 3
"""Letters of a name for each edit: most short names are within two edits of another one."""


def instead(name: str, value: Any, known: Mapping[str, Fits], spelled: Callable[[str], str]) -> str:
    """Return the end of an error message: what to use instead of ``name``, as ``spelled`` there; empty if that isn't
    known. A name is suggested only if it can have ``value``."""
    if sentence := INSTEAD.get(name):
        return f": {sentence}"
    most = min(MAX_DISTANCE, len(name) // LETTERS_PER_EDIT)
    close = [(distance, other) for other in known if (distance := _distance(name, other)) <= most]
    fitting = [other for _, other in sorted(close) if known[other](value)]
    return f"; did you mean {spelled(fitting[0])}?" if fitting else ""


def _distance(one: str, other: str) -> int:
    """Return the number of letters to insert, delete or replace that make one of the other."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, start=1):
        before, row[0] = row[0], number
        for index, another in enumerate(other, start=1):
            before, row[index] = row[index], min(row[index] + 1, row[index - 1] + 1, before + (letter != another))
    return row[-1]
