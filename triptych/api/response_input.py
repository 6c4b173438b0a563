"""Input items of ``/v1/responses``, and the chat messages that they become."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from triptych.api import field_table, schemas
from triptych.api.field_rules import Rules
from triptych.api.fields import ARRAY, MAX_TOKEN_IDS, STRING, Name, StrictModel, string_or_array
from triptych.api.part_forms import response_part
from triptych.api.response_tools import chat_name
from triptych.api.schemas import ChatMessage, ImagePart
from triptych.api.tool_schemas import FunctionCall, ToolCall, custom_arguments


class InputText(StrictModel):
    rules = field_table.TEXT_PART
    type: Literal["input_text"]
    text: str


class OutputText(StrictModel):
    """Text of an earlier answer."""

    rules = field_table.TEXT_PART
    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=schemas.MAX_PARTS)
    """Have no effect."""
    logprobs: list[Any] | None = Field(None, max_length=MAX_TOKEN_IDS)


class InputImage(StrictModel):
    type: Literal["input_image"]
    image_url: str
    detail: schemas.ImageDetail = "auto"
    file_id: None = None


class ResponsesInputAudio(StrictModel):
    """Audio in the format of chats."""

    type: Literal["input_audio"]
    input_audio: schemas.InputAudio


Refusal = schemas.RefusalPart
Part = Annotated[
    Annotated[InputText | OutputText | Refusal | InputImage | ResponsesInputAudio, Field(discriminator="type")],
    BeforeValidator(response_part),
]
ToolPart = Annotated[Annotated[InputText | InputImage, Field(discriminator="type")], BeforeValidator(response_part)]
ItemId = Annotated[str, Field(min_length=1, max_length=1024)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[Part], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("content parts"),
    ]
    id: ItemId | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Has no effect."""


class Caller(StrictModel):
    """Calls come from the model alone."""

    type: Literal["direct"]


class _CallItem(StrictModel):
    call_id: Name
    name: Name
    namespace: Name | None = None
    id: ItemId | None = None
    status: Status | None = None
    caller: Caller | None = None
    runs_async: Literal[False] | None = Field(None, validation_alias=AliasChoices("async", "async_"))


class FunctionCallItem(_CallItem):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    arguments: str
    """JSON."""

    @property
    def chat_arguments(self) -> str:
        return self.arguments


class CustomCallItem(_CallItem):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    input: str

    @property
    def chat_arguments(self) -> str:
        return custom_arguments(self.input)


class CallOutputItem(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[ToolPart], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("content parts"),
    ]
    name: Name | None = None
    id: ItemId | None = None
    status: Status | None = None
    caller: Caller | None = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(StrictModel):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of an earlier answer: its text or, without any, its summary."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(None, max_length=schemas.MAX_PARTS)
    summary: list[SummaryText] | None = Field(None, max_length=schemas.MAX_PARTS)
    id: ItemId | None = None
    status: Status | None = None
    encrypted_content: str | None = None
    """Has no effect: only the service that made it can read it."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ()) or "\n\n".join(
            part.text for part in self.summary or ()
        )


class SkippedItem(StrictModel):
    """What a tool of another service did, without the results that its model saw."""

    rules = Rules(ignores_unknown=True)
    type: Literal["web_search_call", "mcp_list_tools"]
    id: ItemId | None = None


class ItemReference(StrictModel):
    """An item of an earlier answer, by its id."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _kind_of_item(value: Any) -> str | None:
    """Return an item's type, which messages and references may leave out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None and isinstance(value, dict):
        return "message" if "role" in value or "id" not in value else "item_reference"
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[SkippedItem, Tag("web_search_call")]
    | Annotated[SkippedItem, Tag("mcp_list_tools")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of_item),
]


AnswerItem = InputMessage | FunctionCallItem | CustomCallItem | ReasoningItem
AnyItem = AnswerItem | CallOutputItem | SkippedItem | ItemReference


def chat_messages(items: str | Sequence[AnyItem]) -> list[ChatMessage]:
    """Return the chat's messages; the reasoning, text and calls of one answer become one message. References must
    have been resolved."""
    if isinstance(items, str):
        return [ChatMessage(role="user", content=items)]
    return [message for _, message in numbered_messages(items)]


def numbered_messages(items: Sequence[AnyItem]) -> list[tuple[int, ChatMessage]]:
    """Return the chat's messages, each with the number of its first item."""
    messages: list[tuple[int, ChatMessage]] = []
    open_answer: ChatMessage | None = None
    for number, item in enumerate(items):
        if isinstance(item, CallOutputItem):
            open_answer = None
            messages.append((number, ChatMessage(role="tool", tool_call_id=item.call_id, content=_output(item))))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            open_answer = None
            messages.append((number, ChatMessage(role=item.role, content=_content(item))))
        elif not isinstance(item, ItemReference | SkippedItem):
            if open_answer is None or _starts_message(open_answer, item):
                open_answer = ChatMessage(role="assistant", content="")
                messages.append((number, open_answer))
            _add(open_answer, item)
    return messages


def _starts_message(answer: ChatMessage, item: AnswerItem) -> bool:
    """Return whether an item begins a new message: within one, reasoning precedes text, and text precedes calls."""
    if isinstance(item, FunctionCallItem | CustomCallItem):
        return False
    return bool(answer.content or answer.tool_calls or (isinstance(item, ReasoningItem) and answer.reasoning_content))


def _add(answer: ChatMessage, item: AnswerItem) -> None:
    if isinstance(item, InputMessage):
        answer.content = _content(item)
    elif isinstance(item, ReasoningItem):
        answer.reasoning_content = item.text or None
    else:
        # the name was chosen by a model, so that its length isn't an error of the client
        name = chat_name(item.name, item.namespace)
        call = FunctionCall.model_construct(name=name, arguments=item.chat_arguments)
        answer.tool_calls = [*(answer.tool_calls or ()), ToolCall(id=item.call_id, function=call)]


def _output(item: CallOutputItem) -> str | list[schemas.Part]:
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
