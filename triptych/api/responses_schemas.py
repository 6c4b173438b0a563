"""What clients send to ``/v1/responses``: the part of OpenAI's Responses API that needs no memory of earlier answers.

It becomes a chat completion's request, so both are checked and served alike."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag

from triptych.api import schemas
from triptych.api.fields import (
    ALLOWED,
    ARRAY,
    CALL,
    MAX_TOKEN_IDS,
    MESSAGE,
    NAMED,
    OUTPUT,
    STRING,
    THOUGHT,
    Effort,
    ExtraFields,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    MaxTokens,
    Metadata,
    Name,
    Strict,
    Temperature,
    TextFormat,
    TopP,
    Verbosity,
    string_or_array,
    tool_choice,
)
from triptych.api.schemas import ChatCompletionRequest, ChatMessage, Function, ImagePart, Tool
from triptych.errors import InvalidRequest


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """Part of an earlier answer, sent back."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=MAX_TOKEN_IDS)


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] = "auto"
    file_id: None = None


class InputAudio(Strict):
    """As in chats."""

    type: Literal["input_audio"]
    input_audio: schemas.InputAudio


Refusal = schemas.RefusalPart
Part = Annotated[InputText | OutputText | Refusal | InputImage | InputAudio, Field(discriminator="type")]
ToolPart = Annotated[InputText | InputImage, Field(discriminator="type")]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[Part], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("content parts"),
    ]
    id: Name | None = None
    status: Status | None = None
    phase: None = None


class FunctionCallItem(Strict):
    """A call that an earlier answer made. ``arguments`` is JSON."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None
    runs_async: None = Field(None, validation_alias=AliasChoices("async", "async_"))


class FunctionOutputItem(Strict):
    """What the call brought."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[ToolPart], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("content parts"),
    ]
    id: Name | None = None
    status: Status | None = None
    caller: None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """What an earlier answer thought."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(None, max_length=schemas.MAX_PARTS)
    summary: list[Any] = Field(default_factory=list, max_length=0)
    id: Name | None = None
    status: Status | None = None
    encrypted_content: None = None


_KINDS = {"message": MESSAGE, "function_call": CALL, "function_call_output": OUTPUT, "reasoning": THOUGHT}


def _kind_of_item(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return _KINDS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag(MESSAGE)]
    | Annotated[FunctionCallItem, Tag(CALL)]
    | Annotated[FunctionOutputItem, Tag(OUTPUT)]
    | Annotated[ReasoningItem, Tag(THOUGHT)],
    Discriminator(
        _kind_of_item,
        custom_error_type="item",
        custom_error_message="Input should be an item of type " + ", ".join(_KINDS),
    ),
]


class _OfFunction(Strict):
    type: Literal["function"]


class FunctionTool(Function, _OfFunction):
    """Its type is looked at first: tools of other types are refused for that."""


class NamedFunctionTool(Strict):
    type: Literal["function"]
    name: Name


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class AllowedToolChoice(Strict):
    """As in chats."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunctionTool] = Field(min_length=1, max_length=schemas.MAX_TOOLS)


class TextSettings(Strict):
    verbosity: Verbosity | None = None
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningSettings(Strict):
    """``summary: auto`` is what summary there is: none, since thoughts are told as they are."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None


class ResponsesStreamOptions(Strict):
    """Padding against observers of a stream's sizes isn't made."""

    include_obfuscation: Literal[False] | None = None


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(STRING)]
    | Annotated[NamedFunctionTool, Tag(NAMED)]
    | Annotated[AllowedToolChoice, Tag(ALLOWED)],
    tool_choice(),
]


class ResponsesRequest(ExtraFields):
    """The body of ``POST /v1/responses``. Nothing is remembered: ``store`` can only be false, and there is no
    ``previous_response_id``; the whole conversation is in ``input``. What an answer thought is in its items as it is,
    so ``reasoning.encrypted_content`` adds nothing that is needed to send them back; and as there are no built-in
    tools, any ``max_tool_calls`` is kept. vLLM's fields are there as for chats."""

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
    metadata: Metadata | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, max_length=8
    )
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def chat(self) -> ChatCompletionRequest:
        """The same as a chat."""
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
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidRequest("top_logprobs is only for include: message.output_text.logprobs", "top_logprobs")
        try:
            self.chat().check()
        except InvalidRequest as error:
            error.param = own_param(error.param)
            raise

    def _messages(self) -> list[ChatMessage]:
        """Items that belong to one message of the assistant (thoughts, text, calls) become one."""
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
            else:
                if open_answer is None or _starts_anew(open_answer, item):
                    open_answer = ChatMessage(role="assistant", content="")
                    messages.append(open_answer)
                _add(open_answer, item)
        return messages


def _starts_anew(answer: ChatMessage, item: InputMessage | FunctionCallItem | ReasoningItem) -> bool:
    """Whether an item can't be part of the answer any more: thoughts come first, then text, then calls."""
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
    """Of text alone a string, which every template knows, with a line for each part."""
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
    if isinstance(part, InputAudio):
        return schemas.InputAudioPart(type="input_audio", input_audio=part.input_audio)
    if isinstance(part, Refusal):
        return part
    return schemas.TextPart(type="text", text=part.text)


def _tool(tool: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))


def _choice(choice: str | NamedFunctionTool | AllowedToolChoice | None) -> Any:
    """As chats have it."""
    match choice:
        case NamedFunctionTool():
            return _named(choice)
        case AllowedToolChoice(mode=mode, tools=tools):
            allowed = schemas.AllowedTools(mode=mode, tools=[_named(tool) for tool in tools])
            return schemas.AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(tool: NamedFunctionTool) -> schemas.NamedTool:
    return schemas.NamedTool(type="function", function=schemas.NamedFunction(name=tool.name))


def _format(wanted: TextFormat | JsonObjectFormat | SchemaFormat) -> TextFormat | JsonObjectFormat | JsonSchemaFormat:
    if not isinstance(wanted, SchemaFormat):
        return wanted
    schema = JsonSchema(name=wanted.name, schema=wanted.schema_)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def own_param(param: str | None) -> str | None:
    """What a chat's field is called here; None where there is no one name for it."""
    name = (param or "").split("[")[0].split(".")[0]
    return "input" if name == "messages" else name if name in ResponsesRequest.model_fields else None
