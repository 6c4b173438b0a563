"""Requests of every kind to the three APIs that generate, with any of their fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.support.random_values import TEXTS, Values
from tests.support.serving import image, image_part

SCHEMAS = {
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponsesRequest",
}
VOCABULARY = 264
MAX_NEW = 60
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS_TO_FOLLOW: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "boolean"},
    PERSON,
    {"type": "array", "items": PERSON, "maxItems": 3},
    {"enum": ["red", "green", "a blue square"]},
    {"type": "string", "pattern": "^[a-z]{1,4}$"},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "pattern": "^[a-z]{1,4}$", "minLength": 30},
    {"not": {"const": "red"}},
    {"allOf": [{"type": "string"}, {"minLength": 3}]},
    {"$ref": "#"},
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {},
]
REGEXES = [
    "[a-z]{1,40}",
    "a",
    "(yes|no)",
    r"[^\s\S]",
    r"\d{3}-\d{4}",
    "(a*)*(a*)*(a*)*b",
    r"([a-z]+ ?)+\.",
    "(a|b)*c{1,2000}",
    "(",
    "",
]
GRAMMARS = [
    'root ::= "yes" | "no"',
    "root ::= root",
    'root ::= "a" b\nb ::= b "c"',
    'root ::= x\nx ::= "a" x | ""',
    "root",
]
TOOL = {"name": "look_up", "description": "Looks a person up.", "parameters": PERSON}


@dataclass(frozen=True)
class Request:
    """``leaves_after`` is how many lines of a streamed answer its client reads before it goes; None: it stays. One
    that leaves waits ``seconds`` for an answer that isn't streamed."""

    path: str
    body: dict[str, Any]
    leaves_after: int | None = None
    seconds: float = 0.0


class Requests:
    """Random ones, from a service's OpenAPI document. ``takes_media``: with pictures among them."""

    def __init__(self, random: Random, document: Mapping[str, Any], model: str, *, takes_media: bool) -> None:
        self._random = random
        self._model = model
        self._takes_media = takes_media
        choice = random.choice
        new = [1, 2, 7, MAX_NEW]
        self._values = Values(
            random,
            document,
            {
                "model": lambda: model,
                "max_tokens": lambda: choice([*new, 0, 2**24]),
                "max_completion_tokens": lambda: choice([*new, 2**24]),
                "max_output_tokens": lambda: choice([*new, 2**24]),
                "min_tokens": lambda: choice([0, 1, 5, MAX_NEW, 2**24]),
                "n": lambda: choice([1, 2, 3, 8]),
                "best_of": lambda: choice([1, 2]),
                "timeout": lambda: choice([5e-324, 0.01, 30.0, 86_400.0]),
                "stop_token_ids": lambda: random.sample(range(VOCABULARY), choice([0, 1, 8, 256])),
                "logit_bias": self._bias,
                "structured_outputs": self._structured,
                "response_format": self._format,
                "text": lambda: {"format": choice([{"type": "text"}, {"type": "json_object"}, self._schema_format()])},
                "tool_choice": lambda: choice(["none", "auto", "required", {"type": "function", "name": "look_up"}]),
                "stop": lambda: choice(["a", " ", ["e", "r", "the"], "\x00", ["zzz"] * 16, "q" * 256, []]),
                "chat_template_kwargs": lambda: choice([{}, {"enable_thinking": False}, {"x": 1}]),
                "mm_processor_kwargs": lambda: choice([{}, {"max_pixels": 4096}, {"min_pixels": 1}, {"fps": 2.0}]),
                "messages": self._messages,
                "input": self._input,
                "prompt": self._prompt,
            },
        )

    def one(self) -> Request:
        random = self._random
        path = random.choice(list(SCHEMAS))
        fields = self._values.fields(SCHEMAS[path])
        body = self._base(path)
        for name in random.sample(sorted(fields), random.choice([0, 1, 2, 3, 5, 8])):
            body[name] = self._values.field(name, fields[name])
        if random.random() < 0.15:
            body |= self._tools(path)
        if random.random() < 0.5:
            body["stream"] = True
        leaves = random.choice([0, 1, 3]) if random.random() < 0.15 else None
        return Request(path, body, leaves, random.choice([0.01, 0.1, 0.5]))

    def _base(self, path: str) -> dict[str, Any]:
        length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        names = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
        return {"model": self._model, names[path]: self._values.field(names[path], {}), length: MAX_NEW}

    def _tools(self, path: str) -> dict[str, Any]:
        if path == "/v1/completions":
            return {}
        strict = {"strict": self._random.random() < 0.5}
        if path == "/v1/responses":
            return {"tools": [{"type": "function"} | TOOL | strict]}
        return {"tools": [{"type": "function", "function": TOOL | strict}]}

    def _text(self) -> str:
        return self._random.choice([text for text in TEXTS if text])

    def _messages(self) -> list[dict[str, Any]]:
        content: Any = self._text()
        if self._takes_media and self._random.random() < 0.5:
            picture = image(64, 64 + 32 * self._random.randrange(3), self._random.randrange(10_000))
            content = [image_part(picture), {"type": "text", "text": content}]
        return [{"role": "user", "content": content}]

    def _input(self) -> Any:
        items = [{"role": "user", "content": [{"type": "input_text", "text": self._text()}]}]
        return self._random.choice([self._text(), items])

    def _prompt(self) -> Any:
        tokens = [self._random.randrange(VOCABULARY) for _ in range(self._random.choice([1, 40]))]
        return self._random.choice([self._text(), [self._text(), self._text()], tokens, [tokens, tokens[:1]], "", []])

    def _bias(self) -> dict[str, float]:
        tokens = self._random.sample(range(VOCABULARY), self._random.choice([0, 1, 5, VOCABULARY]))
        return {str(token): self._random.choice([-100.0, 100.0, 1e-45, 0.0, 5.5]) for token in tokens}

    def _schema_format(self) -> dict[str, Any]:
        return {"type": "json_schema", "name": "answer", "schema": self._random.choice(SCHEMAS_TO_FOLLOW)}

    def _format(self) -> dict[str, Any]:
        schema = {"name": "answer", "schema": self._random.choice(SCHEMAS_TO_FOLLOW), "strict": True}
        return self._random.choice(
            [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": schema}]
        )

    def _structured(self) -> dict[str, Any]:
        choice = self._random.choice
        return choice(
            [
                {"regex": choice(REGEXES)},
                {"grammar": choice(GRAMMARS)},
                {"choice": choice([["yes", "no"], ["a"], ["x" * 500]])},
                {"json": choice(SCHEMAS_TO_FOLLOW)},
                {"json_object": True},
            ]
        )
