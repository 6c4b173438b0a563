"""Request schemas of ``/v1/responses``: the part of OpenAI's Responses API that needs no stored conversations.

Requests are converted to chat completion requests, so both are validated and served alike."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag

from triptych.api import schemas
from triptych.api.fields import (
    ALLOWED,
    ARRAY,
    MAX_TOKEN_IDS,
    NAMED,
    STRING,
    ExtraFields,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    MaxTokens,
    Metadata,
    Name,
    ReasoningEffort,
    StrictModel,
    Temperature,
    TextFormat,
    TopP,
    Verbosity,
    string_or_array,
    tool_choice,
)
from triptych.api.schemas import ChatCompletionRequest, ChatMessage, Function, ImagePart, Tool
from triptych.errors import InvalidRequest


class InputText(StrictModel):
    type: Literal["input_text"]
    text: str


class OutputText(StrictModel):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=MAX_TOKEN_IDS)


class InputImage(StrictModel):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] = "auto"
    file_id: None = None


class ResponsesInputAudio(StrictModel):
    """Audio in the format of chats."""

    type: Literal["input_audio"]
    input_audio: schemas.InputAudio


Refusal = schemas.RefusalPart
Part = Annotated[InputText | OutputText | Refusal | InputImage | ResponsesInputAudio, Field(discriminator="type")]
ToolPart = Annotated[InputText | InputImage, Field(discriminator="type")]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[Part], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("content parts"),
    ]
    id: Name | None = None
    status: Status | None = None
    phase: None = None


class FunctionCallItem(StrictModel):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    """JSON."""
    id: Name | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None
    runs_async: None = Field(None, validation_alias=AliasChoices("async", "async_"))


class FunctionOutputItem(StrictModel):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[ToolPart], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("content parts"),
    ]
    id: Name | None = None
    status: Status | None = None
    caller: None = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(None, max_length=schemas.MAX_PARTS)
    summary: list[Any] = Field(default_factory=list, max_length=0)
    id: Name | None = None
    status: Status | None = None
    encrypted_content: None = None


class ItemReference(StrictModel):
    """An item of an earlier answer, by its id."""

    type: Literal["item_reference"] | None = None
    id: Name


def _kind_of_item(value: Any) -> str | None:
    """Return an item's type, which messages and references may leave out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None and isinstance(value, dict):
        return "message" if "role" in value or "id" not in value else "item_reference"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of_item),
]


class _FunctionType(StrictModel):
    type: Literal["function"]


class FunctionTool(Function, _FunctionType):
    """A function that the answer may call."""

    # the order of the bases makes pydantic check the type first, so that errors name an unsupported type


class NamedFunctionTool(StrictModel):
    type: Literal["function"]
    name: Name


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class ResponsesAllowedToolChoice(StrictModel):
    """Restricts the prompt to these tools; ``mode`` is the choice among them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunctionTool] = Field(min_length=1, max_length=schemas.MAX_TOOLS)


class TextSettings(StrictModel):
    verbosity: Verbosity | None = None
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningSettings(StrictModel):
    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    """Answers have the full reasoning, never a summary."""
    generate_summary: None = None


class ResponsesStreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None
    """Padding of events isn't supported."""


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(STRING)]
    | Annotated[NamedFunctionTool, Tag(NAMED)]
    | Annotated[ResponsesAllowedToolChoice, Tag(ALLOWED)],
    tool_choice(),
]


class ResponsesRequest(ExtraFields):
    """The body of ``POST /v1/responses``. Responses aren't stored, so ``input`` must hold the whole conversation."""

    model: str
    input: Annotated[
        Annotated[str, Tag(STRING)]
        | Annotated[list[Item], Field(min_length=1, max_length=schemas.MAX_MESSAGES), Tag(ARRAY)],
        string_or_array("items"),
    ]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=schemas.MAX_TOOLS)
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=2**31 - 1)
    """Limits calls of built-in tools. Has no effect, because there are none."""
    metadata: Metadata | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, max_length=8
    )
    """``reasoning.encrypted_content`` has no effect, because items have the reasoning as text."""
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    """Answers say whether they are stored: never."""
    background: Literal[False] | None = None
    previous_response_id: Name | None = None
    conversation: None = None
    prompt: None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request."""
        return ChatCompletionRequest(
            model=self.model,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            stream=self.stream,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text.format) if self.text and self.text.format else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            **{name: getattr(self, name) for name in ExtraFields.model_fields if name in self.model_fields_set},
        )

    def check(self) -> None:
        super().check()
        if self.previous_response_id is not None:
            raise _not_stored("previous_response_id", self.previous_response_id, "previous_response_id")
        for number, item in enumerate(self.input):
            if isinstance(item, ItemReference):
                raise _not_stored("item_reference", item.id, f"input[{number}]")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidRequest("top_logprobs is only for include: message.output_text.logprobs", "top_logprobs")
        try:
            self.to_chat().check()
        except InvalidRequest as error:
            error.param = responses_param(error.param)
            raise

    def _messages(self) -> list[ChatMessage]:
        """Return the chat's messages; the reasoning, text and calls of one answer become one message."""
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, ChatMessage(role="user", content=self.input)]
        open_answer: ChatMessage | None = None
        for item in self.input:
            if isinstance(item, FunctionOutputItem):
                open_answer = None
                messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_output(item)))
            elif isinstance(item, InputMessage) and item.role != "assistant":
                open_answer = None
                messages.append(ChatMessage(role=item.role, content=_content(item)))
            elif not isinstance(item, ItemReference):
                if open_answer is None or _starts_message(open_answer, item):
                    open_answer = ChatMessage(role="assistant", content="")
                    messages.append(open_answer)
                _add(open_answer, item)
        return messages


def _not_stored(kind: str, name: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the {kind} {name!r} can't be resolved, because this service stores no responses; set store: false, "
        "and send the items themselves",
        param,
    )


def _starts_message(answer: ChatMessage, item: InputMessage | FunctionCallItem | ReasoningItem) -> bool:
    """Return whether an item begins a new message: within one, reasoning precedes text, and text precedes calls."""
    if isinstance(item, FunctionCallItem):
        return False
    return bool(answer.content or answer.tool_calls or (isinstance(item, ReasoningItem) and answer.reasoning_content))


def _add(answer: ChatMessage, item: InputMessage | FunctionCallItem | ReasoningItem) -> None:
    if isinstance(item, InputMessage):
        answer.content = _content(item)
    elif isinstance(item, ReasoningItem):
        answer.reasoning_content = "".join(part.text for part in item.content or ()) or None
    else:
        call = schemas.FunctionCall(name=item.name, arguments=item.arguments)
        answer.tool_calls = [*(answer.tool_calls or ()), schemas.ToolCall(id=item.call_id, function=call)]


def _output(item: FunctionOutputItem) -> str | list[schemas.Part]:
    """Return a string if all parts are text, one line each, because every template accepts strings."""
    if isinstance(item.output, str):
        return item.output
    if all(isinstance(part, InputText) for part in item.output):
        return "\n".join(part.text for part in item.output if isinstance(part, InputText))
    return [_part(part) for part in item.output]


def _content(message: InputMessage) -> str | list[schemas.Part]:
    if isinstance(message.content, str):
        return message.content
    return [_part(part) for part in message.content]


def _part(part: Part) -> schemas.Part:
    if isinstance(part, InputImage):
        return ImagePart(type="image_url", image_url=schemas.ImageURL(url=part.image_url, detail=part.detail))
    if isinstance(part, ResponsesInputAudio):
        return schemas.InputAudioPart(type="input_audio", input_audio=part.input_audio)
    if isinstance(part, Refusal):
        return part
    return schemas.TextPart(type="text", text=part.text)


def _tool(tool: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))


def _choice(choice: str | NamedFunctionTool | ResponsesAllowedToolChoice | None) -> Any:
    """Return the choice in the format of chats."""
    match choice:
        case NamedFunctionTool():
            return _named(choice)
        case ResponsesAllowedToolChoice(mode=mode, tools=tools):
            allowed = schemas.AllowedTools(mode=mode, tools=[_named(tool) for tool in tools])
            return schemas.AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(tool: NamedFunctionTool) -> schemas.NamedTool:
    return schemas.NamedTool(type="function", function=schemas.NamedFunction(name=tool.name))


def _format(
    text_format: TextFormat | JsonObjectFormat | SchemaFormat,
) -> TextFormat | JsonObjectFormat | JsonSchemaFormat:
    if not isinstance(text_format, SchemaFormat):
        return text_format
    schema = JsonSchema(name=text_format.name, schema=text_format.schema_)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def responses_param(param: str | None) -> str | None:
    """Return this API's name of a chat's field, or None if it has no equivalent."""
    name = (param or "").split("[")[0].split(".")[0]
    return "input" if name == "messages" else name if name in ResponsesRequest.model_fields else None
