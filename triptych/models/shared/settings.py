"""Reads settings from a checkpoint's configuration files, with errors that name file and key."""

from collections.abc import Mapping
from typing import Any, TypeVar

from triptych.errors import CheckpointError

T = TypeVar("T")

_WANTED = {int: "a positive integer", float: "a number"}


def setting(
    config: Mapping[str, Any], path: str, kind: type[T], default: T | None = None, file: str = "config.json"
) -> T:
    """The value at a dotted ``path``: of type ``kind``, and positive if that is int. One that is absent or null becomes
    ``default``, where there is one. Raises CheckpointError, naming ``file`` and path, for any other value."""
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


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model: in a section of their own, or, in older files, at the top level."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def _is_no_count(value: int) -> bool:
    return isinstance(value, bool) or value < 1
