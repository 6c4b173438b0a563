"""JSON schemas as llguidance enforces them.

llguidance rejects keywords that it doesn't support. Here those that don't restrict a value are dropped, those that say
what another keyword can say are rewritten, and what it would take too lightly is rejected."""

import re
from collections.abc import Iterator
from typing import Any

from triptych.errors import InvalidRequest

Schema = dict[str, Any]

ANNOTATING_FORMATS = frozenset(
    {"password", "path", "file-path", "directory-path", "binary", "int32", "int64", "float", "double"}
)
"""Formats that don't restrict the value."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas")


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas within this one, with their JSON pointers relative to it."""
    for keyword in (*_NAMED, *_LISTED, *_SINGLE):
        value = schema.get(keyword)
        if keyword in _NAMED and isinstance(value, dict):
            found = [(f"/{keyword}/{_escaped(name)}", one) for name, one in value.items()]
        elif keyword not in _NAMED and isinstance(value, list):
            found = [(f"/{keyword}/{number}", one) for number, one in enumerate(value)]
        else:
            found = [(f"/{keyword}", value)] if keyword not in _NAMED else []
        yield from ((step, one) for step, one in found if isinstance(one, dict))


def prepared(schema: Schema, param: str | None = None) -> Schema:
    """Return an equal schema for llguidance. Raises InvalidRequest, naming ``param`` and the place."""
    whole: Schema = _prepared_one(schema)
    pending = [("#", whole)]
    while pending:
        place, one = pending.pop()
        if reason := _too_light(one):
            raise InvalidRequest(f"the JSON schema can't be enforced at {place}: {reason}", param)
        for keyword in (*_NAMED, *_LISTED, *_SINGLE):
            value = one.get(keyword)
            if isinstance(value, dict) and keyword in _NAMED:
                one[keyword] = {name: _prepared_one(inner) for name, inner in value.items()}
            elif isinstance(value, list) and keyword not in _NAMED:
                one[keyword] = [_prepared_one(inner) for inner in value]
            elif keyword in _SINGLE and keyword in one:
                one[keyword] = _prepared_one(value)
        pending += [(place + step, inner) for step, inner in subschemas(one)]
    return whole


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _prepared_one(schema: Any) -> Any:
    """Return a copy of a schema without what is within it."""
    if not isinstance(schema, dict):
        return schema
    one = dict(schema)
    if one.get("uniqueItems") is False:
        del one["uniqueItems"]
    if isinstance(one.get("format"), str) and one["format"] in ANNOTATING_FORMATS:
        del one["format"]
    if not any(keyword in one for keyword in _COMBINING):
        for unevaluated, additional in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if unevaluated in one and additional not in one:
                one[additional] = one.pop(unevaluated)
    if "properties" not in one and "patternProperties" not in one:
        pattern = _pattern_of_names(one.get("propertyNames"))
        if pattern is not None:
            del one["propertyNames"]
            one["patternProperties"] = {pattern: one.get("additionalProperties", {})}
            one["additionalProperties"] = False
    return one


def _pattern_of_names(names: Any) -> str | None:
    """Return a regular expression for what a schema of names allows, if it has only a pattern or a list."""
    if not isinstance(names, dict):
        return None
    match {
        key: value
        for key, value in names.items()
        if key not in ("title", "description") and (key, value) != ("type", "string")
    }:
        case {"pattern": str(pattern), **rest} if not rest:
            return pattern
        case {"enum": [*listed], **rest} if not rest and all(isinstance(one, str) for one in listed):
            return f"^({'|'.join(map(re.escape, listed))})$"
        case {"const": str(name), **rest} if not rest:
            return f"^{re.escape(name)}$"
    return None


def _too_light(schema: Schema) -> str | None:
    """Return why llguidance would allow what the schema doesn't."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, num_required) and schema.get("additionalProperties") is not False:
        return "'minProperties' counts a repeated name twice; it can be 1, or the number of required properties"
    return None
