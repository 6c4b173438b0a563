"""JSON schemas are enforced or refused, by keyword and place: llguidance's grammars are compared with a validator."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from triptych.demo import MODEL_DIR
from triptych.engine.grammar.compiler import Compiler
from triptych.errors import ErrorKind, InvalidRequest
from triptych.prompt import lark
from triptych.prompt.answer_grammar import GrammarPart
from triptych.prompt.grammar_check import GrammarChecked, GrammarToCheck, check
from triptych.prompt.json_schema import ANNOTATING_FORMATS

COMPILER = Compiler(Path(MODEL_DIR))
BYTES = LLTokenizer("byte")
TEXT = frozenset(map(ord, '"{}[]:, -.0123456789abcdefnrstulxyzABTZ@/#~+_PDHMSWY'))
"""The characters that the texts of these tests are made of."""


def checked(schema: Any) -> GrammarChecked:
    try:
        grammar = GrammarPart("field", lark.json_schema(schema, "field")).alone()
    except InvalidRequest as error:
        return GrammarChecked(ErrorKind.of(error), str(error), error.param)
    return check(COMPILER, GrammarToCheck(grammar.text, grammar.parts))


def compiled(schema: Any) -> LLMatcher:
    matcher = LLMatcher(BYTES, GrammarPart("field", lark.json_schema(schema)).alone().text, log_level=0)
    assert not matcher.is_error()
    return matcher


def allows(grammar: LLMatcher, value: Any) -> bool:
    text = value if isinstance(value, str) and value[:1] in ("{", "[", '"') else json.dumps(value)
    matcher, tokens = grammar.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema_rs.validator_for(schema, validate_formats=True, ignore_unknown_formats=True).is_valid(value)


def samples(grammar: LLMatcher, rng: random.Random, number: int) -> list[str]:
    """Return random texts that the grammar accepts."""
    found = []
    for _ in range(number):
        matcher, text = grammar.deep_copy(), bytearray()
        for _ in range(200):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                break
            letters = sorted(letter for letter in TEXT if mask >> letter & 1)
            if matcher.is_accepting() and (not letters or rng.random() < 0.5):
                found.append(text.decode())
                break
            # what ends strings, arrays and objects comes more often, or few would end
            letters += [letter for letter in letters if chr(letter) in '"]}'] * 8
            if not letters:
                break
            text.append(rng.choice(letters))
            assert matcher.consume_token(text[-1])
    return found


def named(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


INTEGER, STRING = {"type": "integer"}, {"type": "string"}
REF = {"$ref": "#/$defs/n"}
NODE = REF | {"$defs": {"n": {"type": "object", "properties": {"c": REF, "v": INTEGER}}}}
SOME = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:i"}

KEPT: list[tuple[Any, list[Any], list[Any]]] = [
    ({}, [1, "a", None, [{}]], []),
    (INTEGER, [0, -5, 10**12], [1.5, "a", None]),
    ({"type": "number"}, [0, -1.5, 1e5], ["1", True]),
    ({"type": "boolean"}, [True, False], [0]),
    ({"type": "null"}, [None], [0]),
    ({"type": "object"}, [{}, {"a": [1]}], [[]]),
    ({"type": "array"}, [[], [1, {}]], [{}]),
    ({"type": ["string", "null"], "minLength": 2}, ["ab", None], ["a", 1]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "string", "minLength": 0, "pattern": "^a+$"}, ["a", "aa"], ["", "b"]),
    ({"type": "string", "pattern": "^(a|b)$"}, ["a", "b"], ["ab"]),
    ({"type": "string", "pattern": "[0-9]{3}"}, ["123"], ["12", "a"]),
    ({"type": "integer", "minimum": -12, "maximum": 105}, [-12, 0, 99, 105], [-13, 106, 1000]),
    ({"type": "integer", "exclusiveMinimum": 0, "minimum": -5}, [1], [0, -3]),
    ({"type": "integer", "exclusiveMaximum": 3, "maximum": 5}, [2], [3, 4]),
    ({"type": "integer", "multipleOf": 7}, [14, 0, -7], [15]),
    ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100}, [14], [15, 105]),
    ({"type": "number", "minimum": -1.5, "maximum": 2.25}, [-1.5, 0.5, 2.25], [-1.51, 2.3, 9]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 0.0, 1, 1.0, -1]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "items": INTEGER, "uniqueItems": False}, [[1, 1]], [["a"]]),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, [[1, "a"]], [["a", 1], [1, "a", 2]]),
    ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": STRING}, [[1, "a"]], [[1, 2]]),
    ({"type": "object", "properties": {"a": INTEGER, "b": STRING}}, [{}, {"a": 1}, {"b": "x"}], [{"a": "x"}]),
    (named(a=INTEGER, b=STRING), [{"a": 1, "b": "x"}], [{}, {"a": 1}, {"a": 1, "b": "x", "c": 1}]),
    (named(a=INTEGER) | {"additionalProperties": STRING}, [{"a": 1, "b": "x"}], [{"a": 1, "b": 1}, {"b": "x"}]),
    (named(a=INTEGER) | {"additionalProperties": True}, [{"a": 1, "b": 2}], [{"a": "x"}, '{"a": 1, "a": "x"}']),
    ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", "patternProperties": {"^x[a-z]*$": INTEGER}}, [{}, {"xa": 1}], [{"xa": "s"}]),
    ({"type": "object", "propertyNames": {"pattern": "^x$"}, "additionalProperties": INTEGER},
     [{}, {"x": 1}], [{"y": 1}, {"x": "s"}]),
    ({"type": "object", "propertyNames": {"enum": ["x"]}}, [{"x": 1}], [{"y": 1}]),
    ({"enum": ["red", 1, None, {"a": [1]}]}, ["red", 1, None], ["blue", 2]),
    ({"type": "string", "enum": ["red", "blue"]}, ["red"], ["green"]),
    ({"type": "number", "const": 1}, [1], [2]),
    ({"anyOf": [STRING, {"type": "null"}], "default": None, "title": "A"}, ["a", None], [1]),
    ({"type": ["string", "null"], "anyOf": [STRING, {"type": "null"}]}, ["a", None], [1]),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INTEGER}, "description": "x"}, [1], ["a"]),
    ({"oneOf": [STRING, INTEGER, {"type": "array", "items": INTEGER}]}, ["a", 1, [1]], [None, ["a"]]),
    ({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}, INTEGER]}, ["a", "c", 1], ["d"]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "t"},
      "$defs": {"a": named(t={"const": "a"}, v=INTEGER), "b": named(t={"const": "b", "type": "string"}, v=STRING)}},
     [{"t": "a", "v": 1}, {"t": "b", "v": "x"}], [{"t": "a", "v": "x"}, {"t": "c"}]),
    (NODE, [{}, {"c": {"c": {}}}, {"c": {}, "v": 1}], [{"c": 1}]),
    ({"type": "object", "properties": {"n": {"$ref": "#"}, "v": INTEGER}}, [{"n": {"v": 1}}], [{"n": {"v": "x"}}]),
    (named(a={"type": "string", "description": "d", "examples": ["x"], "deprecated": True, "readOnly": True,
              "default": "y", "$comment": "c", "contentEncoding": "base64", "x-order": 1}) | DRAFT,
     [{"a": "x"}], [{"a": 1}]),
    ({"type": "string", "format": "uri", "minLength": 1}, ["http://a"], [""]),
    ({"type": "string", "format": "password", "minLength": 2}, ["ab"], ["a"]),
    ({"type": "string", "format": "path", "pattern": "^/[a-z]+$"}, ["/a"], ["a"]),
    ({"format": "binary", "title": "x"}, ["a", 1], []),
    ({"type": "integer", "format": "int32"}, [1], ["a"]),
    ({"type": "string", "minLength": 1, "pattern": "^a*(b|c{2})$"}, ["ab", "cc"], ["", "a"]),
    ({"type": "integer", "minLength": 5, "pattern": "(?=a)"}, [1], ["a"]),  # doesn't restrict integers
    # beside other keywords
    ({"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 3}, ["ab"], ["a", "abcd", "A"]),
    ({"type": "number", "multipleOf": 0.5}, [0.5, 2], [0.3]),
    ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10**6}, [14], [15, -7]),
    (named(a=INTEGER) | {"additionalProperties": {}, "required": ["a", "z"]}, [{"a": 1, "z": 2}], [{"a": 1}]),
    ({"type": "object", "properties": {"x": STRING}, "patternProperties": {"^[a-z]$": INTEGER}}, [{"a": 1}],
     [{"x": "s"}, {"a": "s"}]),
    ({"allOf": [STRING, {"minLength": 3}]}, ["abc"], [3, "ab"]),
    ({"anyOf": [STRING, INTEGER], "minLength": 3}, ["abc", 1], ["x"]),
    (named(a=INTEGER) | {"anyOf": [{"type": "object"}]}, [{"a": 1}], [{"b": 1}]),
    ({"$ref": "#/$defs/s", "$defs": {"s": STRING}, "maxLength": 2}, ["ab"], ["abc", 1]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER, "a~1b": STRING}}, [1], ["a"]),
    ({"minLength": 3}, ["abc", 1, None], ["x"]),
    ({"minimum": 3, "pattern": "^x$"}, [4, "x", None], [1, "y"]),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
     [{"b": "x"}], ['{"\\u0061": "x"}', '{"b": 1, "a": "x"}']),
    ({"x-guidance": {"lenient": True}, "type": "string", "maxLength": 1}, ["a"], ["ab"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INTEGER],
      "additionalItems": False}, [[1]], [[1, 2], ["a"]]),
]  # fmt: skip


OVERLAPPING = [{"type": "integer"}, {"type": "number", "minimum": 1}]
REFUSED: list[tuple[Any, str, str]] = [
    # a schema, what is named, and its place
    (named(a={"type": "array", "items": STRING, "uniqueItems": True}), "'uniqueItems'", "#/properties/a"),
    (named(**{"a/b": {"not": {}}}), "'not'", "#/properties/a~1b"),
    (named(**{"é %": {"not": {}}}), "'not'", "#/properties/é %"),
    ({"$ref": "#/$defs/s", "$defs": {"s": {"type": "string", "not": {}}}}, "'not'", "#/$defs/s"),
    ({"type": "array", "prefixItems": [INTEGER, {"not": {}}]}, "'not'", "#/prefixItems/1"),
    ({"type": "array", "items": {"if": {}}}, "'if'", "#/items"),
    ({"type": "object", "additionalProperties": {"not": {}}}, "'not'", "#/additionalProperties"),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, "'propertyNames'", "#"),
    ({"type": "array", "items": INTEGER, "contains": {"const": 1}, "minContains": 2}, "'contains'", "#"),
    (named(a={"type": "string", "format": "ipv9"}), "ipv9", "#/properties/a"),
    (named(a={"type": "string", "pattern": "^(?=x).*$"}), "look-around", "#/properties/a"),
    (named(a={"type": "string", "pattern": "a$b"}), "lookarounds", "#/properties/a"),
    (named(a={"oneOf": OVERLAPPING}), "'anyOf' can be enforced", "#/properties/a"),
    (named(a={"type": "no such type"}), "no such type", "#/properties/a"),
    (named(a={"type": "string", "minLength": "x"}), "minLength", "#/properties/a"),
    (named(a={"type": "object", "additionalProperties": INTEGER, "minProperties": 2}), "minProperties",
     "#/properties/a"),
    (named(a={"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "minProperties": 2}), "minProperties",
     "#/properties/a"),
    (named(a={"type": "object", "propertyNames": {"enum": ["a", "d"]}, "minProperties": 2}), "minProperties",
     "#/properties/a"),
    (named(a={"patternProperties": {"^a": INTEGER}, "additionalProperties": False, "minProperties": 2}),
     "minProperties",
     "#/properties/a"),
    ({"type": "object", "patternProperties": {"^x": INTEGER, "^[a-z]+$": STRING}}, "not disjoint", "#"),
    ({"$ref": "https://example.com/x.json"}, "https://example.com/x.json", "#"),
    ({"$ref": "#/$defs/missing"}, "/$defs/missing", "#"),
    ({"$ref": "#"}, "no text matches", "#"),
    ({"$dynamicRef": "#a"}, "'$dynamicRef'", "#"),
    (named(a=INTEGER) | {"dependentRequired": {"a": ["b"]}}, "'dependentRequired'", "#"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum", "#"),
    (named(a={"minimum": float("nan")}), "isn't JSON", ""),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), KEPT)
def test_enforced_schemas(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    assert checked(schema) == GrammarChecked()
    grammar = compiled(schema)
    for value in valid:
        assert is_valid(schema, value)
        assert allows(grammar, value), value
    for value in invalid:
        assert not is_valid(schema, json.loads(value) if isinstance(value, str) and value[:1] == "{" else value)
        assert not allows(grammar, value), value
    for text in samples(grammar, random.Random(1), 10):
        if "Infinity" not in json.dumps(json.loads(text)):  # Python has no number as large as 4e663
            assert is_valid(schema, json.loads(text)), text


A, B = ({"type": "object", "properties": {name: INTEGER}} for name in "ab")
SHARED = {"$defs": {"a": A}}
CLOSED = [
    A, {"properties": {"a": A}}, {"type": "array", "items": A},
    {"anyOf": [A, {"type": "null"}]}, {"oneOf": [A, STRING]},
    {"allOf": [A], "description": "x"}, SHARED | {"$ref": "#/$defs/a"},
    SHARED | {"anyOf": [{"$ref": "#/$defs/a"}, STRING]},
    SHARED | {"allOf": [{"$ref": "#/$defs/a"}], "default": {}}, A | {"required": ["a"], "minProperties": 1},
]  # fmt: skip
OPEN = [
    {"type": "object"}, A | {"additionalProperties": True}, A | {"required": ["b"]},
    {"allOf": [A, B]}, A | {"anyOf": [B, {"required": ["a"]}]},
    SHARED | {"$ref": "#/$defs/a", "properties": {"b": INTEGER}}, SHARED | {"allOf": [{"$ref": "#/$defs/a"}, B]},
    SHARED | {"anyOf": [{"$ref": "#/$defs/a"}], "properties": {"b": INTEGER}},
]  # fmt: skip


@pytest.mark.parametrize("schema", CLOSED)
def test_an_object_has_the_properties_that_it_names(schema: Any) -> None:
    def within(schema: Any, names: dict[str, int]) -> Any:
        return {"a": names} if schema.get("properties", {}).get("a") is A else [names] if "items" in schema else names

    grammar = compiled(schema)
    assert allows(grammar, within(schema, {"a": 1}))
    assert is_valid(schema, within(schema, {"a": 1, "b": 2}))
    assert not allows(grammar, within(schema, {"a": 1, "b": 2})), "stricter than JSON Schema"


@pytest.mark.parametrize("schema", OPEN)
def test_an_object_of_several_schemas_has_the_properties_of_all(schema: Any) -> None:
    assert allows(compiled(schema), {"a": 1, "b": 2})


@pytest.mark.parametrize(("schema", "named", "place"), REFUSED)
def test_refused_schemas_name_the_place(schema: Any, named: str, place: str) -> None:
    result = checked(schema)
    assert result.error is ErrorKind.INVALID_REQUEST
    assert result.param == "field"
    assert named in result.message
    assert not place or f" at {place}: " in result.message


FORMATS = ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
NEARLY = {"date", "date-time", "duration", "email", "hostname", "ipv4", "time"}
"""Formats of which a little more is allowed, such as the 31st of each month."""


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_enforced(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert checked(schema) == GrammarChecked()
    grammar = compiled(schema)
    assert not allows(grammar, "\\ {nope")
    assert not allows(grammar, "")
    for text in samples(grammar, random.Random(2), 30):
        assert is_valid(schema, json.loads(text)) or name in NEARLY, text


@pytest.mark.parametrize("name", sorted(ANNOTATING_FORMATS))
def test_formats_that_restrict_nothing(name: str) -> None:
    assert allows(compiled({"type": "string", "format": name}), "\\ {nope")


LEAVES = st.one_of(
    st.sampled_from(
        [{}, INTEGER, STRING, {"type": "null"}, {"type": "boolean"}, {"const": "a"}, {"enum": [1, "b", 2.5]}]
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number", ["integer", "null"]])},
        optional={
            "minimum": st.integers(-20, 20),
            "maximum": st.integers(-20, 20),
            "exclusiveMinimum": st.integers(-20, 20),
            "exclusiveMaximum": st.integers(-20, 20),
            "multipleOf": st.sampled_from([1, 3, 10]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", ["string", "integer"]])},
        optional={
            "minLength": st.integers(0, 3),
            "maxLength": st.integers(0, 4),
            "pattern": st.sampled_from(["^[a-c]+$", "a|b", "^x{1,3}$", "[0-9]{2}"]),
            "format": st.sampled_from(["uuid", "hostname", "ipv9"]),
        },
    ),
)
NAMES = st.sampled_from(["a", "b", "c"])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(NAMES, inner, max_size=3),
                "required": st.lists(NAMES, max_size=2, unique=True),
                "additionalProperties": st.one_of(st.booleans(), inner),
                "patternProperties": st.dictionaries(st.sampled_from(["^[a-b]$", "^x"]), inner, max_size=2),
                "propertyNames": st.sampled_from([{"maxLength": 1}, {"pattern": "^[a-c]$"}, {"enum": ["a", "d"]}]),
                "minProperties": st.integers(0, 2),
                "maxProperties": st.integers(0, 3),
                "unevaluatedProperties": st.one_of(st.booleans(), inner),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": st.one_of(st.just(False), inner),
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "minItems": st.integers(0, 2),
                "maxItems": st.integers(0, 3),
                "unevaluatedItems": st.one_of(st.booleans(), inner),
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}, optional={"type": st.just("object")}),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(SCHEMAS, st.integers(0, 2**32))
def test_accepted_schemas_are_enforced(schema: Any, seed: int) -> None:
    if checked(schema).error is None:
        for text in samples(compiled(schema), random.Random(seed), 3):
            if "Infinity" not in json.dumps(json.loads(text)):
                assert is_valid(schema, json.loads(text)), text


KEYWORDS = st.sampled_from(sorted({keyword for schema, *_ in [*KEPT, *REFUSED] for keyword in schema}))
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 2.5, -3, 10**400, float("inf"), float("nan"), "", "a", "#", "#/a", "^a$",
                     "string", "object", "array", "integer", "number", "(?=a)", "date", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.one_of(KEYWORDS, st.sampled_from(["a", "b"])), inner, max_size=4),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYWORDS, VALUES, max_size=4))
def test_any_json_is_accepted_or_refused(schema: Any) -> None:
    checked(schema)
