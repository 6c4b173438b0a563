"""Reads settings from a checkpoint's configuration files, with errors that name file and key."""

from collections.abc import Mapping
from typing import Any, TypeVar

from triptych.errors import CheckpointError

T = TypeVar("T")

MAX_COUNT = 2**31 - 1
"""Kernels count in 32 bits in places. No model comes near it."""

LARGEST = 1e30
"""Models compute in float32: a factor beyond it, or below its inverse, would become infinity or zero."""

_WANTED = {int: "a positive integer below 2^31", float: "a number"}


def setting(
    config: Mapping[str, Any], path: str, kind: type[T], default: T | None = None, file: str = "config.json"
) -> T:
    """Return the value at a dotted ``path``, which must be of type ``kind``: from 1 to ``MAX_COUNT`` if that is int,
    from minus ``LARGEST`` to ``LARGEST`` if it is float.

    An absent or null value becomes ``default``, if there is one. Raises CheckpointError, naming ``file`` and path, for
    anything else.
    """
    value = _of_kind(config, path, kind, default, file)
    if isinstance(value, float) and not abs(value) <= LARGEST:  # JSON as Python reads it has NaN and infinity
        raise _wrong(file, path, kind, value)
    return value


def _of_kind(config: Mapping[str, Any], path: str, kind: type[T], default: T | None, file: str = "config.json") -> T:
    """Return what ``setting`` does, or any float."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None and default is not None:
        return default
    if kind is float and type(value) is int and abs(value) <= LARGEST:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, int) and kind is not bool and _is_no_count(value)):
        raise _wrong(file, path, kind, value)
    return value


def _wrong(file: str, path: str, kind: type, value: object) -> CheckpointError:
    return CheckpointError(f"{file}: {path} must be {_WANTED.get(kind, f'a {kind.__name__}')}, not {value!r}")


def positive_number(settings: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive number, at most ``LARGEST`` and at least its inverse; absent and null mean ``default``. Raises
    CheckpointError for anything else."""
    value = _of_kind(settings, name, float, default)
    if not 1 / LARGEST <= value <= LARGEST:
        raise CheckpointError(f"config.json: {name} must be a positive number from 1e-30 to 1e30, not {value}")
    return value


def axial_theta(vision: Mapping[str, Any]) -> float:
    """Return the base of a tower's rotary embedding, of which only transformers' ``axial`` kind is served. Raises
    CheckpointError for another one, and as ``positive_number`` does."""
    rope = vision.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise CheckpointError(f"config.json: vision_config.rope_parameters {rope!r} is not served")
    return positive_number(rope, "rope_theta", positive_number(vision, "rope_theta", 10_000.0))


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's settings: the ``text_config`` section or, in older files, the top level."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def _is_no_count(value: int) -> bool:
    return isinstance(value, bool) or not 1 <= value <= MAX_COUNT
