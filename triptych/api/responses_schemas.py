"""Request schemas of ``/v1/responses``: the part of OpenAI's Responses API that needs no stored conversations.

Requests are converted to chat completion requests, so both are validated and served alike."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, Tag

from triptych.api import schemas
from triptych.api.fields import (
    ARRAY,
    STRING,
    ExtraFields,
    JsonObject,
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
)
from triptych.api.response_input import (
    CallOutputItem,
    InputMessage,
    Item,
    ItemReference,
    chat_messages,
    numbered_messages,
)
from triptych.api.response_tools import (
    ResponseTool,
    ResponseToolChoice,
    ToolTarget,
    chat_choice,
    chat_tools,
)
from triptych.api.schemas import ChatCompletionRequest, ChatMessage, MediaOptions, Scalar
from triptych.api.tool_schemas import MAX_TOOLS
from triptych.errors import InvalidRequest, RequestError

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]([\w.\[\]]*)")
_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "include",
}
"""This API's names of a chat's fields, where they differ."""


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextSettings(StrictModel):
    verbosity: Verbosity | None = None
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningSettings(StrictModel):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Answers have the full reasoning, never a summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The former name of ``summary``."""


class ResponsesStreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None
    """Padding of events isn't supported."""


class ResponsesRequest(ExtraFields):
    """The body of ``POST /v1/responses``."""

    model: str | None = None
    """The only one by default."""
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
    """Above 0 it includes ``message.output_text.logprobs``."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=2**31 - 1)
    """Limits calls of built-in tools. Has no effect, because there are none."""
    metadata: Metadata | None = None
    client_metadata: JsonObject | None = None
    """Codex's notes on a request; they have no effect."""
    include: list[Includable] | None = Field(None, max_length=16)
    """Only ``message.output_text.logprobs`` has an effect: items have the reasoning as text, and there are no built-in
    tools."""
    truncation: Literal["auto", "disabled"] | None = None
    """Items are never left out: a prompt that doesn't fit is refused."""
    store: bool | None = None
    """Without a store, nothing is stored. Answers say whether they are."""
    background: Literal[False] | None = None
    previous_response_id: Name | None = None
    conversation: None = None
    prompt: None = None
    chat_template_kwargs: dict[Name, Scalar] | None = Field(None, max_length=schemas.MAX_TEMPLATE_VARIABLES)
    """The same as in chats, like the next field."""
    mm_processor_kwargs: MediaOptions | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    _num_earlier: int = PrivateAttr(0)
    """How many of the items are those of earlier responses."""

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def targets(self) -> dict[str, ToolTarget]:
        """The tools that the chat's functions stand for, by the functions' names."""
        return {tool.function.name: target for tool, target in chat_tools(self.tools or ())}

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request."""
        instructions = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        messages = instructions + chat_messages(self.input)
        if not messages:
            raise InvalidRequest("input: none of the items is shown to a model", "input")
        if len(messages) > schemas.MAX_MESSAGES:
            raise InvalidRequest(
                f"input: {len(messages)} messages, at most {schemas.MAX_MESSAGES} are allowed", "input"
            )
        tools: list[Any] = [tool for tool, _ in chat_tools(self.tools or ())]
        return ChatCompletionRequest(
            model=self.model,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            stream=self.stream,
            tools=tools or None,
            tool_choice=chat_choice(self.tool_choice, bool(tools)),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text.format) if self.text and self.text.format else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
            **{name: getattr(self, name) for name in ExtraFields.model_fields if name in self.model_fields_set},
        )

    def check(self) -> None:
        super().check()
        if not self.refers:  # otherwise once the references are resolved
            self.check_chat()

    @property
    def items(self) -> list[Any]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return list(self.input)

    def continuing(self, earlier: list[Any], own: list[Any]) -> "ResponsesRequest":
        """Return the request with the items of earlier responses, and its own with references resolved. Raises
        InvalidRequest if they are no conversation."""
        resolved = self.model_copy(update={"input": [*earlier, *own]})
        resolved._num_earlier = len(earlier)
        resolved.check_chat()
        return resolved

    @property
    def refers(self) -> bool:
        """Whether stored items are needed."""
        return self.previous_response_id is not None or any(isinstance(item, ItemReference) for item in self.input)

    def check_chat(self) -> None:
        """Check the conversation, whose references have been resolved. Raises InvalidRequest."""
        chat = self.to_chat()
        try:
            chat.check()
        except InvalidRequest as error:
            self.rename(error)
            raise

    def rename(self, error: RequestError) -> None:
        """Name this API's fields in an error in place of the chat's."""
        error.args = tuple(_MESSAGE.sub(self._place, one) if isinstance(one, str) else one for one in error.args)
        is_message = _MESSAGE.match(error.param or "") is not None
        error.param = _MESSAGE.sub(self._place, error.param or "") if is_message else _name_of(error.param)

    def _place(self, found: re.Match[str]) -> str:
        """Return the place in the request of a place in the chat's messages."""
        number, path = int(found[1]) - bool(self.instructions), found[2]
        if number < 0:
            return "instructions"
        if isinstance(self.input, str):
            return "input"
        numbers = [one for one, _ in numbered_messages(self.input)]
        item = numbers[min(number, len(numbers) - 1)]
        if item < self._num_earlier:
            return "previous_response_id"
        where, path = f"input[{item - self._num_earlier}]", path.replace(".image_url.url", ".image_url")
        if isinstance(self.input[item], CallOutputItem):
            return where + path.replace(".content", ".output")
        return where + path if isinstance(self.input[item], InputMessage) else where


def _format(
    text_format: TextFormat | JsonObjectFormat | SchemaFormat,
) -> TextFormat | JsonObjectFormat | JsonSchemaFormat:
    if not isinstance(text_format, SchemaFormat):
        return text_format
    schema = JsonSchema(name=text_format.name, schema=text_format.schema_)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def _name_of(param: str | None) -> str | None:
    """Return this API's name of a chat's field, or None if it has no equivalent."""
    name = (param or "").split("[")[0].split(".")[0]
    return _PARAMS.get(name, name if name in ResponsesRequest.model_fields else None)
