"""What of a JSON schema an answer can be made to keep to. xgrammar ignores what it has no grammar for, so a schema that
needs more than this is refused, by keyword and place.

xgrammar reads a schema's first keyword of ``_GROUPS``, and none beside it; without one, those of the schema's type.
Tests compare this table with what xgrammar's grammars allow.
"""

import json
from collections.abc import Iterator
from typing import Any

from triptych.errors import InvalidRequest

_GROUPS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OF_TYPE = {
    "string": frozenset({"format", "pattern", "minLength", "maxLength"}),
    "number": frozenset({"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"prefixItems", "items", "unevaluatedItems", "minItems", "maxItems"}),
    "object": frozenset(
        {
            "properties",
            "required",
            "patternProperties",
            "propertyNames",
            "additionalProperties",
            "unevaluatedProperties",
            "minProperties",
            "maxProperties",
        }
    ),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_OF_TYPE["integer"] = _OF_TYPE["number"]
_READ = frozenset({"type", *_GROUPS}).union(*_OF_TYPE.values())
_NEVER = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "additionalItems",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "$dynamicRef",
        "$recursiveRef",
    }
)
"""Whatever else a schema has is an annotation."""
FORMATS = frozenset(
    # those of JSON pointers come out with quotes in them
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
MAX_MULTIPLE = 1024
MAX_MULTIPLE_RANGE = 10_000
"""Of ``multipleOf``, and of what lies between the bounds beside it."""
MAX_REFERENCES = 32
"""That lead from one to the next."""

Schema = dict[str, Any]


def check_schema(schema: Any, param: str) -> None:
    """Raises InvalidRequest, which names the keyword and its place, for a schema that an answer can't be kept to.
    What is no schema at all is found when it is compiled."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    seen: set[int] = set()
    while pending:
        place, one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        for keyword, why in _unkept(one, schema):
            detail = f" ({why})" if why else ""
            raise InvalidRequest(
                f"the keyword {keyword!r} at {place} of the JSON schema can't be kept to{detail}", param
            )
        pending += _parts(one, place, schema)


def check_regex(pattern: str, param: str) -> None:
    """Raises InvalidRequest for one with parts that xgrammar ignores."""
    if why := _unkept_in_pattern(pattern):
        raise InvalidRequest(f"the regex can't be kept to: {why}", param)


# ── where schemas have schemas ───────────────────────────────────────────────────────────────────────────────────


def _parts(schema: Schema, place: str, root: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that this one is made of, and their places. Definitions only count where they are used."""
    for keyword in ("properties", "patternProperties"):
        if isinstance(named := schema.get(keyword), dict):
            yield from ((f"{place}/{keyword}/{_escaped(name)}", one) for name, one in named.items())
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(listed := schema.get(keyword), list):
            yield from ((f"{place}/{keyword}/{number}", one) for number, one in enumerate(listed))
    for keyword in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"):
        yield f"{place}/{keyword}", schema.get(keyword)
    if isinstance(names := schema.get("propertyNames"), dict):
        # they are strings without saying so
        yield f"{place}/propertyNames", names if set(names) & {"type", *_GROUPS} else {"type": "string"} | names
    if isinstance(reference := schema.get("$ref"), str):
        yield reference, _target(reference, root)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")[:64]


def _target(reference: str, root: Any) -> Any:
    """What a reference within the schema refers to; None for others, and where there is nothing."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        if part:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def _resolved(schema: Any, root: Any) -> Any:
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _target(schema["$ref"], root)
    return schema


# ── one schema ───────────────────────────────────────────────────────────────────────────────────────────────────

Unkept = Iterator[tuple[str, str]]
"""Keywords that aren't kept to, and what more there is to say about why."""


def _unkept(schema: Schema, root: Any) -> Unkept:
    for keyword in schema:
        if keyword in _NEVER and not (keyword == "uniqueItems" and schema[keyword] is False):
            yield keyword, ""
    if isinstance(schema.get("$id"), str) and schema is not root:
        yield "$id", "references are to the whole schema"
    group = next((keyword for keyword in _GROUPS if keyword in schema), None)
    if group is not None:
        yield from _unkept_beside(group, schema, root)
        yield from _unkept_group(group, schema, root)
        return
    types = _types(schema)
    if not types:
        yield from ((keyword, "without a type") for keyword in schema if keyword in _READ and keyword != "type")
    if "string" in types:
        yield from _unkept_string(schema)
    if "object" in types:
        yield from _unkept_object(schema)
    if "number" in types and "multipleOf" in schema:
        yield "multipleOf", "of a number; only of an integer"
    elif "integer" in types:
        yield from _unkept_multiple(schema)


def _types(schema: Schema) -> frozenset[str]:
    """As xgrammar takes them from a schema without a group; none for any value."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list) and declared:
        return frozenset(one for one in declared if isinstance(one, str))
    if {"properties", "additionalProperties", "unevaluatedProperties"} & set(schema):
        return frozenset({"object"})
    if {"items", "prefixItems", "unevaluatedItems"} & set(schema):
        return frozenset({"array"})
    return frozenset()


_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def _type_of(value: Any) -> str:
    return "integer" if isinstance(value, float) and value.is_integer() else _TYPES[type(value)]


def _within(types: frozenset[str], declared: frozenset[str]) -> bool:
    return all(one in declared or (one == "integer" and "number" in declared) for one in types)


def _unkept_beside(group: str, schema: Schema, root: Any) -> Unkept:
    """What isn't read because a group is. It does no harm if the values are all as it says."""
    types = _types_of_group(group, schema, root)
    for keyword in schema:
        if keyword == group or keyword not in _READ:
            continue
        if keyword == "type":
            kept = types is not None and _within(types, _types(schema))
        elif keyword in _GROUPS:
            kept = False
        else:
            kept = types is not None and not any(keyword in _OF_TYPE.get(one, ()) for one in types)
        if not kept:
            yield keyword, f"beside {group!r}"


def _types_of_group(group: str, schema: Schema, root: Any) -> frozenset[str] | None:
    """Of what a group allows; None if they can't be told."""
    found: set[str] = set()
    for arm in _arms(group, schema):
        one = _resolved(arm, root)
        if not isinstance(one, dict):
            return None
        inner = next((keyword for keyword in _GROUPS if keyword in one), None)
        if inner not in (None, "const", "enum"):
            return None
        types = _types(one) if inner is None else frozenset(map(_type_of, _values(one) or ()))
        if not types:
            return None
        found |= types
    return frozenset(found)


def _arms(group: str, schema: Schema) -> list[Any]:
    if group in ("$ref", "const", "enum"):
        return [{group: schema[group]}]
    return schema[group] if isinstance(schema[group], list) else []


def _values(schema: Schema) -> list[Any] | None:
    """The values that a schema allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _unkept_group(group: str, schema: Schema, root: Any) -> Unkept:
    value = schema[group]
    if group == "$ref" and isinstance(value, str) and _target(value, root) is None:
        yield group, "only references within the schema, such as '#/$defs/name', are followed"
    elif group == "allOf" and isinstance(value, list) and len(value) != 1:
        yield group, "of several schemas"
    elif group == "oneOf" and isinstance(value, list) and not _are_disjoint(value, root):
        yield group, "its schemas may overlap, by type, values and what tells objects apart; 'anyOf' can be kept to"


def _unkept_string(schema: Schema) -> Unkept:
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    if schema.get("minLength") == 0:
        lengths.remove("minLength")
    if isinstance(name := schema.get("format"), str):
        if name not in FORMATS:
            yield "format", f"one of {', '.join(sorted(FORMATS))} can be"
        yield from ((keyword, "beside 'format'") for keyword in ("pattern", *lengths) if keyword in schema)
    if isinstance(pattern := schema.get("pattern"), str):
        yield from ((keyword, "beside 'pattern'") for keyword in lengths)
        if why := _unkept_in_pattern(pattern):
            yield "pattern", why


def _unkept_multiple(schema: Schema) -> Unkept:
    if "multipleOf" not in schema:
        return
    multiple = _whole(schema["multipleOf"])
    lower, upper = (
        [_whole(schema[keyword]) for keyword in keywords if keyword in schema]
        for keywords in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if multiple is None or multiple > MAX_MULTIPLE:
        yield "multipleOf", f"only integers up to {MAX_MULTIPLE} can be"
    elif lower or upper:
        least, most = ([bound for bound in bounds if bound is not None] for bounds in (lower, upper))
        if not least or not most or min(most) - max(least) > MAX_MULTIPLE_RANGE:
            yield "multipleOf", f"beside a bound; only beside two that are at most {MAX_MULTIPLE_RANGE} apart"


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def _unkept_object(schema: Schema) -> Unkept:
    named, patterns = _dict_of(schema, "properties"), _dict_of(schema, "patternProperties")
    if isinstance(required := schema.get("required"), list):
        missing = [name for name in required if isinstance(name, str) and name not in named]
        yield from (("required", f"{name[:64]!r} is not in 'properties'") for name in missing[:1])
    if patterns and (named or len(patterns) > 1):
        yield "patternProperties", "beside 'properties'" if named else "of several patterns"
    for pattern in patterns:
        if why := _unkept_in_pattern(pattern):
            yield "patternProperties", why
    if "propertyNames" in schema and (named or patterns):
        yield "propertyNames", "beside 'properties' and 'patternProperties'"
    if (patterns or "propertyNames" in schema) and "unevaluatedProperties" in schema:
        yield "unevaluatedProperties", "beside 'patternProperties' and 'propertyNames'"
    further = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
    if schema.get("minProperties") and (further is not False or patterns or "propertyNames" in schema):
        yield "minProperties", "where properties are free: one that comes twice would count twice"


def _dict_of(schema: Schema, keyword: str) -> Schema:
    found = schema.get(keyword)
    return found if isinstance(found, dict) else {}


# ── alternatives ─────────────────────────────────────────────────────────────────────────────────────────────────


def _are_disjoint(arms: list[Any], root: Any) -> bool:
    """Whether at most one of the schemas can be true of a value, by what is easily told: their types, the values that
    they list, or the values of a property that all objects among them must have."""
    listed: list[list[Any]] = []
    typed: list[frozenset[str]] = []
    objects: list[Schema] = []
    for arm in arms:
        one = _resolved(arm, root)
        if not isinstance(one, dict):
            return False
        if (values := _values(one)) is not None and "$ref" not in one:
            listed.append(values)
        elif any(keyword in one for keyword in _GROUPS) or not (types := _types(one)):
            return False
        elif types == {"object"}:
            objects.append(one)
        else:
            typed.append(types)
    if len(objects) > 1 and not _are_told_apart(objects, root):
        return False
    kinds = [*typed, *([frozenset({"object"})] if objects else [])]
    if listed:
        kinds.append(frozenset(_type_of(value) for values in listed for value in values))
    wide = [{"number" if one == "integer" else one for one in types} for types in kinds]
    return _share_nothing(wide) and _share_nothing([{_canonical(value) for value in values} for values in listed])


def _are_told_apart(objects: list[Schema], root: Any) -> bool:
    """By a property that all of them require, with other values in each."""
    first = objects[0].get("properties")
    for name in first if isinstance(first, dict) else ():
        values = [_values_of_property(one, name, root) for one in objects]
        if all(values) and _share_nothing([{_canonical(value) for value in each or ()} for each in values]):
            return True
    return False


def _values_of_property(schema: Schema, name: str, root: Any) -> list[Any] | None:
    named, required = schema.get("properties"), schema.get("required")
    if not isinstance(named, dict) or not isinstance(required, list) or name not in required:
        return None
    found = _resolved(named.get(name), root)
    return _values(found) if isinstance(found, dict) and "$ref" not in found else None


def _share_nothing(sets: list[set[str]]) -> bool:
    return sum(map(len, sets)) == len(set[str]().union(*sets))


def _canonical(value: Any) -> str:
    """Equal for values that JSON schemas take as equal: 1 and 1.0 are, and objects in whatever order."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


# ── patterns ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _unkept_in_pattern(pattern: str) -> str:
    """Why a regular expression can't be kept to, as far as its compiler doesn't say so itself; empty if it can.
    Patterns are matched whole: that narrows those without anchors, and widens one with an anchor in between."""
    in_class, place = False, 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 2
            continue
        if in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), place):
            return "it looks ahead or behind"
        elif letter == "^" and place and pattern[place - 1] not in "(|:":
            return "'^' in its midst"
        elif letter == "$" and pattern[place + 1 : place + 2] not in ("", ")", "|"):
            return "'$' in its midst"
        place += 1
    return ""
