"""What clients send: the subset of the OpenAI chat completions API that is honoured, with vLLM's extensions.

A field that isn't here is refused by name; one that can only have its neutral value says so in its type. Nothing is
silently dropped.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOKENS_LIMIT = 2**24


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
    content: str | list[Part]
    name: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False


class TextFormat(Strict):
    type: Literal["text"]


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class ChatCompletionRequest(Strict):
    """The body of ``POST /v1/chat/completions``."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS_LIMIT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS_LIMIT)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**20)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] | None = Field(None, max_length=256)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    response_format: TextFormat | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


def parse_chat_request(body: bytes) -> ChatCompletionRequest:
    """Raises InvalidRequest that names the first field at fault."""
    try:
        return ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise _invalid(details[0]) from None


def _invalid(detail: Any) -> InvalidRequest:
    param = _path(detail["loc"]) or None
    if detail["type"] == "json_invalid":
        return InvalidRequest("the body is not valid JSON")
    if detail["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown or unsupported field: {param}", param)
    return InvalidRequest(f"{param}: {detail['msg']}" if param else detail["msg"], param)


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content[1].text``; leaves out the names that pydantic gives to members of a union."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and not (path.endswith("]") and step in ("text", "image_url")) and step != "str":
            path += f".{step}" if path else step
    return path
