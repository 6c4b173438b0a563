"""Schemas of tools in chats, of the calls of earlier answers, and of the choice among tools.

A custom tool, whose input is text, is a function for the model whose only argument is that text."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from triptych.api import field_table
from triptych.api.fields import (
    ALLOWED,
    CUSTOM,
    FUNCTION,
    MAX_GRAMMAR_LENGTH,
    NAMED,
    STRING,
    JsonObject,
    Name,
    StrictModel,
    tool_choice,
)
from triptych.errors import InvalidRequest
from triptych.prompt.lark_regex import lark_regex

MAX_TOOLS = 128
MAX_FUNCTION_NAME = 128
INPUT = "input"
"""The argument of the function that stands for a custom tool."""
_END = re.compile(r"(?<!\\)\$\Z")


def _kind(value: Any) -> str:
    """Return the tag of a union's member. Any other type is an error of the first."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return CUSTOM if kind == "custom" else FUNCTION


# ── calls of earlier answers ─────────────────────────────────────────────────────────────────────────────────────


class FunctionCall(StrictModel):
    rules = field_table.CALL
    name: Name
    arguments: str | None = None
    """JSON. An empty text and null are an empty object."""


class ToolCall(StrictModel):
    rules = field_table.CALL
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(StrictModel):
    rules = field_table.CALL
    name: Name
    input: str | None = None


class CustomToolCall(StrictModel):
    rules = field_table.CALL
    id: Name
    type: Literal["custom"]
    custom: CustomCall

    @property
    def function(self) -> FunctionCall:
        """The call of the function that stands for the tool."""
        return FunctionCall.model_construct(name=self.custom.name, arguments=custom_arguments(self.custom.input or ""))


EarlierCall = Annotated[
    Annotated[ToolCall, Tag(FUNCTION)] | Annotated[CustomToolCall, Tag(CUSTOM)], Discriminator(_kind)
]


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────


FunctionName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.:-]{{1,{MAX_FUNCTION_NAME}}}$")]


class Function(StrictModel):
    rules = field_table.FUNCTION
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Enforce the schema even if the model may choose whether to call the tool."""


class Tool(StrictModel):
    rules = field_table.TOOL
    type: Literal["function"]
    function: Function


class Grammar(StrictModel):
    """Enforced, and shown to the model. A Lark grammar without recursion is a regular expression, too."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)


class TextInput(StrictModel):
    type: Literal["text"]


class ChatGrammarInput(StrictModel):
    type: Literal["grammar"]
    grammar: Grammar


class Custom(StrictModel):
    rules = field_table.FUNCTION
    name: FunctionName
    description: str | None = None
    format: Annotated[TextInput | ChatGrammarInput, Field(discriminator="type")] | None = None
    """What the input may be; without it, any text."""

    @property
    def grammar(self) -> Grammar | None:
        return self.format.grammar if isinstance(self.format, ChatGrammarInput) else None


class ChatCustomTool(StrictModel):
    """A tool whose input is text."""

    rules = field_table.FUNCTION
    type: Literal["custom"]
    custom: Custom


ChatTool = Annotated[Annotated[Tool, Tag(FUNCTION)] | Annotated[ChatCustomTool, Tag(CUSTOM)], Discriminator(_kind)]


def constraint_of(tool: Tool | ChatCustomTool) -> str:
    """Return the path within a tool of what constrains its arguments."""
    return "function.parameters" if isinstance(tool, Tool) else "custom.format.grammar.definition"


def functions_of(tools: Sequence[Tool | ChatCustomTool]) -> list[Tool]:
    """Return the functions that the model sees. Raises as ``StandIns.function`` does."""
    stand_ins = StandIns()

    def function(number: int, tool: Tool | ChatCustomTool) -> Tool:
        if isinstance(tool, Tool):
            return tool
        one, param = tool.custom, f"tools[{number}].{constraint_of(tool)}"
        return stand_ins.function(one.name, [one.description], one.grammar, param)

    return [function(number, tool) for number, tool in enumerate(tools)]


class StandIns:
    """Makes the functions that stand for the custom tools of one request."""

    def __init__(self) -> None:
        self._room = MAX_GRAMMAR_LENGTH

    def function(self, name: str, description: Sequence[str | None], grammar: Grammar | None, param: str) -> Tool:
        """Return the function for a custom tool. ``description`` are its parts. Raises InvalidRequest, naming
        ``param``, for a grammar that can't be enforced, and for grammars that together are too long."""
        described = [one for one in description if one]
        text: dict[str, Any] = {"type": "string"}
        if grammar is not None:
            self._room -= len(grammar.definition)
            if self._room < 0:
                raise InvalidRequest(f"{param}: the tools' grammars exceed {MAX_GRAMMAR_LENGTH} characters", param)
            described.append(f"The input matches this {grammar.syntax} grammar:\n{grammar.definition}")
            pattern = lark_regex(grammar.definition, param) if grammar.syntax == "lark" else grammar.definition
            # a schema's pattern may match anywhere in the text; the input matches as a whole
            text["pattern"] = f"^(?:{_END.sub('', pattern.removeprefix('^'))})$"
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        function = Function(name=name, description="\n\n".join(described) or None, parameters=parameters, strict=True)
        return Tool(type="function", function=function)


# ── the choice ───────────────────────────────────────────────────────────────────────────────────────────────────


class NamedFunction(StrictModel):
    """A tool's name; some clients send the tool itself."""

    rules = field_table.NAMED
    name: Name


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(StrictModel):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


AnyNamed = Annotated[
    Annotated[NamedTool, Tag(FUNCTION)] | Annotated[NamedCustomTool, Tag(CUSTOM)], Discriminator(_kind)
]


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[AnyNamed] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolChoice(StrictModel):
    """Restricts the prompt to these tools; ``mode`` is the choice among them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(STRING)]
    | Annotated[AnyNamed, Tag(NAMED)]
    | Annotated[AllowedToolChoice, Tag(ALLOWED)],
    tool_choice(),
]
