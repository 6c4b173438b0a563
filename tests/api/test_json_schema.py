"""JSON schemas are enforced or refused: the table of keywords is compared with xgrammar's grammars and a validator.

``test_refused_schemas_would_not_be_enforced`` fails when a newer xgrammar enforces more."""

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.timing import cpu_seconds
from triptych.api.json_schema import FORMATS, MAY_BE_EMPTY, check_regex, check_schema
from triptych.engine.grammar.compilation import MAX_WHITESPACE
from triptych.errors import InvalidRequest

END = 128
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        [bytes([letter]) for letter in range(END)] + [b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[END]
    ),
    max_threads=1,
)
TEXT = frozenset(map(ord, '"{}[]:, -.0123456789abcdefnrstulxyzABTZ@/#~+_PDHMSWY'))
"""The characters that the texts of these tests are made of."""


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    return COMPILER.compile_json_schema(json.dumps(schema), max_whitespace_cnt=MAX_WHITESPACE)


def allows(grammar: xgrammar.CompiledGrammar, value: Any) -> bool:
    text = value if isinstance(value, str) and value[:1] in ("{", "[", '"') else json.dumps(value)
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def is_valid(schema: Any, value: Any) -> bool:
    formats: dict[str, Callable[[str], bool]] = {}
    return jsonschema_rs.validator_for(
        schema, validate_formats=True, formats=formats, ignore_unknown_formats=True
    ).is_valid(value)


def samples(grammar: xgrammar.CompiledGrammar, rng: random.Random, number: int) -> list[str]:
    """Yield random texts that the grammar accepts."""
    found = []
    for _ in range(number):
        matcher, text = xgrammar.GrammarMatcher(grammar), bytearray()
        bitmask = np.zeros((1, 5), np.int32)
        for _ in range(400):
            bitmask.fill(-1)
            matcher.fill_next_token_bitmask(bitmask)
            allowed = {bit for bit in range(END + 1) if bitmask[0, bit // 32] >> bit % 32 & 1}
            if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                found.append(text.decode())
                break
            letters = sorted(allowed & TEXT)
            # what ends strings, arrays and objects comes more often, or few would end
            letters += [letter for letter in letters if chr(letter) in '"]}'] * 8
            if not letters:
                break
            letter = rng.choice(letters)
            text.append(letter)
            assert matcher.accept_token(letter)
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
    ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "maxProperties": 2},
     [{"a": 1, "c": 2}], [{}, {"a": 1}, {"a": 1, "b": 1, "c": 1}]),
    ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", "patternProperties": {"^x[a-z]*$": INTEGER}}, [{}, {"xa": 1}], [{"xa": "s"}]),
    ({"type": "object", "propertyNames": {"pattern": "^x$"}, "additionalProperties": INTEGER},
     [{}, {"x": 1}], [{"y": 1}, {"x": "s"}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
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
]  # fmt: skip


def defaulted(kind: str) -> dict[str, Any]:
    """A pydantic model with a tag that has a default."""
    tag = {"const": kind, "default": kind, "type": "string"}
    return {"type": "object", "properties": {"kind": tag, "v": INTEGER}, "required": ["v"]}


OVERLAPPING = [{"type": "integer"}, {"type": "number", "minimum": 1}]
REFUSED: list[tuple[Any, str, Any]] = [
    # a schema, the keyword that is named, and its place unless that is #; then what is allowed all the same
    ({"type": "string", "pattern": "^[a-z]*$", "minLength": 3}, "minLength", "x"),
    ({"type": "string", "pattern": "^[a-z]*$", "maxLength": 3}, "maxLength", "abcd"),
    ({"type": "string", "format": "date", "minLength": 30}, "minLength", "2020-01-01"),
    ({"type": "string", "format": "uri-reference", "minLength": 1}, "minLength", ""),
    ({"type": "string", "format": "date", "pattern": "^x"}, "pattern", "2020-01-01"),
    ({"type": "string", "pattern": "^(?=x).*$"}, "pattern", "abc"),
    ({"type": "string", "pattern": "^(?!a).*$"}, "pattern", "abc"),
    ({"type": "string", "pattern": "a$b"}, "pattern", "ab"),
    ({"type": "string", "pattern": "a^b"}, "pattern", "ab"),
    ({"type": "string", "pattern": "a(^b)"}, "pattern", "ab"),
    ({"type": "string", "pattern": "(a$)b"}, "pattern", "ab"),
    ({"type": "string", "pattern": "a:^b"}, "pattern", "a:b"),
    ({"type": "string", "pattern": "^a*$", "minLength": 1}, "minLength", ""),
    ({"type": "string", "pattern": "^(a{0,3}|b)$", "minLength": 1}, "minLength", ""),
    ({"oneOf": [defaulted("cat"), defaulted("dog")]}, "oneOf", {"v": 1}),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf", 0.3),
    ({"type": ["number", "null"], "multipleOf": 2}, "multipleOf", 3),
    ({"type": "integer", "multipleOf": 2000}, "multipleOf", 3),
    ({"type": "integer", "multipleOf": 7, "minimum": 0}, "multipleOf", 15),
    ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10**6}, "multipleOf", 15),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", [1, 1]),
    ({"type": "array", "items": INTEGER, "contains": {"const": 1}}, "contains", [2]),
    ({"type": "array", "items": INTEGER, "contains": {"const": 1}, "minContains": 2}, "contains", [2, 2]),
    (named(a=INTEGER) | {"required": ["a", "z"]}, "required", {"a": 1}),
    ({"required": ["z"]}, "required", {}),
    ({"type": "object", "required": ["z"], "additionalProperties": True}, "required", {"a": 1}),
    ({"type": "object", "patternProperties": {"^x": INTEGER, "^[a-z]+$": STRING}}, "patternProperties", {"x": 1}),
    ({"type": "object", "properties": {"x": STRING}, "patternProperties": {"^[a-z]$": INTEGER}},
     "patternProperties", {"x": "s"}),
    ({"type": "object", "properties": {"y": {}}, "propertyNames": {"pattern": "^x$"}}, "propertyNames", {"y": 1}),
    ({"type": "object", "additionalProperties": False, "propertyNames": {"maxLength": 1}}, "propertyNames", {"y": 1}),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "minProperties", '{"a": 1, "a": 1}'),
    (SOME | {"dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": 1}),
    (SOME | {"dependentSchemas": {"a": {"maxProperties": 0}}}, "dependentSchemas", {"a": 1}),
    (SOME | {"if": {"required": ["a"]}, "then": {"maxProperties": 0}}, "if", {"a": 1}),
    ({"type": "string", "not": {"const": "x"}}, "not", "x"),
    ({"enum": ["red"], "not": {"const": "red"}}, "not", "red"),
    ({"enum": ["red"], "minLength": 30}, "minLength", "red"),
    ({"type": "string", "enum": ["x", 1]}, "type", 1),
    ({"const": 1.5, "type": "integer"}, "type", 1.5),
    ({"enum": [1], "const": 2}, "enum", 2),
    ({"allOf": [STRING, {"minLength": 3}]}, "allOf", 3),
    ({"allOf": [STRING], "minLength": 3}, "minLength", "x"),
    ({"allOf": []}, "allOf", None),
    ({"anyOf": [STRING, INTEGER], "minLength": 3}, "minLength", "x"),
    ({"anyOf": [{"type": "string"}], "type": "integer"}, "type", "x"),
    (named(a=INTEGER) | {"anyOf": [{"type": "object"}]}, "properties", {"b": 1}),
    ({"oneOf": OVERLAPPING}, "oneOf", 2),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf", 1),
    ({"oneOf": [named(a=INTEGER), {"type": "object", "properties": {"a": INTEGER}}]}, "oneOf", {"a": 1}),
    ({"$ref": "#/$defs/s", "$defs": {"s": STRING}, "maxLength": 2}, "maxLength", "abc"),
    ({"$ref": "#/$defs/s", "$defs": {"s": STRING}, "type": "integer"}, "type", "abc"),
    ({"minLength": 3}, "minLength", "x"),
    ({"minimum": 3}, "minimum", 1),
    ({"pattern": "^x$"}, "pattern", "y"),
]  # fmt: skip
REFUSED_THERE: list[tuple[Any, str, str]] = [
    (named(a={"type": "array", "items": STRING, "uniqueItems": True}), "uniqueItems", "#/properties/a"),
    (named(**{"a/b": {"not": {}}}), "not", "#/properties/a~1b"),
    ({"anyOf": [{"type": "null"}, {"allOf": [STRING, INTEGER]}]}, "allOf", "#/anyOf/1"),
    ({"$ref": "#/$defs/s", "$defs": {"s": {"type": "string", "not": {}}}}, "not", "#/$defs/s"),
    ({"type": "array", "prefixItems": [INTEGER, {"not": {}}]}, "not", "#/prefixItems/1"),
    ({"type": "array", "items": {"if": {}}}, "if", "#/items"),
    ({"type": "object", "additionalProperties": {"not": {}}}, "not", "#/additionalProperties"),
    ({"type": "object", "patternProperties": {"^x": {"not": {}}}}, "not", "#/patternProperties/^x"),
    ({"type": "object", "propertyNames": {"pattern": "(?=x)"}}, "pattern", "#/propertyNames"),
    ({"$ref": "https://example.com/x.json"}, "$ref", "#"),
    ({"$ref": "#/$defs/missing"}, "$ref", "#"),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER, "a~1b": STRING}}, "$ref", "#"),
    # the names' schema is made for the check, and freed
    (named(g1={"type": "object", "propertyNames": {}}, g0={"type": "object", "propertyNames": {}},
           b={"type": "object", "propertyNames": {"pattern": "^(?=a)b$"}}), "pattern", "#/properties/b/propertyNames"),
    (named(b={"type": "object", "propertyNames": {"pattern": "^(?=a)b$"}}, g0={"type": "object", "propertyNames": {}},
           g1={"type": "object", "propertyNames": {}}), "pattern", "#/properties/b/propertyNames"),
    ({"$dynamicRef": "#a"}, "$dynamicRef", "#"),
    (named(a={"$id": "x", "type": "string"}), "$id", "#/properties/a"),
    ({"type": "string", "format": "ipv9"}, "format", "#"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), KEPT)
def test_enforced_schemas(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    check_schema(schema, "x")
    grammar = compiled(schema)
    for value in valid:
        assert is_valid(schema, value)
        assert allows(grammar, value), value
    for value in invalid:
        assert not is_valid(schema, json.loads(value) if isinstance(value, str) and value[:1] == "{" else value)
        assert not allows(grammar, value), value


@pytest.mark.parametrize(("schema", "valid", "invalid"), KEPT)
def test_random_texts_of_the_grammar_are_valid(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    for text in samples(compiled(schema), random.Random(1), 30):
        if "Infinity" not in json.dumps(json.loads(text)):  # Python has no number as large as 4e663
            assert is_valid(schema, json.loads(text)), text


@pytest.mark.parametrize(("schema", "keyword", "value"), REFUSED)
def test_refused_schemas_would_not_be_enforced(schema: Any, keyword: str, value: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=f"the keyword '{keyword}' at # of the JSON schema can't be enforced"
    ) as caught:
        check_schema(schema, "field")
    assert caught.value.param == "field"
    if value is not None:
        assert not is_valid(schema, json.loads(value) if isinstance(value, str) and value[:1] == "{" else value)
        assert allows(compiled(schema), value), "xgrammar keeps to it now: take it off the table"


@pytest.mark.parametrize(("schema", "keyword", "place"), REFUSED_THERE)
def test_the_path_is_named(schema: Any, keyword: str, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(schema, "field")
    assert f"the keyword {keyword!r} at {place} of the JSON schema" in str(caught.value)


NEARLY = {"date", "date-time", "duration", "email", "ipv4", "time"}
"""Formats of which a little more is allowed: the 31st of each month, a leap second at any time, numbers of an address
with leading zeros, long names, parts of a duration that don't follow on each other."""


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_are_enforced(name: str) -> None:
    schema = {"type": "string", "format": name}
    check_schema(schema, "x")
    grammar = compiled(schema)
    assert not allows(grammar, "\\ {nope")
    assert not allows(grammar, "") or name in MAY_BE_EMPTY
    assert samples(grammar, random.Random(1), 10)
    for text in samples(grammar, random.Random(2), 100):
        assert is_valid(schema, json.loads(text)) or name in NEARLY, text


def test_regexes() -> None:
    for pattern in (
        *("^a|b$", r"[\^$(?=]+", r"\(\?=a\^", "(^a$|^b$)", "(?:^a)", "(?:^a)?b", "((^a)|b)c(d$|e)"),
        *(r"\d\w[\s\S]\.\-[\b]", r"\u0041\x41\u{41}\cA\0"),
    ):
        check_regex(pattern, "x")
    for pattern in (
        "(?=a)a",
        "a(?!b)",
        "(?<=a)b",
        "(?<!a)b",
        "a^b",
        "a$b",
        r"\Aa\Z",
        r"[\A]",
        "a:^b",
        "a(^b)",
        "(a$)b",
        "(^a)+",
        "(a$)+",
        r"[\p{L}]",
    ):
        with pytest.raises(InvalidRequest, match="the regex can't be enforced"):
            check_regex(pattern, "x")


KEYWORDS = st.sampled_from(
    sorted({keyword for schema, *_ in [*KEPT, *REFUSED] if isinstance(schema, dict) for keyword in schema})
)
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 2.5, -3, 10**400, float("inf"), float("nan"), "", "a", "#", "#/a", "^a$",
                     "string", "object", "array", "integer", "number", "(?=a)", "date"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.one_of(KEYWORDS, st.sampled_from(["a", "b"])), inner, max_size=4),
)  # fmt: skip


@settings(max_examples=500)
@given(VALUES)
def test_any_json_is_accepted_or_refused(schema: Any) -> None:
    try:
        check_schema(schema, "x")
    except InvalidRequest as error:
        assert "can't be enforced" in str(error)


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


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(SCHEMAS, st.integers(0, 2**32))
def test_accepted_schemas_are_enforced(schema: Any, seed: int) -> None:
    try:
        check_schema(schema, "x")
        grammar = compiled(schema)
    except (InvalidRequest, RuntimeError):
        return
    for text in samples(grammar, random.Random(seed), 5):
        if "Infinity" not in json.dumps(json.loads(text)):
            assert is_valid(schema, json.loads(text)), text


MANY = [f"p{number}" for number in range(1200)]
LARGE: dict[str, Any] = {
    "one object many times": {
        "oneOf": [{"$ref": "#/$defs/a"}] * 1500,
        "$defs": {"a": named(**{name: {"const": 1} for name in MANY})},
    },
    "many alternatives of two": {
        "type": "object",
        "properties": {name: {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} for name in MANY},
        "$defs": {
            "a": named(**{name: {"enum": ["a", "c"]} for name in MANY[:900]}),
            "b": named(**{name: {"enum": ["b", "c"]} for name in MANY[:900]}),
        },
    },
    "many schemas": {"type": "object", "properties": {str(number): {} for number in range(9000)}},
    "many values": {"oneOf": [{"enum": list(range(20_000))}, {"enum": list(range(20_000, 24_000))}]},
    "many patterns": {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": "(^" * 25} for name in MANY},
    },
    "a pattern": {"type": "string", "pattern": "(a*)*" * 13_000},
    "a class": {"type": "string", "pattern": "[" * 65_000},
    "counts": {"type": "string", "pattern": "{1" * 32_000},
    "groups": {"type": "string", "pattern": "(?<a" * 16_000},
    "a value of many names": {
        "type": "object",
        "properties": {name: {"oneOf": [{"$ref": "#/$defs/a"}, {"const": 1}]} for name in MANY},
        "$defs": {"a": {"const": dict.fromkeys(MANY, 1)}},
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_no_check_takes_long(name: str) -> None:
    def check() -> None:
        with contextlib.suppress(InvalidRequest):
            check_schema(LARGE[name], "x")

    # 0.03 at most on an idle machine; twice that where another process has the other half of the core
    assert min(cpu_seconds(check) for _ in range(5)) < 0.1


def test_the_cost_of_a_path_does_not_depend_on_its_depth() -> None:
    schema: Any = {"type": "object", "properties": {str(number): {} for number in range(5000)}}
    for _ in range(900):
        schema = {"type": "object", "properties": {"a" * 64: schema}}
    assert min(cpu_seconds(lambda: check_schema(schema, "x")) for _ in range(3)) < 0.1


def test_a_schema_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too large to check"):
        check_schema({"type": "object", "properties": {str(number): {} for number in range(20_000)}}, "x")
