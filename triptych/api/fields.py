"""Fields that several endpoints share: sampling, stop conditions and structured output.

Models have the fields that are served. ``field_table.py`` decides about all others.
"""

import json
import math
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from triptych.api import field_table
from triptych.api.field_rules import Rules, describe
from triptych.errors import InvalidRequest
from triptych.messages.work import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from triptych.prompt import ebnf, lark
from triptych.prompt.answer_grammar import GrammarPart

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOKENS_LIMIT = 2**24
MAX_CHOICES = 64
MAX_GRAMMAR_LENGTH = 2**16
_ANY_OBJECT = {"type": "object"}
MAX_NAME = 128
MAX_TIMEOUT = 86_400.0
MAX_PRIORITY = 2**31 - 1
STRING, ARRAY, OBJECT = "<string>", "<array>", "<object>"
TEXTS, TOKENS, TOKEN_LISTS = "<texts>", "<tokens>", "<token lists>"
NAMED, ALLOWED = "<named>", "<allowed>"
FUNCTION, CUSTOM, NAMESPACE, BUILT_IN = "<function>", "<custom>", "<namespace>", "<built-in>"
UNION_MEMBERS = (
    *(STRING, ARRAY, OBJECT, TEXTS, TOKENS, TOKEN_LISTS, NAMED, ALLOWED),
    *(FUNCTION, CUSTOM, NAMESPACE, BUILT_IN),
)
"""Tags of union members, such as "a string or an array". Pydantic adds them to the paths of its errors."""


def string_or_array(items: str) -> Discriminator:
    """Choose the union member by the value's type, so that an error only refers to that member."""
    return Discriminator(
        lambda value: STRING if isinstance(value, str) else ARRAY if isinstance(value, list) else None,
        custom_error_type="string_or_array",
        custom_error_message=f"Input should be a valid string or an array of {items}",
    )


def string_or_object() -> Discriminator:
    """Choose the union member by the value's type."""
    return Discriminator(
        lambda value: STRING if isinstance(value, str) else OBJECT if isinstance(value, dict | BaseModel) else None,
        custom_error_type="string_or_object",
        custom_error_message="Input should be a valid string or an object",
    )


def tool_choice() -> Discriminator:
    """Choose between a mode, one tool that must be called, and a list of allowed tools."""

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return STRING
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return ALLOWED if kind == "allowed_tools" else NAMED if isinstance(value, dict | BaseModel) else None

    return Discriminator(
        kind,
        custom_error_type="string_or_object",
        custom_error_message="Input should be a valid string or an object",
    )


class StrictModel(BaseModel):
    """Applies ``rules`` to fields that it doesn't have, and doesn't convert types. Null means the same as no value."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    rules: ClassVar[Rules] = Rules()

    @model_validator(mode="before")
    @classmethod
    def _apply_rules(cls, value: Any) -> Any:
        return cls.rules.apply(value, *_names(cls)) if isinstance(value, dict) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        made = handler(schema)
        whole = handler.resolve_ref_schema(made)
        described = {name: {"description": describe(rule)} for name, rule in cls.rules.by_name.items()}
        if described:
            whole["properties"] = described | whole.get("properties", {})
        if cls.rules.ignores_unknown:
            whole.pop("additionalProperties", None)
        return made

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""


@cache
def _names(kind: type[BaseModel]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of a model's fields in JSON, and of those that may be left out but don't take null."""
    known, not_null = set[str](), set[str]()
    for name, info in kind.model_fields.items():
        alias = info.validation_alias or name
        names = [str(one) for one in alias.choices] if isinstance(alias, AliasChoices) else [str(alias)]
        known.update(names)
        if not info.is_required() and not {None, NoneType, Any} & {info.annotation, *get_args(info.annotation)}:
            not_null.update(names)
    return frozenset(known), frozenset(not_null)


def _finite(value: Any) -> Any:
    """Reject NaN and infinity: JSON has neither, but the parser accepts them, and makes infinity of large numbers."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, float) and not math.isfinite(one):
            raise PydanticCustomError("finite_number", "Input should have finite numbers only")
        pending += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Any JSON object."""


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    rules = field_table.STREAM_OPTIONS
    include_usage: bool = False
    """Send the usage in a last chunk of its own."""
    continuous_usage_stats: bool = False
    """Send the usage so far in every chunk, as in vLLM; tokens without text have chunks, too. Only counts with
    ``include_usage``."""


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    rules = field_table.JSON_FORMAT
    type: Literal["json_object", "json"]
    schema_: JsonObject | None = Field(None, alias="schema")
    """Always enforced, as that of ``json_schema``."""


class JsonSchema(StrictModel):
    name: str | None = Field(None, max_length=256)
    schema_: JsonObject = Field(alias="schema")
    """Always enforced; rejected if it can't be."""
    description: str | None = None
    strict: bool | None = None
    """Has no effect, because the schema is always enforced."""


class JsonSchemaFormat(StrictModel):
    rules = field_table.SCHEMA_FORMAT
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]


class StructuredOutputs(StrictModel):
    """vLLM's field of that name: exactly one constraint."""

    json_: (
        Annotated[Annotated[GrammarText, Tag(STRING)] | Annotated[JsonObject, Tag(OBJECT)], string_or_object()] | None
    ) = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: GrammarText | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=1024)
    grammar: GrammarText | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[
    Annotated[StopString, Tag(STRING)] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag(ARRAY)],
    string_or_array("strings"),
]

MIN_TEMPERATURE = 0.01
"""Smaller values other than 0 are raised to this, as in vLLM."""


def _raised(temperature: float) -> float:
    return max(temperature, MIN_TEMPERATURE) if temperature else 0.0


Temperature = Annotated[
    float,
    Field(
        ge=0.0,
        le=MAX_TEMPERATURE,
        description=f"0 is greedy; values between 0 and {MIN_TEMPERATURE:g} are raised to {MIN_TEMPERATURE:g}",
    ),
    AfterValidator(_raised),
]
MIN_TOP_P = 2.0**-24
TopP = Annotated[
    float,
    Field(ge=0.0, le=1.0, description="The likeliest token is always kept"),
    AfterValidator(lambda top_p: max(top_p, MIN_TOP_P)),
]
TopK = Annotated[int, Field(ge=-1, le=2**20, description="0 and -1: no limit")]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[
    float,
    Field(
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="1: none. The bounds prevent overflow of float32",
    ),
]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAX_TOKEN_IDS = 2**19
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
"""Validation stops at the first error: reporting a million of them would block the event loop."""
TokenIdKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token id as the key of a JSON object."""
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
"""A name that a client chooses. Bounded, because it is stored or looked up."""
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)]
Metadata = Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)]
"""A client's own notes on a request; they have no effect."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["medium"]
"""Only the neutral value: the length of answers can't be set."""


class ExtraFields(StrictModel):
    """Fields that every generating endpoint has beyond OpenAI's, under vLLM's names."""

    rules = field_table.REQUEST
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenIdKey, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None = Field(
        None, max_length=1024
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="-1: random, as without a seed")
    stop: StopStrings | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS_LIMIT)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=256)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Name | None = None
    """Requests only share cached prefixes with requests of the same salt."""
    priority: int | None = Field(None, ge=0, le=MAX_PRIORITY)
    """Lower values are scheduled first. Clients can only lower their priority, because all would raise it."""
    timeout: float | None = Field(None, gt=0.0, le=MAX_TIMEOUT)
    """Deadline in seconds from the request's arrival, like the header X-Request-Timeout. The service's own limit still
    applies."""


class SamplingFields(ExtraFields):
    """Fields that chats and completions share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1)
    """Means the same as ``n``, because all choices are returned."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False
    """Return ``prompt_token_ids`` and each choice's ``token_ids``, as in vLLM. A stop token is among them."""
    return_tokens_as_token_ids: bool = False
    """Name tokens ``token_id:123`` in ``logprobs``, as in vLLM."""
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    """Return the log probability of each prompt token and of this number of likeliest alternatives, as in vLLM."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def is_constrained(self) -> bool:
        """Whether ``text_grammar`` is to be asked for."""
        return self.structured_outputs is not None or not isinstance(self.response_format, TextFormat | None)

    @property
    def text_grammar(self) -> GrammarPart | None:
        """The constraint on the answer's text. Raises InvalidRequest for several constraints, or one that isn't
        supported."""
        parts = [*_response_format_parts(self.response_format), *_structured_output_parts(self.structured_outputs)]
        if len(parts) > 1:
            names = [part.param for part in parts]
            raise InvalidRequest(f"only one of these can be given: {', '.join(map(str, names))}", names[1])
        for part in parts:
            if len(part.text) > MAX_GRAMMAR_LENGTH:
                raise InvalidRequest(f"the grammar exceeds {MAX_GRAMMAR_LENGTH} characters", part.param)
        return parts[0] if parts else None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of: must equal n, because all choices are returned", "best_of")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available with stream: true", "prompt_logprobs")


def _response_format_parts(chosen: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> Iterator[GrammarPart]:
    match chosen:
        case JsonObjectFormat(schema_=dict(schema)):
            yield GrammarPart("response_format.schema", lark.json_schema(schema, "response_format.schema"))
        case JsonObjectFormat():
            yield GrammarPart("response_format", lark.json_schema(_ANY_OBJECT))
        case JsonSchemaFormat(json_schema=json_schema):
            param = "response_format.json_schema.schema"
            yield GrammarPart(param, lark.json_schema(json_schema.schema_, param))


def _structured_output_parts(outputs: StructuredOutputs | None) -> list[GrammarPart]:
    if outputs is None:
        return []
    found = []
    if outputs.json_ is not None:
        param = "structured_outputs.json"
        found.append(GrammarPart(param, lark.json_schema(_schema(outputs.json_, param), param)))
    if outputs.json_object:
        found.append(GrammarPart("structured_outputs.json_object", lark.json_schema(_ANY_OBJECT)))
    if outputs.regex is not None:
        param = "structured_outputs.regex"
        found.append(GrammarPart(param, lark.regex(outputs.regex, param)))
    if outputs.choice:
        found.append(GrammarPart("structured_outputs.choice", lark.choice(outputs.choice)))
    if outputs.grammar is not None:
        param = "structured_outputs.grammar"
        text = ebnf.to_lark(outputs.grammar, param) if ebnf.is_ebnf(outputs.grammar) else outputs.grammar
        found.append(GrammarPart(param, text, is_expression=False))
    if not found:
        raise InvalidRequest("structured_outputs has no constraint", "structured_outputs")
    return found


def _schema(given: str | dict[str, Any], param: str) -> dict[str, Any]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} is not a JSON schema", param)
    return schema
