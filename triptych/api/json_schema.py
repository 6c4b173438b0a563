"""Check that a JSON schema or a regular expression can be fully enforced.

xgrammar ignores keywords that it doesn't support, so schemas with such keywords are rejected, by keyword and path. If a
schema has keywords of ``_GROUPS``, xgrammar reads only the first of them. Otherwise it reads the keywords of the
schema's type. Tests compare this table with what xgrammar's grammars allow.
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
"""Keywords that are never enforced. All other unknown keywords are annotations."""
FORMATS = frozenset(
    # without those of JSON pointers, whose grammar allows quotes
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
"""Formats that the empty string matches."""
ANNOTATING_FORMATS = frozenset(
    {"password", "path", "file-path", "directory-path", "binary", "int32", "int64", "float", "double"}
)
"""Formats that don't restrict the value."""
MAX_MULTIPLE = 1024
"""Maximum value of ``multipleOf``."""
MAX_MULTIPLE_RANGE = 10_000
"""Maximum distance between the bounds beside ``multipleOf``."""
MAX_REFERENCES = 32
"""Maximum length of a chain of references."""

MAX_STEPS = 10_000
"""Maximum steps of a check, because it runs on the event loop. A step is a schema, a value or a few characters."""

Schema = dict[str, Any]
Path = tuple["Path | None", str]
"""The parent's path and the last part. Only joined for an error, because joining each path of a deep schema is slow."""


@dataclass
class StepBudget:
    """Steps that the checks of one request have left."""

    left: int = MAX_STEPS

    def spend(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise _TooLargeError


class _TooLargeError(Exception):
    pass


@dataclass
class _Root:
    """The whole schema, in which references are resolved."""

    schema: Any
    budget: StepBudget


def check_schema(schema: Any, param: str, budget: StepBudget | None = None) -> None:
    """Raise InvalidRequest, naming ``param``, the keyword and its path, if the schema can't be fully enforced.

    Malformed schemas are reported when they are compiled. Several checks may share a ``budget``."""
    try:
        _check(_Root(schema, budget or StepBudget()), param)
    except _TooLargeError:
        raise InvalidRequest("the JSON schema can't be enforced: it is too large to check", param) from None


def _check(root: _Root, param: str) -> None:
    pending: list[tuple[Path, Any]] = [((None, "#"), root.schema)]
    seen: dict[int, Any] = {}
    """By id. Holds the schemas themselves, because the id of a freed object may be reused."""
    while pending:
        path, one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        root.budget.spend(1 + len(one) // 8)
        seen[id(one)] = one
        for keyword, reason in _unsupported(one, root):
            detail = f" ({reason})" if reason else ""
            raise InvalidRequest(
                f"the keyword {keyword!r} at {_joined(path)} of the JSON schema can't be enforced{detail}", param
            )
        pending += _subschemas(one, path, root)


def _joined(path: Path | None) -> str:
    parts = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "/".join(reversed(parts))


def check_regex(pattern: str, param: str) -> None:
    """Raise InvalidRequest, naming ``param``, for a regular expression with parts that xgrammar ignores."""
    try:
        reason, _ = _check_pattern(pattern, StepBudget())
    except _TooLargeError:
        reason = "it is too long to check"
    if reason:
        raise InvalidRequest(f"the regex can't be enforced: {reason}", param)


# ── subschemas and references ────────────────────────────────────────────────────────────────────────────────────


def _subschemas(schema: Schema, path: Path, root: _Root) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas within this one, with their paths. Definitions only count where they are referenced."""
    for keyword in ("properties", "patternProperties"):
        if isinstance(named := schema.get(keyword), dict):
            yield from (((path, f"{keyword}/{_escaped(name)}"), one) for name, one in named.items())
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(listed := schema.get(keyword), list):
            yield from (((path, f"{keyword}/{number}"), one) for number, one in enumerate(listed))
    for keyword in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"):
        if keyword in schema:
            yield (path, keyword), schema[keyword]
    if isinstance(names := schema.get("propertyNames"), dict):
        # names are strings even if the schema has no type
        is_typed = any(keyword in names for keyword in ("type", *_GROUPS))
        yield (path, "propertyNames"), names if is_typed else {"type": "string"} | names
    if isinstance(reference := schema.get("$ref"), str):
        yield (None, reference), _target(reference, root)


def _escaped(name: str) -> str:
    return name[:64].replace("~", "~0").replace("/", "~1")[:64]


def _target(reference: str, root: _Root) -> Any:
    """Return the target of a reference within the schema, or None if it has none.

    None for references with ``~0`` or ``~1``, too, which xgrammar doesn't unescape."""
    if (reference != "#" and not reference.startswith("#/")) or "~" in reference:
        return None
    found = root.schema
    parts = reference[2:].split("/")
    root.budget.spend(1 + len(parts) // 8)
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

Unsupported = Iterator[tuple[str, str]]
"""Keywords that aren't enforced, each with a reason, which may be empty."""


def _unsupported(schema: Schema, root: _Root) -> Unsupported:
    for keyword in schema:
        if keyword in _NEVER and not (keyword == "uniqueItems" and schema[keyword] is False):
            yield keyword, ""
    if isinstance(schema.get("$id"), str) and schema is not root.schema:
        yield "$id", "references are resolved in the whole schema"
    group = next((keyword for keyword in _GROUPS if keyword in schema), None)
    if group is not None:
        yield from _unsupported_beside(group, schema, root)
        yield from _unsupported_group(group, schema, root)
        return
    types = _types(schema)
    if not types:
        yield from ((keyword, "without a type") for keyword in schema if _reads(schema, keyword) and keyword != "type")
    if "string" in types:
        yield from _unsupported_string(schema, root)
    if "object" in types:
        yield from _unsupported_object(schema, root)
    if "number" in types and "multipleOf" in schema:
        yield "multipleOf", "only supported for integers, not numbers"
    elif "integer" in types:
        yield from _unsupported_multiple(schema)


def _reads(schema: Schema, keyword: str) -> bool:
    """Return whether the keyword restricts the value."""
    if keyword == "format" and isinstance(name := schema[keyword], str) and name in ANNOTATING_FORMATS:
        return False
    return keyword in _READ


def _types(schema: Schema) -> frozenset[str]:
    """Return the types that xgrammar assumes for a schema without a group; none means any."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list) and declared:
        return frozenset(one for one in declared[:_MAX_TYPES] if isinstance(one, str))
    if any(keyword in schema for keyword in ("properties", "additionalProperties", "unevaluatedProperties")):
        return frozenset({"object"})
    if any(keyword in schema for keyword in ("items", "prefixItems", "unevaluatedItems")):
        return frozenset({"array"})
    return frozenset()


_MAX_TYPES = 8
"""More than there are: a longer list repeats a type, so the schema is malformed."""
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


def _unsupported_beside(group: str, schema: Schema, root: _Root) -> Unsupported:
    """Yield keywords that are ignored because of a group, except those that all of the group's values satisfy."""
    types = _types_of_group(group, schema, root)
    for keyword in schema:
        if keyword == group or not _reads(schema, keyword):
            continue
        if keyword == "type":
            is_implied = types is not None and _within(types, _types(schema))
        elif keyword in _GROUPS:
            is_implied = False
        else:
            is_implied = types is not None and not any(keyword in _OF_TYPE.get(one, ()) for one in types)
        if not is_implied:
            yield keyword, f"beside {group!r}"


def _types_of_group(group: str, schema: Schema, root: _Root) -> frozenset[str] | None:
    """Return the types of the values that a group allows, or None if they aren't known."""
    found: set[str] = set()
    for arm in _arms(group, schema):
        one = _resolved(arm, root)
        root.budget.spend(1)
        if not isinstance(one, dict):
            return None
        inner = next((keyword for keyword in _GROUPS if keyword in one), None)
        if inner not in (None, "const", "enum"):
            return None
        values = _values(one) or []
        root.budget.spend(len(values) // 8)
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
    """Return the values that a schema allows if it lists them, otherwise None."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _unsupported_group(group: str, schema: Schema, root: _Root) -> Unsupported:
    value = schema[group]
    if group == "$ref" and isinstance(value, str) and "~" in value:
        yield group, "references to names with '~' or '/' aren't supported"
    elif group == "$ref" and isinstance(value, str) and _target(value, root) is None:
        yield group, "only references within the schema, such as '#/$defs/name', are followed"
    elif group == "allOf" and isinstance(value, list) and len(value) != 1:
        yield group, "of several schemas"
    elif group == "oneOf" and isinstance(value, list) and not _are_disjoint(value, root):
        yield group, "its schemas may overlap by type, values or required properties; 'anyOf' can be enforced"


def _unsupported_string(schema: Schema, root: _Root) -> Unsupported:
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    least = schema.get("minLength")
    if least == 0:
        lengths.remove("minLength")
    name, pattern = schema.get("format"), schema.get("pattern")
    if isinstance(name, str) and name not in ANNOTATING_FORMATS:
        if name not in FORMATS:
            yield "format", f"supported formats: {', '.join(sorted(FORMATS))}"
        if "pattern" in schema:
            yield "pattern", "beside 'format'; leave one of them out"
        implied = least == 1 and name not in MAY_BE_EMPTY
        yield from ((one, "beside 'format'") for one in lengths if one != "minLength" or not implied)
    if isinstance(pattern, str):
        reason, may_be_empty = _check_pattern(pattern, root.budget)
        yield from ((one, "beside 'pattern'") for one in lengths if one != "minLength" or least != 1 or may_be_empty)
        if reason:
            yield "pattern", reason


def _unsupported_multiple(schema: Schema) -> Unsupported:
    if "multipleOf" not in schema:
        return
    multiple = _as_integer(schema["multipleOf"])
    lower, upper = (
        [_as_integer(schema[keyword]) for keyword in keywords if keyword in schema]
        for keywords in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    )
    if multiple is None or multiple > MAX_MULTIPLE:
        yield "multipleOf", f"only integers up to {MAX_MULTIPLE} are supported"
    elif lower or upper:
        least, most = ([bound for bound in bounds if bound is not None] for bounds in (lower, upper))
        if not least or not most or min(most) - max(least) > MAX_MULTIPLE_RANGE:
            yield "multipleOf", f"beside a bound; supported beside two that are at most {MAX_MULTIPLE_RANGE} apart"


def _as_integer(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def _unsupported_object(schema: Schema, root: _Root) -> Unsupported:
    named, patterns = _dict_of(schema, "properties"), _dict_of(schema, "patternProperties")
    if isinstance(required := schema.get("required"), list):
        missing = [name for name in required if isinstance(name, str) and name not in named]
        yield from (("required", f"{name[:64]!r} is not in 'properties'") for name in missing[:1])
    if patterns and (named or len(patterns) > 1):
        yield "patternProperties", "beside 'properties'" if named else "of several patterns"
    for pattern in patterns:
        if reason := _check_pattern(pattern, root.budget)[0]:
            yield "patternProperties", reason
    if "propertyNames" in schema and (named or patterns):
        yield "propertyNames", "beside 'properties' and 'patternProperties'"
    if "propertyNames" in schema and schema.get("additionalProperties") is False:
        yield "propertyNames", "beside 'additionalProperties' of false"
    if (patterns or "propertyNames" in schema) and "unevaluatedProperties" in schema:
        yield "unevaluatedProperties", "beside 'patternProperties' and 'propertyNames'"
    further = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
    if schema.get("minProperties") and (further is not False or patterns or "propertyNames" in schema):
        yield "minProperties", "with additional properties: a repeated name would count twice"


def _dict_of(schema: Schema, keyword: str) -> Schema:
    found = schema.get(keyword)
    return found if isinstance(found, dict) else {}


# ── alternatives ─────────────────────────────────────────────────────────────────────────────────────────────────


def _are_disjoint(arms: list[Any], root: _Root) -> bool:
    """Return whether no value can match two of the schemas, as far as it is easily proven.

    Compares their types, the values that they list, and the values of a property that all objects require."""
    ones = [_resolved(arm, root) for arm in arms]
    root.budget.spend(len(ones))
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
    if len(objects) > 1 and not _have_discriminator(objects, root):
        return False
    kinds = [*typed, *([frozenset({"object"})] if objects else [])]
    if listed:
        root.budget.spend(sum(map(len, listed)) // 8)
        kinds.append(frozenset(_type_of(value) for values in listed for value in values))
    wide = [{"number" if one == "integer" else one for one in types} for types in kinds]
    return _are_distinct(wide) and _are_distinct([_canonical(values, root) for values in listed])


def _have_discriminator(objects: list[Schema], root: _Root) -> bool:
    """Return whether all objects require a property with different values in each."""
    candidates: dict[str, list[list[Any]]] | None = None
    for one in objects:
        named, required = one.get("properties"), one.get("required")
        if not isinstance(named, dict) or not isinstance(required, list):
            return False
        root.budget.spend(1 + len(required) // 8)
        needed = {name for name in required if isinstance(name, str)}
        remaining: dict[str, list[list[Any]]] = {}
        for name in needed if candidates is None else candidates:
            root.budget.spend(1)
            if name in needed and (values := _values_of(named.get(name), root)):
                remaining[name] = candidates[name] if candidates is not None else []
                remaining[name].append(values)
        if not remaining:
            return False
        candidates = remaining
    return any(_are_distinct([_canonical(each, root) for each in values]) for values in (candidates or {}).values())


def _values_of(schema: Any, root: _Root) -> list[Any] | None:
    found = _resolved(schema, root)
    return _values(found) if isinstance(found, dict) and "$ref" not in found else None


def _are_distinct(sets: list[set[str]]) -> bool:
    return sum(map(len, sets)) == len(set[str]().union(*sets))


def _canonical(values: list[Any], root: _Root) -> set[str]:
    """Return texts that are equal for equal JSON values: 1 equals 1.0, and the order of members doesn't matter."""
    found = set()
    for value in values:
        normal = int(value) if isinstance(value, float) and value.is_integer() else value
        found.add(text := json.dumps(normal, sort_keys=True))
        root.budget.spend(1 + len(text) // 64)
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
"""The tokens of a regular expression. Possessive quantifiers keep matching linear in the pattern's length."""
_KNOWN_ESCAPE = re.compile(r"\\(?:u.+|x..|c[a-zA-Z]|[dDwWsSnrtfv0]|[^a-zA-Z0-9])", re.DOTALL)
_CLASS_ESCAPE = re.compile(r"\\(?:u\{[0-9a-fA-F]++\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|c[a-zA-Z]|.)", re.DOTALL)


@dataclass(slots=True)
class _Group:
    """State of a group of the pattern, or of the whole pattern, while it is parsed."""

    is_first: bool
    """Nothing precedes the group."""
    at_start: bool
    """Nothing precedes the current position, in the group's current alternative or before the group."""
    has_start_anchor: bool = False
    has_end_anchor: bool = False
    ended: bool = False
    """The current alternative had its ``$``."""
    not_empty: bool = False
    """The current alternative can't match the empty string."""
    may_be_empty: bool = False
    """A completed alternative may match the empty string."""


class _UnsupportedError(Exception):
    """The pattern can't be enforced. The message is the reason."""


def _check_pattern(pattern: str, budget: StepBudget) -> tuple[str, bool]:
    """Return why a pattern can't be enforced, or an empty string, and whether it may match the empty string.

    Only finds what the compiler doesn't report. Patterns must match the whole text, whether or not they have anchors,
    so an anchor in the middle would be ignored."""
    groups = [_Group(True, True)]
    try:
        for number, token in enumerate(_TOKEN.finditer(pattern)):
            if not number % 64:
                budget.spend(32)
            _parse_token(token.lastgroup or "", token[0], pattern[token.end() : token.end() + 2], groups)
    except _UnsupportedError as error:
        return str(error), True
    return "", groups[-1].may_be_empty or not groups[-1].not_empty or len(groups) > 1


def _parse_token(kind: str, text: str, following: str, groups: list[_Group]) -> None:
    group = groups[-1]
    if group.ended and kind not in ("close", "bar"):
        raise _UnsupportedError("'$' in the middle")
    # treats any count that begins with 0 as optional, which is rare and safe
    optional = following[:1] in ("*", "?") or following in ("{0", "{,", "{}")
    if kind == "open":
        if text in ("(?=", "(?!", "(?<=", "(?<!"):
            raise _UnsupportedError("it has a lookahead or lookbehind")
        groups.append(_Group(group.at_start, group.at_start))
    elif kind in ("close", "bar"):
        group.may_be_empty |= not group.not_empty
        if kind == "bar":
            group.at_start, group.ended, group.not_empty = group.is_first, False, False
        elif len(groups) > 1:
            _close(groups, following[:1], optional)
    elif kind == "begin":
        if not group.at_start:
            raise _UnsupportedError("'^' in the middle")
        group.has_start_anchor = True
    elif kind == "end":
        group.has_end_anchor = group.ended = True
    elif kind != "times":
        if unknown := _unknown_escape(kind, text):
            raise _UnsupportedError(f"{unknown!r} is not a known escape")
        group.at_start = False
        group.not_empty |= not optional or (kind == "letters" and len(text) > 1)


def _close(groups: list[_Group], following: str, optional: bool) -> None:
    inner, group = groups.pop(), groups[-1]
    if inner.has_start_anchor and following in ("*", "+", "{"):
        raise _UnsupportedError("'^' in the middle")
    group.has_start_anchor |= inner.has_start_anchor
    group.has_end_anchor |= inner.has_end_anchor
    group.ended |= inner.has_end_anchor
    group.at_start = False
    group.not_empty |= not inner.may_be_empty and not optional


def _unknown_escape(kind: str, text: str) -> str | None:
    """Return the first escape that the compiler would silently take as a plain letter, or None."""
    escapes = [text] if kind == "escape" else _CLASS_ESCAPE.findall(text) if kind == "class" and "\\" in text else []
    known = ("\\b",) if kind == "class" else ()
    return next((one for one in escapes if one not in known and not _KNOWN_ESCAPE.fullmatch(one)), None)
