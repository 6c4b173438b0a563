"""How a setting is declared, and the one place where values are checked."""

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from triptych.errors import ConfigError

MAX_ABBREVIATION = 3
"""Letters of the longest abbreviation."""


def setting(
    default: Any,
    meaning: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
    hint: str = "",
    path: bool = False,
    parse: Callable[[str], Any] | None = None,
    gpu: Any = None,
    common: bool = False,
    internal: bool = False,
) -> Any:
    """Return a dataclass field with what ``--help``, the documentation and the check of its values need.

    ``meaning`` is its help text. ``ge`` and ``gt`` are its lower bound, ``le`` its upper one; a number needs a lower
    bound. ``choices`` are the values of a text; ``hint`` ends the message when another is given. ``also`` are other
    names that it accepts: other projects', where they mean the same. ``off`` are flags that switch it off. A ``path``
    is made absolute when it is read, since child processes run in another folder. ``parse`` makes a value of a text and
    raises ConfigError without naming the setting. ``gpu`` is its default where instances compute on a GPU, if another;
    commands choose it, since only they know the machine. ``--help`` lists ``common`` settings, and ``--help-all`` all
    but ``internal`` ones, which only code sets: they have no flag, no variable and no place in a file. Raises TypeError
    for a number without a bound.
    """
    if type(default) in (int, float) and ge is None and gt is None:
        raise TypeError(f"a number needs ge or gt: {meaning}")
    names = {"help": meaning, "also": also, "off": off}
    shown = {"common": common, "internal": internal}
    bounds = {"ge": ge, "gt": gt, "le": le, "choices": choices, "hint": hint}
    read = {"path": path, "parse": parse, "gpu": gpu}
    return field(default=default, metadata=names | bounds | shown | read)


@dataclass(frozen=True)
class Settings:
    """Base of every group of settings. Raises ConfigError for a value out of its bounds, naming the flag."""

    def __init_subclass__(cls) -> None:
        for name in inspect.get_annotations(cls):
            declared = cls.__dict__.get(name)
            if not isinstance(declared, Field) or "help" not in declared.metadata:
                raise TypeError(f"{cls.__name__}.{name} is not declared with setting()")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
        self.check_together()

    def check_together(self) -> None:
        """Check settings against each other, and what bounds can't express. Raises ConfigError."""


def public_fields(group: type[Settings]) -> list[Field[Any]]:
    """Return the settings of a group that users can give."""
    return [item for item in fields(group) if not item.metadata["internal"]]


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def spellings(name: str) -> tuple[str, ...]:
    """Return the flags of a name, the usual one first: an abbreviation is usual with one hyphen."""
    return (f"-{name}", flag(name)) if len(name) <= MAX_ABBREVIATION else (flag(name),)


def names_of(item: Field[Any]) -> tuple[str, ...]:
    """Return all names of a setting, its own first."""
    return item.name, *item.metadata["also"]


def check_value(item: Field[Any], value: Any) -> None:
    """Raise ConfigError unless the value is within the setting's bounds."""
    given, bounds = f"{flag(item.name)} {value}", item.metadata
    if bounds["choices"] and value not in bounds["choices"]:
        raise ConfigError(f"{given} is not one of {', '.join(bounds['choices'])}{bounds['hint']}")
    # each comparison is negated, because nan compares false
    if (least := bounds["ge"]) is not None and not value >= least:
        raise ConfigError(f"{given} is too small: at least {least}")
    if (limit := bounds["gt"]) is not None and not value > limit:
        raise ConfigError(f"{given} is too small: more than {limit}")
    if (most := bounds["le"]) is not None and not value <= most:
        raise ConfigError(f"{given} is too large: at most {most}")
