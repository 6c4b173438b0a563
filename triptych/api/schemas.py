"""Request schemas of ``/v1/chat/completions``: OpenAI's API with vLLM's extensions, by the rules of ``fields.py``."""

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from triptych.api import field_table
from triptych.api.fields import (
    ARRAY,
    MAX_TOKENS_LIMIT,
    STRING,
    MaxTokens,
    Name,
    ReasoningEffort,
    SamplingFields,
    StrictModel,
    string_or_array,
)
from triptych.api.json_limits import check_num_values
from triptych.api.part_forms import chat_part
from triptych.api.tool_schemas import (
    MAX_TOOLS,
    AllowedToolChoice,
    ChatCustomTool,
    ChatTool,
    EarlierCall,
    FunctionCall,
    NamedCustomTool,
    NamedTool,
    Tool,
    ToolChoice,
    functions_of,
)
from triptych.errors import InvalidRequest
from triptych.prompt.media import MAX_FRAMES

LEGACY_CALL_ID = "call"
"""The id of what ``function_call`` calls, and of the result of a message with the role ``function``."""
MAX_MESSAGES = 4096
MAX_GRID = 2**16
MAX_PARTS = 4096
FRAMES_PER_SECOND = 2.0
"""Rate of a list of frames that names none."""
MAX_TEMPLATE_VARIABLES = 32
MAX_MEDIA_OPTIONS = 32
MAX_SCALAR = 1024
MAX_NUMBER = 2**63


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────


class TextPart(StrictModel):
    rules = field_table.TEXT_PART
    type: Literal["text"]
    text: str


class RefusalPart(StrictModel):
    """A refusal of the assistant, in place of text."""

    rules = field_table.TEXT_PART
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ImageDetail = Literal["auto", "low", "high", "original"]
EMPTY_IS_NULL = BeforeValidator(lambda value: None if value == {} else value)
"""vLLM's clients send an empty object for media that a uuid stands for."""


class ImageURL(StrictModel):
    rules = field_table.MEDIA
    url: str
    detail: ImageDetail = "auto"
    """``low`` limits the image's area to 512 × 512 pixels; otherwise the model's own limit applies."""


class Base64Image(ImageURL):
    """An image whose ``url`` is its file in base64: the form of other APIs, which no chat has."""


class ImagePart(StrictModel):
    rules = field_table.IMAGE_PART
    type: Literal["image_url"]
    image_url: Annotated[ImageURL | None, EMPTY_IS_NULL]
    uuid: Name | None = None
    """Caches the image under this name for the same API key; later requests may then send ``image_url: null``."""


class ImageRows(StrictModel):
    rules = field_table.MEDIA
    image_embeds: str
    """Rows as ``/v1/encode`` gives them: a NumPy file in base64, float32 or float16 of shape (tokens, width)."""
    image_grid_thw: list[Annotated[int, Field(ge=1, le=MAX_GRID)]] = Field(min_length=3, max_length=3)


class ImageRowsPart(StrictModel):
    """An image's embedding in place of the image, in vLLM's form. Only with ``--enable-mm-embeds``."""

    rules = field_table.PART
    type: Literal["image_embeds"]
    image_embeds: ImageRows
    uuid: Name | None = None
    """Has no effect: equal rows have equal keys."""


class VideoURL(StrictModel):
    rules = field_table.MEDIA
    url: str


class VideoPart(StrictModel):
    rules = field_table.PART
    type: Literal["video_url"]
    video_url: Annotated[VideoURL | None, EMPTY_IS_NULL]
    uuid: Name | None = None
    """Like an image's."""


class FramesPart(StrictModel):
    """A video as a list of frames."""

    rules = field_table.PART
    type: Literal["video"]
    video: list[str] = Field(min_length=1, max_length=MAX_FRAMES)
    """URLs of the frames, in display order."""
    fps: float = Field(FRAMES_PER_SECOND, gt=0, le=1000)
    """Frames per second of the list."""


class AudioURL(StrictModel):
    rules = field_table.MEDIA
    url: str


class AudioPart(StrictModel):
    rules = field_table.PART
    type: Literal["audio_url"]
    audio_url: Annotated[AudioURL | None, EMPTY_IS_NULL]
    uuid: Name | None = None
    """Like an image's."""


AUDIO_FORMATS = [
    *("wav", "wave", "x-wav", "w64", "rf64", "aiff", "aif", "aifc", "au", "caf", "flac", "mp3", "mp2", "mpeg", "mpga"),
    *("aac", "adts", "m4a", "x-m4a", "mp4", "mov", "3gp", "ogg", "oga", "opus", "vorbis", "speex", "spx"),
    *("webm", "weba", "mkv", "mka", "matroska", "amr", "ac3", "ac-3", "eac3", "e-ac-3", "dts"),
]
"""Names of formats that are served: usual ones, files' extensions, and subtypes of MIME types."""


def _known_format(name: str) -> str:
    """Return the name of a format in small letters. Any case will do."""
    if name.lower() not in AUDIO_FORMATS:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(AUDIO_FORMATS)})
    return name.lower()


class InputAudio(StrictModel):
    rules = field_table.MEDIA
    data: str
    """A file in base64."""
    format: Annotated[str, AfterValidator(_known_format), WithJsonSchema({"type": "string", "enum": AUDIO_FORMATS})]
    """The file's own header decides what it is."""


class InputAudioPart(StrictModel):
    """Audio in OpenAI's format."""

    rules = field_table.PART
    type: Literal["input_audio"]
    input_audio: Annotated[InputAudio | None, EMPTY_IS_NULL]
    uuid: Name | None = None
    """Like an image's."""


class ThinkingPart(StrictModel):
    """Reasoning of an earlier answer, which becomes the message's ``reasoning_content``."""

    rules = field_table.THINKING_PART
    type: Literal["thinking", "reasoning"]
    thinking: (
        Annotated[
            Annotated[str, Tag(STRING)] | Annotated[list[TextPart], Field(max_length=MAX_PARTS), Tag(ARRAY)],
            string_or_array("texts"),
        ]
        | None
    ) = None
    text: str = ""

    @property
    def thought(self) -> str:
        said = self.thinking or self.text
        return said if isinstance(said, str) else "".join(part.text for part in said)


TextualPart = TextPart | RefusalPart | ThinkingPart
Part = (
    TextPart
    | RefusalPart
    | ImagePart
    | ImageRowsPart
    | VideoPart
    | FramesPart
    | AudioPart
    | InputAudioPart
    | ThinkingPart
)
SentPart = Annotated[Annotated[Part, Field(discriminator="type")], BeforeValidator(chat_part)]
UuidPart = ImagePart | VideoPart | AudioPart | InputAudioPart
"""Parts whose media may be null when they have a uuid."""


class ChatMessage(StrictModel):
    """One message, also an answer of OpenAI's that is sent back."""

    rules = field_table.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        Annotated[
            Annotated[str, Tag(STRING)] | Annotated[list[SentPart], Field(max_length=MAX_PARTS), Tag(ARRAY)],
            string_or_array("content parts"),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = Field(None, max_length=MAX_TOOLS)
    """Only of the assistant."""
    tool_call_id: Name | None = None
    """The call that a tool's message answers."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    """Only of the assistant, in place of ``content``."""
    function_call: FunctionCall | None = None
    """The only call of an assistant's message, as before ``tool_calls``; a message of the role ``function`` answers
    it."""

    @model_validator(mode="after")
    def _take_thoughts(self) -> Self:
        """Move reasoning out of the content."""
        parts = self.content if isinstance(self.content, list) else []
        thoughts = [part.thought for part in parts if isinstance(part, ThinkingPart)]
        if thoughts:
            self.content = [part for part in parts if not isinstance(part, ThinkingPart)]
            self.reasoning_content = self.reasoning_content or "".join(thoughts)
        return self

    def calls(self) -> list[tuple[str, FunctionCall]]:
        """Return the calls with their ids."""
        legacy = [] if self.function_call is None else [(LEGACY_CALL_ID, self.function_call)]
        return [*((call.id, call.function) for call in self.tool_calls or ()), *legacy]


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


def _option(value: Any) -> Any:
    for member in value.values() if isinstance(value, dict) else [value]:
        _scalar(member)
    return value


MediaOptions = Annotated[dict[Name, Annotated[Any, AfterValidator(_option)]], Field(max_length=MAX_MEDIA_OPTIONS)]
"""vLLM's ``mm_processor_kwargs``: the model's planner says which there are, and what their values may be."""


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


class ConversationFields(StrictModel):
    """The fields that a prompt is made from."""

    model: str | None = None
    """The only one by default."""
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[ChatTool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[Name, Scalar] | None = Field(None, max_length=MAX_TEMPLATE_VARIABLES)
    """Variables of the model's chat template."""
    mm_processor_kwargs: MediaOptions | None = None

    def check(self) -> None:
        super().check()
        _name_calls(self.messages)
        for number, message in enumerate(self.messages):
            _check_message(message, f"messages[{number}]")
        # arguments are JSON within strings, which the check of the body skips
        check_num_values(*(function.arguments or "" for message in self.messages for _, function in message.calls()))
        if self.continue_final_message:
            self._check_continuing()
        names = [tool.function.name for tool in self.functions]
        for number, (tool, name) in enumerate(zip(self.tools or (), names, strict=True)):
            if name in names[:number]:
                where = f"tools[{number}].{tool.type}.name"
                raise InvalidRequest(f"{where}: {name!r} is the name of another tool", where)

    @cached_property
    def functions(self) -> list[Tool]:
        """The functions that the model sees of the tools. Raises InvalidRequest for custom tools' grammars that can't
        be enforced."""
        return functions_of(self.tools or ())

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of custom tools."""
        return frozenset(tool.custom.name for tool in self.tools or () if isinstance(tool, ChatCustomTool))

    def _check_continuing(self) -> None:
        last = self.messages[-1]
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        text = last.content if isinstance(last.content, str) else _last_text(last.content)
        if not last.content:
            text = last.refusal or last.reasoning_content or last.reasoning or ""
        if last.role != "assistant" or last.tool_calls or last.function_call or not text.strip():
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant that ends with text",
                "continue_final_message",
            )


class ChatCompletionRequest(ConversationFields, SamplingFields):
    """The body of ``POST /v1/chat/completions``."""

    rules = field_table.CHAT
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_TOKENS_LIMIT)
    """Tokens of reasoning after which it is ended; -1 is no limit."""
    include_reasoning: bool = True
    """Whether the answer has the reasoning, which is generated in any case."""
    separate_reasoning: bool = True
    """Whether reasoning has a field of its own. Otherwise it is part of the text, as the model writes it."""

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only for logprobs: true", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice is only for requests with tools", "tool_choice")
        known = {(tool.type, one.function.name) for tool, one in zip(self.tools or (), self.functions, strict=True)}
        for where, tool in self._named_tools():
            if (tool.type, tool.name) not in known:
                raise InvalidRequest(f"{where}: Tool {tool.name!r} not found in tools list", where)

    def _named_tools(self) -> list[tuple[str, NamedTool | NamedCustomTool]]:
        """Return the path and the name of each tool that ``tool_choice`` names."""
        match self.tool_choice:
            case NamedTool() | NamedCustomTool() as named:
                return [(f"tool_choice.{named.type}.name", named)]
            case AllowedToolChoice(allowed_tools=allowed):
                where = "tool_choice.allowed_tools.tools[{}].{}.name"
                return [(where.format(number, one.type), one) for number, one in enumerate(allowed.tools)]
        return []

    @property
    def callable_tools(self) -> list[Tool]:
        """The functions that the answer may call."""
        if self.tool_choice == "none":
            return []
        if not isinstance(self.tool_choice, AllowedToolChoice):
            return self.functions
        allowed = {named.name for _, named in self._named_tools()}
        return [tool for tool in self.functions if tool.function.name in allowed]

    @property
    def named_tool(self) -> str | None:
        """The only tool that must be called."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedTool | NamedCustomTool) else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice
        return mode not in (None, "auto", "none")


def _name_calls(messages: list[ChatMessage]) -> None:
    """Give a tool's result that names no call the first call of the last answer that has no result yet."""
    unanswered: dict[str, None] = {}
    for message in messages:
        if message.role == "assistant":
            unanswered = {call_id: None for call_id, _ in message.calls()}
        elif message.role == "tool":
            if message.tool_call_id is None:
                message.tool_call_id = next(iter(unanswered), None)
            unanswered.pop(message.tool_call_id or "", None)


def _check_message(message: ChatMessage, path: str) -> None:
    thinks = message.refusal is not None or message.reasoning_content is not None or message.reasoning is not None
    may_be_empty = message.role == "assistant" and (message.tool_calls or message.function_call or thinks)
    if message.content is None and not may_be_empty:
        given = "content" in message.model_fields_set
        what = "Input should be a valid string or an array of content parts" if given else "Field required"
        raise InvalidRequest(f"{path}.content: {what}", f"{path}.content")
    if message.role != "assistant":
        for field in ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal"):
            if getattr(message, field) not in (None, []):
                raise InvalidRequest(f"{path}.{field} is only for messages of the assistant", f"{path}.{field}")
    elif message.content and message.refusal is not None:
        raise InvalidRequest(f"{path}.refusal: content and refusal exclude each other", f"{path}.refusal")
    elif message.tool_calls and message.function_call:
        raise InvalidRequest(f"{path}.function_call: tool_calls exclude it", f"{path}.function_call")
    if message.role == "function" and message.name is None:
        raise InvalidRequest(f"{path}.name: Field required", f"{path}.name")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{path}.tool_call_id: Field required", f"{path}.tool_call_id")
    for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, UuidPart) and getattr(part, part.type) is None and part.uuid is None:
            where = f"{path}.content[{number}].{part.type}"
            raise InvalidRequest(f"{where} may only be null if the part has a uuid", where)
        if isinstance(part, RefusalPart) and message.role != "assistant":
            where = f"{path}.content[{number}].refusal"
            raise InvalidRequest(f"{where} is only for messages of the assistant", where)


def _last_text(parts: list[Part] | None) -> str:
    return parts[-1].text if parts and isinstance(parts[-1], TextualPart) else ""
