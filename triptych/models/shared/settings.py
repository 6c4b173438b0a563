"""Reads settings from a checkpoint's configuration files, with errors that name file and key."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from triptych.errors import CheckpointError

T = TypeVar("T")

_WANTED = {int: "a positive integer", float: "a number"}


def setting(
    config: Mapping[str, Any], path: str, kind: type[T], default: T | None = None, file: str = "config.json"
) -> T:
    """Return the value at a dotted ``path``, which must be of type ``kind``, and positive if that is int.

    An absent or null value becomes ``default``, if there is one. Raises CheckpointError, naming ``file`` and path, for
    anything else.
    """
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None and default is not None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, int) and kind is not bool and _is_no_count(value)):
        raise CheckpointError(f"{file}: {path} must be {_WANTED.get(kind, f'a {kind.__name__}')}, not {value!r}")
    return value


def positive_number(settings: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive, finite number; absent and null mean ``default``. Raises CheckpointError for anything else."""
    value = setting(settings, name, float, default=default)
    if not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {name} must be a positive number, not {value}")
    return value


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's settings: the ``text_config`` section or, in older files, the top level."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def _is_no_count(value: int) -> bool:
    return isinstance(value, bool) or value < 1
