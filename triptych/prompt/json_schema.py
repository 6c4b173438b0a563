"""JSON schemas as llguidance enforces them.

llguidance rejects keywords that it doesn't support. Here those that don't restrict a value are dropped, those that say
what another keyword can say are rewritten, and what it would take too lightly is rejected."""

import re
from collections.abc import Collection, Iterator
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
_OF_OBJECTS = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
        *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    }
)
"""Keywords that restrict an object's properties."""
_OWN = frozenset({"properties", "required", "minProperties", "maxProperties"})
_STEPS = ("/anyOf/", "/oneOf/", "/allOf/")
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
    """Return an equal schema for llguidance, but for objects that name properties: they have no others, unless the
    schema says so or combines several for one object. Raises InvalidRequest, naming ``param`` and the place."""
    combined = _combined(schema)
    whole: Schema = _prepared_one(schema, combined)
    pending = [("#", whole)]
    while pending:
        place, one = pending.pop()
        if reason := _too_light(one):
            raise InvalidRequest(f"the JSON schema can't be enforced at {place}: {reason}", param)
        for keyword in (*_NAMED, *_LISTED, *_SINGLE):
            value = one.get(keyword)
            if isinstance(value, dict) and keyword in _NAMED:
                one[keyword] = {name: _prepared_one(inner, combined) for name, inner in value.items()}
            elif isinstance(value, list) and keyword not in _NAMED:
                one[keyword] = [_prepared_one(inner, combined) for inner in value]
            elif keyword in _SINGLE and keyword in one:
                one[keyword] = _prepared_one(value, combined)
        pending += [(place + step, inner) for step, inner in subschemas(one)]
    return whole


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _combined(schema: Schema) -> set[int]:
    """Return the identities of the schemas that restrict an object together with others."""
    found = set[int]()
    pending = [(schema, False)]
    while pending:
        one, together = pending.pop()
        if together:
            found.add(id(one))
        for keyword in _LISTED[1:]:
            several = together or bool(one.keys() & _OF_OBJECTS - {keyword})
            value = one.get(keyword)
            listed: list[Any] = value if isinstance(value, list) else []
            several = several or (keyword == "allOf" and len(listed) > 1)
            pending += [(inner, several) for inner in listed if isinstance(inner, dict)]
        pending += [(inner, False) for step, inner in subschemas(one) if not step.startswith(_STEPS)]
        if (together or one.keys() & _OF_OBJECTS - {"$ref"}) and (target := _target(one.get("$ref"), schema)):
            pending += [(target, True)] if id(target) not in found else []
    return found


def _target(reference: Any, root: Schema) -> Schema | None:
    """Return the schema that a reference names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in reference.split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _is_closed(schema: Schema) -> bool:
    """Return whether a schema names all properties of an object, as OpenAI's, vLLM's and xgrammar's do."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or schema.keys() & (_OF_OBJECTS - _OWN):
        return False
    required, least = schema.get("required") or [], schema.get("minProperties")
    named = isinstance(required, list) and all(name in properties for name in required if isinstance(name, str))
    return named and (not isinstance(least, int) or least <= len(properties))


def _prepared_one(schema: Any, combined: Collection[int]) -> Any:
    """Return a copy of a schema without what is within it. ``combined`` are the identities of those that restrict an
    object together with others."""
    if not isinstance(schema, dict):
        return schema
    one = dict(schema)
    if id(schema) not in combined and _is_closed(schema):
        one["additionalProperties"] = False
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
    may_repeat = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if isinstance(least, int) and least > max(1, num_required) and may_repeat:
        return "'minProperties' counts a repeated name twice; it can be 1, or the number of required properties"
    return None
