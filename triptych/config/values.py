"""Reads the values of settings."""

import math
from dataclasses import Field
from typing import Any

from triptych.errors import ConfigError


def parse_value(given: Any, item: Field[Any], source: str) -> Any:
    """Return a value of the setting's type. ``given`` is text, or what TOML makes of a line, and ``source`` says where.
    Raises ConfigError."""
    default = item.default
    if parse := item.metadata["parse"]:
        try:
            return parse(str(given))
        except ConfigError as error:
            raise ConfigError(f"{source} {error}") from None
    if isinstance(default, bool):
        return given if isinstance(given, bool) else _boolean(str(given), source)
    if isinstance(default, tuple):
        parts = given if isinstance(given, list) else str(given).split(",")
        return tuple(str(part).strip() for part in parts if str(part).strip())
    try:
        fits = isinstance(given, str | type(default)) or (isinstance(default, float) and isinstance(given, int))
        kind: type[Any] = type(default)
        value = kind(given) if fits and not isinstance(given, bool) else math.nan
    except ValueError:
        value = math.nan
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{source} {given!r} is not {_A[type(default)]}")
    return value


def _boolean(given: str, source: str) -> bool:
    words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if (value := words.get(given.strip().lower())) is None:
        raise ConfigError(f"{source} {given!r} is not one of {', '.join(words)}")
    return value


_A = {int: "a whole number", float: "a number", str: "text"}
