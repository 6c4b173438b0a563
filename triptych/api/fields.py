"""Fields that bodies of several endpoints have: how tokens are chosen, when an answer ends, what form it has.

A field that a body's class doesn't have is refused by name; one that can only have its neutral value says so in its
type. Nothing is silently dropped.
"""

import contextlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from triptych.api.json_schema import check_regex, check_schema
from triptych.errors import InvalidRequest
from triptych.messages.work import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    GrammarKind,
    GrammarSpec,
)

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOKENS_LIMIT = 2**24
MAX_CHOICES = 64
MAX_GRAMMAR_LENGTH = 2**16
MAX_NAME = 128
MAX_TIMEOUT = 86_400.0
STRING, ARRAY, OBJECT = "<string>", "<array>", "<object>"
TEXTS, TOKENS, TOKEN_LISTS = "<texts>", "<tokens>", "<token lists>"
MESSAGE, CALL, OUTPUT, THOUGHT = "<message>", "<call>", "<output>", "<thought>"
NAMED, ALLOWED = "<named>", "<allowed>"
UNION_MEMBERS = (STRING, ARRAY, OBJECT, TEXTS, TOKENS, TOKEN_LISTS, MESSAGE, CALL, OUTPUT, THOUGHT, NAMED, ALLOWED)
"""Which member of a union, such as "a string or an array", a value is judged as. Pydantic puts them into the paths of
its errors."""


def string_or_array(items: str) -> Discriminator:
    """Chooses by the value's type, so that an error is about what was sent and not about what else could have been."""
    return Discriminator(
        lambda value: STRING if isinstance(value, str) else ARRAY if isinstance(value, list) else None,
        custom_error_type="string_or_array",
        custom_error_message=f"Input should be a valid string or an array of {items}",
    )


def string_or_object() -> Discriminator:
    return Discriminator(
        lambda value: STRING if isinstance(value, str) else OBJECT if isinstance(value, dict | BaseModel) else None,
        custom_error_type="string_or_object",
        custom_error_message="Input should be a valid string or an object",
    )


def tool_choice() -> Discriminator:
    """Tells apart a word, the one tool that is to be called, and those that may be."""

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


class Strict(BaseModel):
    """No unknown fields and no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raises InvalidRequest for fields that contradict each other."""


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; its parser takes them all the same, and numbers beyond float64 as infinity."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, float) and not math.isfinite(one):
            raise PydanticCustomError("finite_number", "Input should have finite numbers alone")
        pending += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Of any form."""


class StreamOptions(Strict):
    """``include_usage`` puts the usage into a last chunk of its own; ``continuous_usage_stats``, as in vLLM, what it
    is so far into every chunk. Padding against observers of a stream's sizes isn't made."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """``strict`` is accepted and ignored: the schema is always kept to, and refused if it can't be."""

    name: str = Field(max_length=256)
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]


class StructuredOutputs(Strict):
    """vLLM's field of that name: exactly one of these."""

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
"""Smaller ones but 0 count as this one, as in vLLM."""


def _usable(temperature: float) -> float:
    return max(temperature, MIN_TEMPERATURE) if temperature else 0.0


Temperature = Annotated[
    float,
    Field(
        ge=0.0,
        le=MAX_TEMPERATURE,
        description=f"0 is greedy; between 0 and {MIN_TEMPERATURE:g} it counts as {MIN_TEMPERATURE:g}",
    ),
    AfterValidator(_usable),
]
TopP = Annotated[float, Field(gt=0.0, le=1.0, description="However small, the likeliest token stays")]
TopK = Annotated[int, Field(ge=-1, le=2**20, description="0 and -1: no limit")]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[
    float,
    Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, description="1: none. Beyond the bounds float32 ends"),
]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MAX_TOKEN_IDS = 2**19
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
"""Of a million that are wrong, the first is told: to tell of each takes seconds, which everybody would wait."""
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token id as the key of a JSON object."""
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
"""What clients call something of theirs. Bounded, because it is kept or looked up."""
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)]
Metadata = Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)]
"""What clients note of a request for themselves."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["medium"]
"""What is neither low nor high: how much a model says can't be set."""


class ExtraFields(Strict):
    """What every endpoint that generates takes beyond OpenAI's fields for it, under vLLM's names.

    ``session_id`` says who asks, and changes nothing about the answer. ``prompt_cache_key`` is OpenAI's hint which
    requests begin alike: here all that do share what is known of their beginning, whatever their key, unless
    ``cache_salt`` keeps them apart."""

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenIdText, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None = Field(
        None, max_length=1024
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="-1: any, as if there were none")
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
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    session_id: Name | None = None
    priority: int | None = Field(None, ge=0, le=2**31 - 1)
    """Lower goes first. Clients can only step back: whoever could go before all others would."""
    timeout: float | None = Field(None, gt=0.0, le=MAX_TIMEOUT)
    """Seconds from the request's arrival until it fails, if it isn't done by then; the header X-Request-Timeout says
    the same. Never more than the service's own limit."""


class SamplingFields(ExtraFields):
    """What chats and completions have in common.

    ``user`` and ``safety_identifier`` say who asks, and change nothing about the answer."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    service_tier: Literal["auto", "default"] | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    """The log probability of each token of the prompt, and of so many of the likeliest in its place, as in vLLM."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def form(self) -> GrammarSpec | None:
        """What form the answer's text must have. Raises InvalidRequest when the request doesn't say it in exactly one
        way."""
        specs = [*_of_format(self.response_format), *_of_structured(self.structured_outputs)]
        if len(specs) > 1:
            raise InvalidRequest("only one of response_format and the fields of structured_outputs can be given")
        param = "response_format.json_schema.schema" if self.response_format else "structured_outputs"
        if specs and len(specs[0].text) > MAX_GRAMMAR_LENGTH:  # before the checks, which take as long as it is
            raise InvalidRequest(f"the {specs[0].kind.value} exceeds {MAX_GRAMMAR_LENGTH} characters")
        for spec in specs:
            check_kept(spec, param)
        return specs[0] if specs else None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs are not told in streams", "prompt_logprobs")


def check_kept(spec: GrammarSpec, param: str) -> None:
    """Raises InvalidRequest for a schema or a regular expression of which something would be ignored. What is none at
    all is found when it is compiled."""
    if spec.kind is GrammarKind.REGEX:
        check_regex(spec.text, f"{param}.regex")
    elif spec.kind is GrammarKind.JSON_SCHEMA:
        with contextlib.suppress(ValueError, RecursionError):
            check_schema(json.loads(spec.text), param if "schema" in param else f"{param}.json")


def _of_format(response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> list[GrammarSpec]:
    match response_format:
        case JsonObjectFormat():
            return [GrammarSpec(GrammarKind.JSON_OBJECT, "")]
        case JsonSchemaFormat(json_schema=wanted):
            return [GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(wanted.schema_))]
    return []


def _of_structured(wanted: StructuredOutputs | None) -> list[GrammarSpec]:
    if wanted is None:
        return []
    schema = json.dumps(wanted.json_) if isinstance(wanted.json_, dict) else wanted.json_
    texts = {
        GrammarKind.JSON_SCHEMA: schema,
        GrammarKind.JSON_OBJECT: "" if wanted.json_object else None,
        GrammarKind.REGEX: wanted.regex,
        GrammarKind.CHOICE: json.dumps(wanted.choice) if wanted.choice else None,
        GrammarKind.GRAMMAR: wanted.grammar,
    }
    specs = [GrammarSpec(kind, text) for kind, text in texts.items() if text is not None]
    if not specs:
        raise InvalidRequest("structured_outputs says nothing", "structured_outputs")
    return specs
