"""Request schemas of ``/v1/messages``, Anthropic's Messages API.

Requests are converted to chat completion requests, so both are validated and served alike."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from triptych.api import field_table, schemas
from triptych.api.fields import (
    ARRAY,
    MAX_TOKENS_LIMIT,
    STRING,
    JsonObject,
    JsonSchema,
    JsonSchemaFormat,
    MaxTokens,
    Name,
    StopString,
    StrictModel,
    Temperature,
    TopK,
    TopP,
    string_or_array,
)
from triptych.api.schemas import ChatCompletionRequest, ChatMessage, ImagePart
from triptych.api.tool_schemas import (
    MAX_TOOLS,
    Function,
    FunctionCall,
    FunctionName,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from triptych.errors import MissingField

MAX_STOP_SEQUENCES = 16


# ── content blocks ───────────────────────────────────────────────────────────────────────────────────────────────


class Block(StrictModel):
    rules = field_table.ANTHROPIC_BLOCK


class TextBlock(Block):
    rules = field_table.TEXT_PART
    type: Literal["text"]
    text: str


class Base64Source(Block):
    type: Literal["base64"]
    media_type: str
    """The file's own header takes precedence."""
    data: str
    """The file in base64."""


class UrlSource(Block):
    type: Literal["url"]
    url: str


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class TextSource(Block):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Block):
    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[TextBlock], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("text blocks"),
    ]


class DocumentBlock(Block):
    """A document of plain text. PDF files aren't supported."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """Title, context and text, a line each."""
        texts: Iterable[str] = (
            [self.source.data] if isinstance(self.source, TextSource) else _texts(self.source.content)
        )
        return "\n".join(filter(None, [self.title, self.context, *texts]))


class SearchResultBlock(Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock] = Field(max_length=schemas.MAX_PARTS)

    @property
    def text(self) -> str:
        """Title, source and text, a line each."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ThinkingBlock(Block):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Reasoning that another service has encrypted; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: JsonObject


class ToolReferenceBlock(Block):
    """A tool that a search among tools found. All tools are in the prompt already."""

    type: Literal["tool_reference"]
    tool_name: Name

    @property
    def text(self) -> str:
        return self.tool_name


TextualBlock = TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
ShownBlock = TextualBlock | ImageBlock


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: (
        Annotated[
            Annotated[str, Tag(STRING)]
            | Annotated[
                list[Annotated[ShownBlock, Field(discriminator="type")]],
                Field(max_length=schemas.MAX_PARTS),
                Tag(ARRAY),
            ],
            string_or_array("content blocks"),
        ]
        | None
    ) = None
    is_error: bool | None = None
    """Has no effect: the content says what went wrong."""


ContentBlock = Annotated[
    ShownBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
TextOnly = Annotated[
    Annotated[str, Tag(STRING)] | Annotated[list[TextBlock], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
    string_or_array("text blocks"),
]


class Turn(StrictModel):
    rules = field_table.MESSAGE
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag(STRING)] | Annotated[list[ContentBlock], Field(max_length=schemas.MAX_PARTS), Tag(ARRAY)],
        string_or_array("content blocks"),
    ]


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────


class AnthropicTool(StrictModel):
    """A function that the answer may call. Tools of other types, which Anthropic's servers or clients define, are never
    called."""

    rules = field_table.ANTHROPIC_TOOL
    type: str | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    """Enforce the schema even if the model may choose whether to call the tool."""

    @property
    def is_function(self) -> bool:
        return self.type in (None, "custom", "function")


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    """Name of the tool that must be called, with type ``tool``."""
    disable_parallel_tool_use: bool | None = None


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS_LIMIT)
    """Tokens of reasoning after which it is ended, for models that end it with a single token."""
    display: str | None = None
    """Has no effect: reasoning is returned in full."""


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")
    """Always enforced; rejected if it can't be."""


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """For models whose chat templates read ``reasoning_effort``."""
    format: OutputFormat | None = None


class CountTokensRequest(StrictModel):
    """The body of ``POST /v1/messages/count_tokens``: what a prompt is made from."""

    rules = field_table.ANTHROPIC_REQUEST
    model: str | None = None
    messages: list[Turn] = Field(min_length=1, max_length=schemas.MAX_MESSAGES)
    system: TextOnly | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    """Without it, models reason only if their chat templates can't turn reasoning off."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of ``output_config.format``."""
    chat_template_kwargs: dict[Name, schemas.Scalar] | None = Field(None, max_length=schemas.MAX_TEMPLATE_VARIABLES)
    """Variables of the model's chat template."""
    mm_processor_kwargs: schemas.MediaOptions | None = None

    def check(self) -> None:
        super().check()
        if self.tool_choice is not None and self.tool_choice.type == "tool" and not self.tool_choice.name:
            raise MissingField("tool_choice.name: Field required", "tool_choice.name")
        self.to_chat().check()

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request."""
        return ChatCompletionRequest(**self._conversation())

    def _conversation(self) -> dict[str, Any]:
        config = self.output_config or OutputConfig()
        made = {
            "model": self.model,
            "messages": [message for _, message in self.chat_messages()],
            "tools": [_tool(tool) for tool in self.tools or () if tool.is_function] or None,
            "tool_choice": self._tool_choice(),
            "chat_template_kwargs": self._variables(),
            "mm_processor_kwargs": self.mm_processor_kwargs,
            "response_format": _format(config.format or self.output_format),
        }
        if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is not None:
            made["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self._continues:
            made["continue_final_message"] = True
        if self.thinking is not None and self.thinking.type == "enabled":
            made["thinking_token_budget"] = self.thinking.budget_tokens
        return {name: value for name, value in made.items() if value is not None}

    @property
    def _continues(self) -> bool:
        """Whether the answer continues the last message: one of the assistant that ends with text."""
        last = self.messages[-1]
        end = last.content if isinstance(last.content, str) else last.content[-1] if last.content else ""
        text = end if isinstance(end, str) else end.text if isinstance(end, TextualBlock) else ""
        return last.role == "assistant" and bool(text.strip())

    def _tool_choice(self) -> Any:
        match self.tool_choice:
            case AnthropicToolChoice(type="tool", name=name):
                return NamedTool(type="function", function=NamedFunction(name=name or ""))
            case AnthropicToolChoice(type=kind):
                return {"any": "required", "none": "none"}.get(kind)
        return None

    def _variables(self) -> dict[str, Any]:
        """Return the template's variables. Templates turn reasoning on by one of two names; others don't read them."""
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        variables: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
        if self.output_config and self.output_config.effort:
            variables["reasoning_effort"] = self.output_config.effort
        return variables | (self.chat_template_kwargs or {})

    def chat_messages(self) -> Iterator[tuple[int, ChatMessage]]:
        """Yield the chat's messages, each with the number of the message that it comes from; the system prompt has that
        of the first."""
        if self.system:
            yield 0, ChatMessage(role="system", content=_plain(self.system))
        for number, message in enumerate(self.messages):
            if isinstance(message.content, str):
                yield number, ChatMessage(role=message.role, content=message.content)
            elif message.role == "assistant":
                yield number, _answer(message.content)
            else:
                for made in _asked(message.role, message.content):
                    yield number, made


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: MaxTokens
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOP_SEQUENCES)
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "stream": self.stream,
        }
        given |= {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return ChatCompletionRequest(
            **self._conversation(), **{name: value for name, value in given.items() if value is not None}
        )


def _asked(role: Literal["user", "system"], blocks: list[Any]) -> Iterator[ChatMessage]:
    """Yield a user's messages, and one for each tool result, in order."""
    if not blocks:
        yield ChatMessage(role=role, content="")
    for is_result, run in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            for result in run:
                content = result.content or ""
                yield ChatMessage(
                    role="tool",
                    tool_call_id=result.tool_use_id,
                    content=content if isinstance(content, str) else _parts(content),
                )
        else:
            yield ChatMessage(role=role, content=_parts(run))


def _answer(blocks: list[Any]) -> ChatMessage:
    """Return an earlier answer. Its reasoning comes first, then its text, then its calls."""
    texts = [block for block in blocks if isinstance(block, ShownBlock)]
    calls: list[Any] = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=json.dumps(block.input)))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return ChatMessage(
        role="assistant",
        content=_parts(texts) if texts else "",
        tool_calls=calls or None,
        reasoning_content=reasoning or None,
    )


def _parts(blocks: Iterable[Any]) -> list[schemas.Part]:
    return [
        ImagePart(type="image_url", image_url=_image(block.source))
        if isinstance(block, ImageBlock)
        else schemas.TextPart(type="text", text=block.text)
        for block in blocks
        if isinstance(block, ShownBlock)
    ]


def _image(source: Base64Source | UrlSource) -> schemas.ImageURL:
    return (
        schemas.Base64Image(url=source.data) if isinstance(source, Base64Source) else schemas.ImageURL(url=source.url)
    )


def _texts(content: str | list[TextBlock]) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def _plain(content: str | list[TextBlock]) -> str:
    """Return the texts of blocks as paragraphs."""
    return "\n\n".join(_texts(content))


def _tool(tool: AnthropicTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def _format(chosen: OutputFormat | None) -> JsonSchemaFormat | None:
    if chosen is None:
        return None
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(name="answer", schema=chosen.schema_))
