"""What becomes of fields that a request's models don't have: hints are ignored, demands are served or refused by name.

``field_table.py`` has the rules. Every model applies those of its place before it is validated."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

UNKNOWN, UNSUPPORTED, CONFLICT = "unknown_field", "unsupported_field", "conflicting_field"
"""Types of the errors that rules raise. Their context has the field's name as ``field``."""
OWN_PREFIXES = ("x-", "x_")
"""Names that begin so are clients' own."""
ID_SUFFIXES = ("_id", "metadata")
"""Names that end so say what a request belongs to."""
EMPTY: tuple[Any, ...] = (False, "", [], {})
"""Values that demand nothing of a feature, besides null."""
Updates = Mapping[str, Any]
"""Values by the path of their field."""


@dataclass(frozen=True)
class Hint:
    """The field can't change the answer: it is ignored."""

    def apply(self, request: dict[str, Any], name: str, value: Any) -> None:
        pass


@dataclass(frozen=True)
class Off:
    """A feature that isn't there, or can't be turned off: only values that demand nothing are accepted."""

    accepted: tuple[Any, ...] = ()
    """Besides null and, unless it is always on, ``EMPTY``."""
    use: str = ""
    """What to use in its place."""

    @property
    def neutral(self) -> tuple[Any, ...]:
        return self.accepted if self.always_on else (*EMPTY, *self.accepted)

    @property
    def always_on(self) -> bool:
        return any(one is True for one in self.accepted)

    def apply(self, request: dict[str, Any], name: str, value: Any) -> None:
        if not _is_one_of(value, self.neutral):
            raise _refused(UNSUPPORTED, name, "is not supported" + (f": use {self.use}" if self.use else ""))


@dataclass(frozen=True)
class Alias:
    """Another name of a field."""

    target: str
    """The field's path."""
    unset: tuple[Any, ...] = ()
    """Values that mean the same as no value."""

    def apply(self, request: dict[str, Any], name: str, value: Any) -> None:
        if not any(value == one and type(value) is type(one) for one in self.unset):
            _set(request, self.target, value, name)


@dataclass(frozen=True)
class Meaning:
    """A field each of whose values means something for other fields."""

    values: Mapping[str | bool, Updates]

    def apply(self, request: dict[str, Any], name: str, value: Any) -> None:
        known = isinstance(value, str | bool) and value in self.values
        if not known:
            raise _refused(UNSUPPORTED, name, f"takes {', '.join(map(repr, self.values))}")
        for path, meant in self.values[value].items():
            _set(request, path, meant, name)


@dataclass(frozen=True)
class Members:
    """An object whose members are fields of the request under other names."""

    rules: Mapping[str, "Rule"]

    def apply(self, request: dict[str, Any], name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _refused(UNSUPPORTED, name, "takes an object")
        for member, one in value.items():
            path = f"{name}.{member}"
            if one is None:
                continue
            if (rule := self.rules.get(member)) is None:
                raise _refused(UNKNOWN, path, "unknown or unsupported field")
            rule.apply(request, path, one)


Rule = Hint | Off | Alias | Meaning | Members


@dataclass(frozen=True)
class Rules:
    """The rules of one place, such as messages."""

    by_name: Mapping[str, Rule] = field(default_factory=dict)
    ignores_unknown: bool = False
    """Whether fields without a rule are ignored, because the place describes something, and doesn't ask for it."""

    def __or__(self, more: "Rules") -> "Rules":
        return Rules({**self.by_name, **more.by_name}, self.ignores_unknown or more.ignores_unknown)

    def apply(self, value: dict[str, Any], known: Collection[str], not_null: Collection[str]) -> dict[str, Any]:
        """Return the object without the fields that have rules, and without nulls of ``not_null``.

        Raises PydanticCustomError for a field that is refused."""
        extra = [name for name in value if name not in known]
        if not extra and not (not_null and None in value.values()):
            return value
        made = {name: one for name, one in value.items() if name in known and not (one is None and name in not_null)}
        for name in extra:
            if (one := value[name]) is None:
                continue
            if (rule := self.by_name.get(name)) is not None:
                rule.apply(made, name, one)
            elif not self.ignores_unknown and not _demands_nothing(name, one):
                made[name] = one  # the model refuses it, after it has found errors of its own fields
        return made


def _is_one_of(value: Any, values: Collection[Any]) -> bool:
    """Compare as JSON does: 0 isn't false."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _demands_nothing(name: str, value: Any) -> bool:
    """Whether a field that no rule names can't change the answer: by its name, or because it names what is off."""
    return name.startswith(OWN_PREFIXES) or name.endswith(ID_SUFFIXES) or _is_one_of(value, EMPTY)


def describe(rule: Rule) -> str:
    """Return what a rule does, in a sentence of Markdown."""
    match rule:
        case Hint():
            return "Accepted without effect."
        case Off(accepted, use):
            empty = [] if rule.always_on else ["empty"]
            values = " or ".join(["null", *empty, *(f"`{json.dumps(one)}`" for one in accepted)])
            return f"Only {values}." + (f" Use {use}." if use else "")
        case Alias(target):
            return f"Another name of `{target}`."
        case Meaning(values):
            return " ".join(f"`{json.dumps(value)}`: {_described(updates)}." for value, updates in values.items())
        case Members(rules):
            return "An object. " + " ".join(f"`{name}`: {describe(one)}" for name, one in rules.items())


def _described(updates: Updates) -> str:
    return " and ".join(f"`{path}` is {json.dumps(value)}" for path, value in updates.items()) or "no effect"


def _set(request: dict[str, Any], path: str, value: Any, name: str) -> None:
    """Set a field for the field ``name``, and raise PydanticCustomError if the request sets it otherwise itself."""
    *parents, last = path.split(".")
    for parent in parents:
        inner = request.get(parent)
        if inner is not None and not isinstance(inner, dict):
            raise _refused(CONFLICT, name, f"excludes {parent}")
        request[parent] = request = dict(inner or {})
    if request.get(last) not in (None, value):
        raise _refused(CONFLICT, name, f"excludes {path}")
    request[last] = value


def _refused(kind: Any, name: str, what: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{what}", {"field": name, "what": what})
