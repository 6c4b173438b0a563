"""What clients send to ``/v1/chat/completions``: OpenAI's API, with vLLM's extensions. The rules: ``fields.py``."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from triptych.api.fields import (
    ALLOWED,
    ARRAY,
    NAMED,
    STRING,
    Effort,
    JsonObject,
    MaxTokens,
    Metadata,
    Name,
    SamplingFields,
    Strict,
    Verbosity,
    string_or_array,
    tool_choice,
)
from triptych.api.values import check_values
from triptych.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_FRAMES = 768
MAX_TOOLS = 128
MAX_PIXELS_LIMIT = 2**31
MAX_TEMPLATE_VARIABLES = 32
MAX_SCALAR = 1024
MAX_NUMBER = 2**63


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────


class TextPart(Strict):
    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageURL(Strict):
    """``detail`` low bounds the image's area at 512 × 512 pixels; otherwise the model's own rule decides."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Strict):
    """With a ``uuid`` the image is remembered under that name for whoever has the same API key, and may be left out
    (``image_url: null``) when it is referred to again."""

    type: Literal["image_url"]
    image_url: ImageURL | None
    uuid: Name | None = None


class VideoURL(Strict):
    url: str


class VideoPart(Strict):
    """``uuid`` as an image has it."""

    type: Literal["video_url"]
    video_url: VideoURL | None
    uuid: Name | None = None


class FramesPart(Strict):
    """A video as its frames' URLs, in the order of display; ``fps`` is how many of them make up a second."""

    type: Literal["video"]
    video: list[str] = Field(min_length=1, max_length=MAX_FRAMES)
    fps: float = Field(2.0, gt=0, le=1000)


class AudioURL(Strict):
    url: str


class AudioPart(Strict):
    """``uuid`` as an image has it."""

    type: Literal["audio_url"]
    audio_url: AudioURL | None
    uuid: Name | None = None


class InputAudio(Strict):
    """``data`` is a file in base64. What the file itself says goes before ``format``."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus"]


class InputAudioPart(Strict):
    """Audio as OpenAI's API has it; ``uuid`` as an image has it."""

    type: Literal["input_audio"]
    input_audio: InputAudio | None
    uuid: Name | None = None


WordsPart = TextPart | RefusalPart
Part = Annotated[
    TextPart | RefusalPart | ImagePart | VideoPart | FramesPart | AudioPart | InputAudioPart,
    Field(discriminator="type"),
]
NamedPart = ImagePart | VideoPart | AudioPart | InputAudioPart
"""Those that may be left out when they are referred to by their uuid."""


class FunctionCall(Strict):
    """``arguments`` is JSON."""

    name: Name
    arguments: str


class ToolCall(Strict):
    """``index`` is what streams have; clients that put a message together from one may send it back."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Strict):
    """``tool_calls`` are an assistant's, ``tool_call_id`` says which of them a tool's message answers; ``refusal`` is
    what an assistant said in place of ``content``. What is None here is what OpenAI's client sends along when it sends
    an answer back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag(STRING)] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag(ARRAY)],
            string_or_array("content parts"),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Function(Strict):
    """``parameters`` is a JSON schema; ``strict`` holds the arguments to it even where the model may choose to call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolChoice(Strict):
    """Of the tools, the model is told of these alone; ``mode`` is the choice among them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(STRING)]
    | Annotated[NamedTool, Tag(NAMED)]
    | Annotated[AllowedToolChoice, Tag(ALLOWED)],
    tool_choice(),
]


def _scalar(value: Any) -> Any:
    is_small = abs(value) < MAX_NUMBER if isinstance(value, int | float) else value is None
    if not is_small and not (isinstance(value, str) and len(value) <= MAX_SCALAR):
        raise PydanticCustomError(
            "scalar", f"Input should be a string of up to {MAX_SCALAR} characters, a number below 2^63, a bool"
        )
    return value


Scalar = Annotated[
    Any,
    AfterValidator(_scalar),
    WithJsonSchema({"type": ["string", "number", "boolean", "null"], "maxLength": MAX_SCALAR}),
]


class ImageSize(Strict):
    """Bounds of a resized image's area in pixels, in the words of transformers' processor."""

    shortest_edge: int = Field(ge=1, le=MAX_PIXELS_LIMIT)
    longest_edge: int = Field(ge=1, le=MAX_PIXELS_LIMIT)


class MediaOptions(Strict):
    """vLLM's ``mm_processor_kwargs``: ``min_pixels`` and ``max_pixels``, or ``size``, bound the area that images are
    resized to, within the model's own bounds. ``fps`` and ``num_frames`` are about videos alone, and so is
    ``use_audio_in_video``: their sound is heard, too."""

    min_pixels: int | None = Field(None, ge=1, le=MAX_PIXELS_LIMIT)
    max_pixels: int | None = Field(None, ge=1, le=MAX_PIXELS_LIMIT)
    size: ImageSize | None = None
    fps: float | None = Field(None, ge=0.001, le=240.0)
    num_frames: int | None = Field(None, ge=1, le=2**16)
    use_audio_in_video: bool | None = None


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


class ConversationFields(Strict):
    """What a prompt is made of. ``chat_template_kwargs`` may set what the model's chat template reads."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[Name, Scalar] | None = Field(None, max_length=MAX_TEMPLATE_VARIABLES)
    mm_processor_kwargs: MediaOptions | None = None

    def check(self) -> None:
        super().check()
        for number, message in enumerate(self.messages):
            _check_message(message, f"messages[{number}]")
        # JSON within JSON, of which the body's own count says nothing
        check_values(*(call.function.arguments for message in self.messages for call in message.tool_calls or ()))
        if self.continue_final_message:
            self._check_continuing()
        names = [tool.function.name for tool in self.tools or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                where = f"tools[{number}].function.name"
                raise InvalidRequest(f"{where}: {name!r} is another tool's name, too", where)

    def _check_continuing(self) -> None:
        last = self.messages[-1]
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        text = last.content if isinstance(last.content, str) else _last_text(last.content)
        if last.role != "assistant" or last.tool_calls or not text or not text.strip():
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant that ends with text",
                "continue_final_message",
            )


class ChatCompletionRequest(ConversationFields, SamplingFields):
    """The body of ``POST /v1/chat/completions``."""

    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only for logprobs: true", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice is only for requests with tools", "tool_choice")
        known = {tool.function.name for tool in self.tools or ()}
        for where, name in self._chosen():
            if name not in known:
                raise InvalidRequest(f"{where}: no tool is called {name!r}", where)

    def _chosen(self) -> list[tuple[str, str]]:
        """The tools that ``tool_choice`` names, each with the field that does."""
        match self.tool_choice:
            case NamedTool(function=function):
                return [("tool_choice.function.name", function.name)]
            case AllowedToolChoice(allowed_tools=allowed):
                where = "tool_choice.allowed_tools.tools[{}].function.name"
                return [(where.format(number), one.function.name) for number, one in enumerate(allowed.tools)]
        return []

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        if not isinstance(self.tool_choice, AllowedToolChoice):
            return list(self.tools or ())
        allowed = {name for _, name in self._chosen()}
        return [tool for tool in self.tools or () if tool.function.name in allowed]

    @property
    def call_choice(self) -> str | NamedTool | None:
        """How the answer chooses among them."""
        choice = self.tool_choice
        return choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice


def _check_message(message: ChatMessage, path: str) -> None:
    may_be_empty = message.role == "assistant" and (message.tool_calls or message.refusal is not None)
    if message.content is None and not may_be_empty:
        given = "content" in message.model_fields_set
        what = "Input should be a valid string or an array of content parts" if given else "Field required"
        raise InvalidRequest(f"{path}.content: {what}", f"{path}.content")
    if message.role != "assistant":
        for field in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
            if getattr(message, field) is not None:
                raise InvalidRequest(f"{path}.{field} is only for messages of the assistant", f"{path}.{field}")
    elif message.content and message.refusal is not None:
        raise InvalidRequest(f"{path}.refusal: content and refusal exclude each other", f"{path}.refusal")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{path}.tool_call_id: Field required", f"{path}.tool_call_id")
    for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, NamedPart) and getattr(part, part.type) is None and part.uuid is None:
            where = f"{path}.content[{number}].{part.type}"
            raise InvalidRequest(f"{where} may only be null for media that are referred to by their uuid", where)
        if isinstance(part, RefusalPart) and message.role != "assistant":
            where = f"{path}.content[{number}].refusal"
            raise InvalidRequest(f"{where} is only for messages of the assistant", where)


def _last_text(parts: list[Part] | None) -> str:
    return parts[-1].text if parts and isinstance(parts[-1], WordsPart) else ""


def template_arguments(call: ToolCall) -> Any:
    """A call's arguments as chat templates take them: an object, unless the model that made the call got it wrong."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
    return arguments if isinstance(arguments, dict) else call.function.arguments
