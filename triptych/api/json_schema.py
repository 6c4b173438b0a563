"""What of a JSON schema an answer can be made to keep to. xgrammar ignores what it has no grammar for, so a schema that
needs more than this is refused, by keyword and place.

xgrammar reads a schema's first keyword of ``_GROUPS``, and none beside it; without one, those of the schema's type.
Tests compare this table with what xgrammar's grammars allow.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
MAY_BE_EMPTY = frozenset({"uri-reference", "uri-template"})
"""Of them, those that the empty string has."""
ANNOTATING_FORMATS = frozenset(
    {"password", "path", "file-path", "directory-path", "binary", "int32", "int64", "float", "double"}
)
"""Formats that say nothing about which strings are right."""
MAX_MULTIPLE = 1024
MAX_MULTIPLE_RANGE = 10_000
"""Of ``multipleOf``, and of what lies between the bounds beside it."""
MAX_REFERENCES = 32
"""That lead from one to the next."""

MAX_STEPS = 10_000
"""Of a check: a schema of one, a value that is compared, a few names or letters. It runs where everybody waits."""

Schema = dict[str, Any]
Place = tuple["Place | None", str]
"""The place around it, and what leads from there. Joined only for an error: each deep one would be a long text."""


@dataclass
class Steps:
    """What the checks of a request may still take."""

    left: int = MAX_STEPS

    def take(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise _TooLargeError


class _TooLargeError(Exception):
    pass


@dataclass
class _Root:
    """The whole schema, within which references are."""

    schema: Any
    steps: Steps


def check_schema(schema: Any, param: str, steps: Steps | None = None) -> None:
    """Raises InvalidRequest, which names the keyword and its place, for a schema that an answer can't be kept to.
    What is no schema at all is found when it is compiled. ``steps`` is for several checks together."""
    try:
        _check(_Root(schema, steps or Steps()), param)
    except _TooLargeError:
        raise InvalidRequest("the JSON schema can't be kept to: it is too large to check", param) from None


def _check(root: _Root, param: str) -> None:
    pending: list[tuple[Place, Any]] = [((None, "#"), root.schema)]
    seen: dict[int, Any] = {}
    """With the schemas themselves: the id of one that is freed comes back for another."""
    while pending:
        place, one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        root.steps.take(1 + len(one) // 8)
        seen[id(one)] = one
        for keyword, why in _unkept(one, root):
            detail = f" ({why})" if why else ""
            raise InvalidRequest(
                f"the keyword {keyword!r} at {_path(place)} of the JSON schema can't be kept to{detail}", param
            )
        pending += _parts(one, place, root)


def _path(place: Place | None) -> str:
    parts = []
    while place is not None:
        place, part = place
        parts.append(part)
    return "/".join(reversed(parts))


def check_regex(pattern: str, param: str) -> None:
    """Raises InvalidRequest for one with parts that xgrammar ignores."""
    try:
        why, _ = _judged_pattern(pattern, Steps())
    except _TooLargeError:
        why = "it is too long to check"
    if why:
        raise InvalidRequest(f"the regex can't be kept to: {why}", param)


# ── where schemas have schemas ───────────────────────────────────────────────────────────────────────────────────


def _parts(schema: Schema, place: Place, root: _Root) -> Iterator[tuple[Place, Any]]:
    """The schemas that this one is made of, and their places. Definitions only count where they are used."""
    for keyword in ("properties", "patternProperties"):
        if isinstance(named := schema.get(keyword), dict):
            yield from (((place, f"{keyword}/{_escaped(name)}"), one) for name, one in named.items())
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(listed := schema.get(keyword), list):
            yield from (((place, f"{keyword}/{number}"), one) for number, one in enumerate(listed))
    for keyword in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"):
        if keyword in schema:
            yield (place, keyword), schema[keyword]
    if isinstance(names := schema.get("propertyNames"), dict):
        # they are strings without saying so
        says_so = any(keyword in names for keyword in ("type", *_GROUPS))
        yield (place, "propertyNames"), names if says_so else {"type": "string"} | names
    if isinstance(reference := schema.get("$ref"), str):
        yield (None, reference), _target(reference, root)


def _escaped(name: str) -> str:
    return name[:64].replace("~", "~0").replace("/", "~1")[:64]


def _target(reference: str, root: _Root) -> Any:
    """What a reference within the schema refers to; None for others, and where there is nothing. xgrammar takes ``~0``
    and ``~1`` as they are, so with them it would find nothing, or something else."""
    if (reference != "#" and not reference.startswith("#/")) or "~" in reference:
        return None
    found = root.schema
    parts = reference[2:].split("/")
    root.steps.take(1 + len(parts) // 8)
    for part in parts:
        if part:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def _resolved(schema: Any, root: _Root) -> Any:
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _target(schema["$ref"], root)
    return schema


# ── one schema ───────────────────────────────────────────────────────────────────────────────────────────────────

Unkept = Iterator[tuple[str, str]]
"""Keywords that aren't kept to, and what more there is to say about why."""


def _unkept(schema: Schema, root: _Root) -> Unkept:
    for keyword in schema:
        if keyword in _NEVER and not (keyword == "uniqueItems" and schema[keyword] is False):
            yield keyword, ""
    if isinstance(schema.get("$id"), str) and schema is not root.schema:
        yield "$id", "references are to the whole schema"
    group = next((keyword for keyword in _GROUPS if keyword in schema), None)
    if group is not None:
        yield from _unkept_beside(group, schema, root)
        yield from _unkept_group(group, schema, root)
        return
    types = _types(schema)
    if not types:
        yield from ((keyword, "without a type") for keyword in schema if _reads(schema, keyword) and keyword != "type")
    if "string" in types:
        yield from _unkept_string(schema, root)
    if "object" in types:
        yield from _unkept_object(schema, root)
    if "number" in types and "multipleOf" in schema:
        yield "multipleOf", "of a number; only of an integer"
    elif "integer" in types:
        yield from _unkept_multiple(schema)


def _reads(schema: Schema, keyword: str) -> bool:
    """Whether the keyword means something for what is allowed."""
    if keyword == "format" and isinstance(name := schema[keyword], str) and name in ANNOTATING_FORMATS:
        return False
    return keyword in _READ


def _types(schema: Schema) -> frozenset[str]:
    """As xgrammar takes them from a schema without a group; none for any value."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list) and declared:
        return frozenset(one for one in declared[:_MOST_TYPES] if isinstance(one, str))
    if any(keyword in schema for keyword in ("properties", "additionalProperties", "unevaluatedProperties")):
        return frozenset({"object"})
    if any(keyword in schema for keyword in ("items", "prefixItems", "unevaluatedItems")):
        return frozenset({"array"})
    return frozenset()


_MOST_TYPES = 8
"""More than there are: a longer list names one twice, and is no schema's."""
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


def _unkept_beside(group: str, schema: Schema, root: _Root) -> Unkept:
    """What isn't read because a group is. It does no harm if the values are all as it says."""
    types = _types_of_group(group, schema, root)
    for keyword in schema:
        if keyword == group or not _reads(schema, keyword):
            continue
        if keyword == "type":
            kept = types is not None and _within(types, _types(schema))
        elif keyword in _GROUPS:
            kept = False
        else:
            kept = types is not None and not any(keyword in _OF_TYPE.get(one, ()) for one in types)
        if not kept:
            yield keyword, f"beside {group!r}"


def _types_of_group(group: str, schema: Schema, root: _Root) -> frozenset[str] | None:
    """Of what a group allows; None if they can't be told."""
    found: set[str] = set()
    for arm in _arms(group, schema):
        one = _resolved(arm, root)
        root.steps.take(1)
        if not isinstance(one, dict):
            return None
        inner = next((keyword for keyword in _GROUPS if keyword in one), None)
        if inner not in (None, "const", "enum"):
            return None
        values = _values(one) or []
        root.steps.take(len(values) // 8)
        types = _types(one) if inner is None else frozenset(map(_type_of, values))
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


def _unkept_group(group: str, schema: Schema, root: _Root) -> Unkept:
    value = schema[group]
    if group == "$ref" and isinstance(value, str) and "~" in value:
        yield group, "a name with '~' or '/' can't be referred to"
    elif group == "$ref" and isinstance(value, str) and _target(value, root) is None:
        yield group, "only references within the schema, such as '#/$defs/name', are followed"
    elif group == "allOf" and isinstance(value, list) and len(value) != 1:
        yield group, "of several schemas"
    elif group == "oneOf" and isinstance(value, list) and not _are_disjoint(value, root):
        yield group, "its schemas may overlap, by type, values and what tells objects apart; 'anyOf' can be kept to"


def _unkept_string(schema: Schema, root: _Root) -> Unkept:
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    least = schema.get("minLength")
    if least == 0:
        lengths.remove("minLength")
    name, pattern = schema.get("format"), schema.get("pattern")
    if isinstance(name, str) and name not in ANNOTATING_FORMATS:
        if name not in FORMATS:
            yield "format", f"one of {', '.join(sorted(FORMATS))} can be"
        if "pattern" in schema:
            yield "pattern", "beside 'format', which alone would be kept to; leave one of them out"
        implied = least == 1 and name not in MAY_BE_EMPTY
        yield from ((one, "beside 'format'") for one in lengths if one != "minLength" or not implied)
    if isinstance(pattern, str):
        why, may_be_empty = _judged_pattern(pattern, root.steps)
        yield from ((one, "beside 'pattern'") for one in lengths if one != "minLength" or least != 1 or may_be_empty)
        if why:
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


def _unkept_object(schema: Schema, root: _Root) -> Unkept:
    named, patterns = _dict_of(schema, "properties"), _dict_of(schema, "patternProperties")
    if isinstance(required := schema.get("required"), list):
        missing = [name for name in required if isinstance(name, str) and name not in named]
        yield from (("required", f"{name[:64]!r} is not in 'properties'") for name in missing[:1])
    if patterns and (named or len(patterns) > 1):
        yield "patternProperties", "beside 'properties'" if named else "of several patterns"
    for pattern in patterns:
        if why := _judged_pattern(pattern, root.steps)[0]:
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


def _are_disjoint(arms: list[Any], root: _Root) -> bool:
    """Whether at most one of the schemas can be true of a value, by what is easily told: their types, the values that
    they list, or the values of a property that all objects among them must have."""
    ones = [_resolved(arm, root) for arm in arms]
    root.steps.take(len(ones))
    if len({id(one) for one in ones}) < len(ones):
        return False
    listed: list[list[Any]] = []
    typed: list[frozenset[str]] = []
    objects: list[Schema] = []
    for one in ones:
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
        root.steps.take(sum(map(len, listed)) // 8)
        kinds.append(frozenset(_type_of(value) for values in listed for value in values))
    wide = [{"number" if one == "integer" else one for one in types} for types in kinds]
    return _share_nothing(wide) and _share_nothing([_canonical(values, root) for values in listed])


def _are_told_apart(objects: list[Schema], root: _Root) -> bool:
    """By a property that all of them require, with other values in each."""
    candidates: dict[str, list[list[Any]]] | None = None
    for one in objects:
        named, required = one.get("properties"), one.get("required")
        if not isinstance(named, dict) or not isinstance(required, list):
            return False
        root.steps.take(1 + len(required) // 8)
        needed = {name for name in required if isinstance(name, str)}
        still: dict[str, list[list[Any]]] = {}
        for name in needed if candidates is None else candidates:
            root.steps.take(1)
            if name in needed and (values := _values_of(named.get(name), root)):
                still[name] = candidates[name] if candidates is not None else []
                still[name].append(values)
        if not still:
            return False
        candidates = still
    return any(_share_nothing([_canonical(each, root) for each in values]) for values in (candidates or {}).values())


def _values_of(schema: Any, root: _Root) -> list[Any] | None:
    found = _resolved(schema, root)
    return _values(found) if isinstance(found, dict) and "$ref" not in found else None


def _share_nothing(sets: list[set[str]]) -> bool:
    return sum(map(len, sets)) == len(set[str]().union(*sets))


def _canonical(values: list[Any], root: _Root) -> set[str]:
    """Texts that are equal for values that JSON schemas take as equal: 1 and 1.0 are, and objects in whatever order."""
    found = set()
    for value in values:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        found.add(text := json.dumps(whole, sort_keys=True))
        root.steps.take(1 + len(text) // 64)
    return found


# ── patterns ─────────────────────────────────────────────────────────────────────────────────────────────────────


_TOKEN = re.compile(
    r"""
    (?P<escape>\\(?:u\{[0-9a-fA-F]++\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|c[a-zA-Z]|.|$))
    | (?P<class>\[(?:\\.|[^\]\\])*+\]?)
    | (?P<open>\((?:\?(?::|<?[=!]|<\w*+>?))?)
    | (?P<close>\))
    | (?P<bar>\|)
    | (?P<times>(?:[*+?]|\{\d*+,?+\d*+\})\??)
    | (?P<begin>\^)
    | (?P<end>\$)
    | (?P<letters>[^\\\[()|*+?{^$]++|.)
    """,
    re.DOTALL | re.VERBOSE,
)
"""What patterns are made of. No part looks at a letter more than a few times, however the pattern is made."""
_KNOWN_ESCAPE = re.compile(r"\\(?:u.+|x..|c[a-zA-Z]|[dDwWsSnrtfv0]|[^a-zA-Z0-9])", re.DOTALL)
_CLASS_ESCAPE = re.compile(r"\\(?:u\{[0-9a-fA-F]++\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|c[a-zA-Z]|.)", re.DOTALL)


@dataclass(slots=True)
class _Group:
    """A group of a pattern as it is read, or the whole."""

    begins: bool
    """Nothing can come before it."""
    at_beginning: bool
    """Of the alternative that is read, nothing has come yet, nor before the group."""
    has_begin: bool = False
    has_end: bool = False
    ended: bool = False
    """The alternative had its ``$``."""
    holds: bool = False
    """The alternative can't be empty."""
    may_be_empty: bool = False


class _UnkeptError(Exception):
    """Says why."""


def _judged_pattern(pattern: str, steps: Steps) -> tuple[str, bool]:
    """Why a regular expression can't be kept to, as far as its compiler doesn't say so itself, empty if it can; and
    whether it may match the empty string, True if that isn't known.
    Patterns are matched whole: that narrows those without anchors, and widens one with an anchor in between."""
    groups = [_Group(True, True)]
    try:
        for number, token in enumerate(_TOKEN.finditer(pattern)):
            if not number % 64:
                steps.take(32)
            _read(token.lastgroup or "", token[0], pattern[token.end() : token.end() + 2], groups)
    except _UnkeptError as error:
        return str(error), True
    return "", groups[-1].may_be_empty or not groups[-1].holds or len(groups) > 1


def _read(kind: str, text: str, following: str, groups: list[_Group]) -> None:
    group = groups[-1]
    if group.ended and kind not in ("close", "bar"):
        raise _UnkeptError("'$' in its midst")
    # a count that begins with zero, which is rare, is taken as one that may be zero
    optional = following[:1] in ("*", "?") or following in ("{0", "{,", "{}")
    if kind == "open":
        if text in ("(?=", "(?!", "(?<=", "(?<!"):
            raise _UnkeptError("it looks ahead or behind")
        groups.append(_Group(group.at_beginning, group.at_beginning))
    elif kind in ("close", "bar"):
        group.may_be_empty |= not group.holds
        if kind == "bar":
            group.at_beginning, group.ended, group.holds = group.begins, False, False
        elif len(groups) > 1:
            _close(groups, following[:1], optional)
    elif kind == "begin":
        if not group.at_beginning:
            raise _UnkeptError("'^' in its midst")
        group.has_begin = True
    elif kind == "end":
        group.has_end = group.ended = True
    elif kind != "times":
        if unknown := _unknown_escape(kind, text):
            raise _UnkeptError(f"{unknown!r} is not a known escape")
        group.at_beginning = False
        group.holds |= not optional or (kind == "letters" and len(text) > 1)


def _close(groups: list[_Group], following: str, optional: bool) -> None:
    inner, group = groups.pop(), groups[-1]
    if inner.has_begin and following in ("*", "+", "{"):
        raise _UnkeptError("'^' in its midst")
    group.has_begin |= inner.has_begin
    group.has_end |= inner.has_end
    group.ended |= inner.has_end
    group.at_beginning = False
    group.holds |= not inner.may_be_empty and not optional


def _unknown_escape(kind: str, text: str) -> str | None:
    """The compiler makes a letter of one that it doesn't know."""
    escapes = [text] if kind == "escape" else _CLASS_ESCAPE.findall(text) if kind == "class" and "\\" in text else []
    known = ("\\b",) if kind == "class" else ()
    return next((one for one in escapes if one not in known and not _KNOWN_ESCAPE.fullmatch(one)), None)
