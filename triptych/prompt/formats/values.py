"""Grammars of the values that a JSON schema allows, for calls that write them in another form than JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.errors import InvalidRequest
from triptych.prompt import lark
from triptych.prompt.formats.call_form import ValueForm
from triptych.prompt.formats.json_dump import escaped
from triptych.prompt.formats.typed import TYPE_NAMES, listed_values, resolve, types_named

_MAX_DEPTH = 64
_NAME = r"[\w.-]+"
KEY = lark.regex(_NAME)
"""Names where a schema gives none."""
_ALL = ("null", "boolean", "number", "string", "array", "object")
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_ENFORCED = frozenset(
    {
        *("$ref", "type", "enum", "const", "items", "minItems", "maxItems", *_NUMERIC, *_OF_STRINGS, *_ALTERNATIVES),
        *("properties", "required", "additionalProperties"),
    }
)
_REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "prefixItems", "contains", "uniqueItems", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedItems"),
        "unevaluatedProperties",
    }
)

_SHAPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("enum", "required"), list),
    **dict.fromkeys(("minItems", "maxItems"), int),
    **dict.fromkeys(("items", "additionalProperties"), (dict, bool)),
    "properties": dict,
}
"""Types of keywords' values."""


@dataclass
class ValueWriter:
    """Writes the rules of values. ``spelled`` returns an expression for text with markers in it, and ``quoted`` rules
    of a name for the string that a schema allows and the quotation mark behind it."""

    form: ValueForm
    name: str
    """What the rules' names begin with."""
    root: Mapping[str, Any]
    """The schema that references are in."""
    param: str
    spelled: Callable[[str], str]
    quoted: Callable[[str, Any], str]
    rules: list[str] = field(default_factory=list)
    _targets: dict[int, str] = field(default_factory=dict)
    """Rules of schemas that references name, by identity: one schema has many references."""
    _num_rules: int = 0
    _any: str = ""

    def value(self, schema: Any, depth: int = 0) -> str:
        """Return an expression for the values that a schema allows. Raises InvalidRequest for what can't be
        enforced."""
        if schema is True:
            return self.any_value()
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            raise self._refusal("a schema that allows nothing" if schema is False else "so deep a schema")
        given = schema.keys() & _ENFORCED
        if refused := [key for key in sorted(schema.keys() & _REFUSED) if schema[key] is not False]:
            raise self._refusal(f"{refused[0]!r}")
        if wrong := [key for key, shape in _SHAPES.items() if key in schema and not isinstance(schema[key], shape)]:
            raise self._refusal(f"{wrong[0]!r} of this type")
        if not given:
            return self.any_value()
        if combining := sorted(given & {"$ref", *_ALTERNATIVES}):
            if len(given) > 1:
                raise self._refusal(f"{combining[0]!r} beside {min(given - {combining[0]})!r}")
            return self._combined(combining[0], schema[combining[0]], depth)
        if given & {"enum", "const"}:
            return self._listed(schema)
        own = ["object"] if "properties" in given else ["array"] if "items" in given else _ALL
        types = types_named(schema) or own
        return self._one_of([self._of_type(name, schema, depth) for name in types])

    def any_value(self) -> str:
        """Return the name of a rule for any value."""
        if not self._any:
            self._any = f"{self.name}_any"
            self.rules.append(f"{self._any}: {' | '.join(self._of_type(name, {}, 0) for name in _ALL)}")
        return self._any

    def named(self, before: str, name: str) -> str:
        """Return an expression for what is before a value, with its name. Raises InvalidRequest for a name that would
        be read otherwise."""
        if '"' not in before and not re.fullmatch(_NAME, name):
            raise self._refusal(f"the name {name!r}")
        return self.spelled(before.replace("{key}", escaped(name)))

    def _combined(self, keyword: str, value: Any, depth: int) -> str:
        if keyword == "$ref":
            return self._reference(value, depth)
        if not isinstance(value, list) or not value or (keyword == "allOf" and len(value) > 1):
            raise self._refusal(f"{keyword!r}")
        if keyword == "oneOf" and not _are_disjoint(value, self.root):
            raise self._refusal("'oneOf' with schemas that may overlap")
        return self._one_of([self.value(one, depth + 1) for one in value])

    def _reference(self, reference: Any, depth: int) -> str:
        if not isinstance(reference, str) or (target := resolve(reference, self.root)) is None:
            raise self._refusal("a reference to what the schema lacks")
        if id(target) not in self._targets:
            self._targets[id(target)] = name = self._new_name()
            self.rules.append(f"{name}: {self.value(target, depth + 1)}")
        return self._targets[id(target)]

    def _listed(self, schema: Mapping[str, Any]) -> str:
        types = types_named(schema)
        allowed = [one for one in listed_values(schema) if not types or TYPE_NAMES.get(type(one)) in _wider(types)]
        if not allowed:
            raise self._refusal("a list without a value of its type")
        return self._one_of([self.spelled(self.form.text(one)) for one in allowed])

    def _of_type(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        match name:
            case "null":
                return lark.literal(self.form.null)
            case "boolean":
                return lark.choice((self.form.true, self.form.false))
            case "integer" | "number":
                return self._json(name, schema, _NUMERIC)
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema, depth)
            case "object":
                return self._object(schema, depth)
        raise self._refusal(f"the type {name!r}")

    def _json(self, name: str, schema: Mapping[str, Any], keywords: Sequence[str]) -> str:
        return lark.json_schema({"type": name} | {key: schema[key] for key in keywords if key in schema}, self.param)

    def _string(self, schema: Mapping[str, Any]) -> str:
        if self.form.quote == '"':
            return self._json("string", schema, _OF_STRINGS)
        name = self._new_name()
        self.rules.append(self.quoted(name, schema))
        return f"{self.spelled(self.form.quote)} {name}"

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most <= 0:
            return lark.literal("[]")
        name = self._new_name()
        self.rules.append(f"{name}: {self.value(schema.get('items', True), depth + 1)}")
        more = f"({lark.literal(self.form.comma)} {name}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f'"[" ({name} {more}){"" if least else "?"} "]"'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        others = schema.get("additionalProperties", True)
        if properties := properties_of(schema):
            entries = [
                (f"{self.named(self.form.key, key)} {self.value(one, depth + 1)}", is_required)
                for key, one, is_required in properties
            ]
            expression, rules = in_order(self._new_name(), entries, lark.literal(self.form.comma))
            self.rules += rules
            return f'"{{" {expression} "}}"'
        if others is False:
            return lark.literal("{}")
        before, _, after = self.form.key.partition("{key}")
        name = self._new_name()
        key = " ".join([*([lark.literal(before)] if before else []), KEY, lark.literal(after)])
        self.rules.append(f"{name}: {key} {self.value(others, depth + 1)}")
        return f'"{{" ({name} ({lark.literal(self.form.comma)} {name})*)? "}}"'

    def _one_of(self, expressions: Sequence[str]) -> str:
        return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self.name}_{self._num_rules}"

    def _refusal(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"{what} can't be enforced in this model's form of calls", self.param)


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return the name and the schema of each property that an object's schema names, and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    required = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    named = {**dict.fromkeys(required, schema.get("additionalProperties", True)), **properties}
    named = {key: named[key] for key in (*properties, *named)}
    return [(key, one, key in required) for key, one in named.items()]


def in_order(name: str, entries: Sequence[tuple[str, bool]], separator: str) -> tuple[str, list[str]]:
    """Return an expression for entries in their order, of which those that aren't required may be left out, with
    separators between them, and its rules, whose names begin with ``name``."""
    rules = [f"{name}_end: {lark.literal('')}"]
    rest = leading = f"{name}_end"
    for number, (entry, required) in reversed(list(enumerate(entries))):
        one = f"{name}_e{number}"
        rules += [f"{one}: {entry}", f"{one}_first: {one} {rest}{'' if required else f' | {leading}'}"]
        rules.append(f"{one}_more: {separator} {one} {rest}{'' if required else f' | {rest}'}")
        leading, rest = f"{one}_first", f"{one}_more"
    return leading, rules


def _wider(types: Sequence[str]) -> set[str]:
    """Return the types of values that are of one of these types."""
    return {*types, *(("integer",) if "number" in types else ())}


def _are_disjoint(schemas: Sequence[Any], root: Mapping[str, Any]) -> bool:
    """Return whether no object fits two schemas, by the constants of a property that all of them require."""
    references = [one.get("$ref") if isinstance(one, dict) else None for one in schemas]
    objects = [
        resolve(name, root) if isinstance(name, str) else one for name, one in zip(references, schemas, strict=True)
    ]
    if not all(isinstance(one, dict) for one in objects) or len(set(map(id, objects))) < len(objects):
        return False
    required = [{name: inner for name, inner, is_required in properties_of(one) if is_required} for one in objects]
    tags = ([one[name] for one in required] for name in set.intersection(*map(set, required)))
    return any(
        all(isinstance(one, dict) and isinstance(one.get("const"), str) for one in some)
        and len({one["const"] for one in some}) == len(some)
        for some in tags
    )
