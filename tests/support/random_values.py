"""Values for fields, within their bounds and at them, from the JSON schemas of the service's own OpenAPI document: so
a new field is covered as soon as it is there."""

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

TEXTS = ["", "a", "a red circle", "héllo 🎉 世", "\x00", "\u2028", "<|im_end|>", "{", '"', " ", "x" * 300]
ODD_NUMBERS = [0.0, 5e-324, 1e-300, 1e-45, 1e-38, 1e-10, 1e-5, 0.009999, 0.01, 0.3, 0.999999, 1.0, 1.5, -1.0, 7.0, 1e9]
ODD_INTEGERS = [0, 1, 2, 3, 5, 17, 64, 255, 2**31 - 1, -1]


class Values:
    """Draws from ``random``. ``fixed`` has, by a field's name, what its values are instead of what its schema allows:
    for fields of which most allowed values would be refused, or take long."""

    def __init__(self, random: Random, document: Mapping[str, Any], fixed: Mapping[str, Callable[[], Any]]) -> None:
        self._random = random
        self._schemas = document["components"]["schemas"]
        self._fixed = fixed

    def fields(self, name: str) -> dict[str, Any]:
        """The schemas of an object's fields."""
        properties: dict[str, Any] = self._schemas[name]["properties"]
        return properties

    def field(self, name: str, schema: Mapping[str, Any]) -> Any:
        return self._fixed[name]() if name in self._fixed else self.of(schema)

    def of(self, schema: Mapping[str, Any]) -> Any:
        """A value that the schema allows."""
        if "$ref" in schema:
            return self.of(self._schemas[schema["$ref"].rpartition("/")[2]])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.of(self._random.choice(schema[union]))
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        kind = schema.get("type", "null")
        if isinstance(kind, list):
            return self.of({**schema, "type": self._random.choice(kind)})
        makers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "number": self._number,
            "integer": self._integer,
            "string": self._string,
            "array": self._array,
            "object": self._object,
            "boolean": lambda _: self._random.random() < 0.5,
            "null": lambda _: None,
        }
        return makers[kind](schema)

    def _number(self, schema: Mapping[str, Any]) -> float:
        low, high = schema.get("minimum", -1e12), schema.get("maximum", 1e12)
        if "exclusiveMinimum" in schema:
            low = math.nextafter(schema["exclusiveMinimum"], math.inf)
        if "exclusiveMaximum" in schema:
            high = math.nextafter(schema["exclusiveMaximum"], -math.inf)
        between = [self._random.uniform(low, high), math.nextafter(low, high), math.nextafter(high, low)]
        return self._random.choice([low, high, *between, *(one for one in ODD_NUMBERS if low <= one <= high)])

    def _integer(self, schema: Mapping[str, Any]) -> int:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -(2**53)) + ("exclusiveMinimum" in schema))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 2**53) - ("exclusiveMaximum" in schema))
        small = self._random.randint(int(low), int(min(high, low + 8)))
        return self._random.choice([int(low), int(high), small, *(one for one in ODD_INTEGERS if low <= one <= high)])

    def _string(self, schema: Mapping[str, Any]) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength", 1000)
        if "pattern" in schema:
            return "7"  # matches those that there are; the service's refusal would tell of one that it doesn't
        return self._random.choice([text for text in [*TEXTS, "b" * low, "c" * high] if low <= len(text) <= high])

    def _array(self, schema: Mapping[str, Any]) -> list[Any]:
        low, high = schema.get("minItems", 0), schema.get("maxItems", 4)
        length = self._random.choice([low, min(high, low + 1), min(high, low + 3), min(high, 300)])
        return [self.of(schema.get("items", {"type": "null"})) for _ in range(length)]

    def _object(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        required = schema.get("required", [])
        return {
            name: self.field(name, of_field)
            for name, of_field in schema.get("properties", {}).items()
            if name in required or self._random.random() < 0.3
        }
