"""What clients send: the subset of the OpenAI chat completions API that is honoured, with vLLM's extensions.

A field that isn't here is refused by name; one that can only have its neutral value says so in its type. Nothing is
silently dropped.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from triptych.errors import InvalidRequest
from triptych.messages.work import GrammarKind, GrammarSpec

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOKENS_LIMIT = 2**24
MAX_CHOICES = 64
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_GRAMMAR_LENGTH = 2**16
KEY = "[key]"
STRING, ARRAY = "<string>", "<array>"
"""Which member of "a string or an array" a value is judged as. Pydantic puts them into the paths of its errors."""


def _string_or_array(items: str) -> Discriminator:
    """Chooses by the value's type, so that an error is about what was sent and not about what else could have been."""
    return Discriminator(
        lambda value: STRING if isinstance(value, str) else ARRAY if isinstance(value, list) else None,
        custom_error_type="string_or_array",
        custom_error_message=f"Input should be a valid string or an array of {items}",
    )


class Strict(BaseModel):
    """No unknown fields and no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageURL(Strict):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"
    """Accepted and ignored, as in vLLM: the model's own rule decides the size."""


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag(ARRAY)],
        _string_or_array("content parts"),
    ]
    name: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """``strict`` is accepted and ignored: the schema is always kept to."""

    name: str = Field(max_length=256)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]


class StructuredOutputs(Strict):
    """vLLM's field of that name: exactly one of these."""

    json_: dict[str, Any] | GrammarText | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: GrammarText | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=1024)
    grammar: GrammarText | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[
    Annotated[StopString, Tag(STRING)] | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag(ARRAY)],
    _string_or_array("strings"),
]


Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
TopK = Annotated[int, Field(ge=-1, le=2**20)]
"""0 and -1: no limit."""
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token id as the key of a JSON object."""


class ChatCompletionRequest(Strict):
    """The body of ``POST /v1/chat/completions``."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS_LIMIT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS_LIMIT)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopStrings | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=256)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0)
    logit_bias: dict[TokenIdText, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(None, max_length=1024)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS_LIMIT)
    ignore_eos: bool = False
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """What form the answer must have. Raises InvalidRequest when the request doesn't say it in exactly one way."""
        specs = [*_of_format(self.response_format), *_of_structured(self.structured_outputs)]
        if len(specs) > 1:
            raise InvalidRequest("only one of response_format and the fields of structured_outputs can be given")
        if specs and len(specs[0].text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(f"the {specs[0].kind.value} exceeds {MAX_GRAMMAR_LENGTH} characters")
        return specs[0] if specs else None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


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


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """Raises InvalidRequest that names the first field at fault."""
    try:
        request = ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)[0]) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only for stream: true", "stream_options")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs is only for logprobs: true", "top_logprobs")
    return request


def _invalid(detail: Any) -> InvalidRequest:
    param = _path(detail["loc"]) or None
    match detail["type"]:
        case "json_invalid":
            return InvalidRequest("the body is not valid JSON")
        case "extra_forbidden":
            return InvalidRequest(f"unknown or unsupported field: {param or repr('')}", param)
        case "union_tag_invalid":
            tag, known = detail["ctx"]["tag"], detail["ctx"]["expected_tags"]
            return InvalidRequest(f"{param}.type: {tag!r} is not supported; use one of {known}", f"{param}.type")
        case "union_tag_not_found":
            return InvalidRequest(f"{param}.type: Field required", f"{param}.type")
    return InvalidRequest(f"{param}: {detail['msg']}" if param else detail["msg"], param)


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content[1].text``, without what pydantic adds: for members of unions STRING and ARRAY, and, behind
    the index of a content part, the part's type; for keys of objects KEY."""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in (STRING, ARRAY, KEY) and location[max(0, index - 3) : max(0, index - 1)] != ("content", ARRAY):
            path += f".{step}" if path else step
    return path
