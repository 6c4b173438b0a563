"""Values that are written as plain text, made JSON by the types that a tool's schema allows."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from triptych.prompt.formats.json_dump import dumps, escaped
from triptych.prompt.formats.reader import Reader, Steps

_MAX_SCHEMAS = 256
"""Limit on schemas that are searched for the types of one value."""
TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_INTEGER = re.compile(r"[+-]?\d{1,4000}")


def types_of(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the types that a schema allows; none if it doesn't say, or has too many schemas that say it."""
    found, seen, pending = set[str](), set[int](), [schema]
    while pending:
        one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        if len(seen) > _MAX_SCHEMAS:
            return frozenset()
        if isinstance(reference := one.get("$ref"), str):
            pending.append(resolve(reference, schema if root is None else root))
            continue
        found.update(types_named(one) or (TYPE_NAMES.get(type(value), "object") for value in listed_values(one)))
        for key in ("anyOf", "oneOf", "allOf"):
            pending += _listed(one, key)
    return frozenset(found)


def types_named(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema has in ``type``."""
    named = schema.get("type")
    return [named] if isinstance(named, str) else [one for one in _listed(schema, "type") if isinstance(one, str)]


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists in ``const`` or ``enum``."""
    return [schema["const"]] if "const" in schema else _listed(schema, "enum")


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def resolve(reference: str, root: Any) -> Any:
    """Return the schema that a reference names within ``root``; None if there is none."""
    found = root
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def parameter_types(parameters: Any, name: str) -> frozenset[str]:
    """Return the types that a tool's parameter may have; none if its schema doesn't say."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(name) if isinstance(properties, dict) else None
    return types_of(schema, parameters) if isinstance(schema, dict) else frozenset()


def to_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: as the first of null, integer, number, boolean, object, array and string that is allowed
    and that the text is; a string if it is none of them."""
    types = types or frozenset(TYPE_NAMES.values())
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return str(int(bare))
    if "number" in types and (number := _finite(bare)) is not None:
        return dumps(number)
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types & {"object", "array"}:
        try:
            value = json.loads(bare, parse_constant=_refuse)
            if TYPE_NAMES[type(value)] in types & {"object", "array"}:
                return dumps(value)
        except (ValueError, RecursionError):
            pass
    return dumps(text)


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def read_parameter(
    reader: Reader, emit: Callable[[str], object], types: frozenset[str], ends: tuple[str, ...], *, lines: bool = False
) -> Steps[str]:
    """Pass on a parameter's value as JSON, up to one of ``ends``, which is returned; empty if the answer ends first.

    Strings are passed on as they arrive. With ``lines`` a line break at each end belongs to the format."""
    if types != {"string"}:
        text, end = yield from reader.until(*ends)
        if lines:
            text = text.removeprefix("\n").removesuffix("\n")
        if end:
            emit(to_json(text, types))
        return end
    if lines:
        yield from reader.literal("\n")
    emit('"')
    held = ""

    def piece(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if lines and text.endswith("\n") else ""
        emit(escaped(text.removesuffix(held)))

    end = yield from reader.stream(ends, piece)
    if end:
        emit('"')
    return end
