"""Tools of ``/v1/responses``: their schemas, and the functions of a chat that stand for them.

A function in a namespace has the name ``NAMESPACE__NAME`` in the chat. A custom tool is a function whose only argument
is the input as text. Built-in tools are skipped: there are none, so none is called."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from triptych.api import schemas
from triptych.api.fields import (
    ALLOWED,
    BUILT_IN,
    CUSTOM,
    FUNCTION,
    MAX_GRAMMAR_LENGTH,
    NAMED,
    NAMESPACE,
    STRING,
    JsonObject,
    Name,
    StrictModel,
    tool_choice,
)
from triptych.errors import InvalidRequest
from triptych.prompt.lark_regex import lark_regex

SEPARATOR = "__"
_END = re.compile(r"(?<!\\)\$\Z")
INPUT = "input"
"""The argument of the function that stands for a custom tool."""
BUILT_IN_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
_OWN_TOOLS = ("function", "custom", "namespace")


class _ToolHints(StrictModel):
    """Fields without effect: every tool is shown, and called directly."""

    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = Field(None, max_length=2)
    async_: Literal[False] | None = Field(None, alias="async")


class FunctionTool(schemas.Function, _ToolHints):
    """A function that the answer may call."""

    type: Literal["function"]
    output_schema: JsonObject | None = None
    """Has no effect."""


class TextInput(StrictModel):
    type: Literal["text"]


class GrammarInput(StrictModel):
    """Enforced, and shown to the model. A Lark grammar without recursion is a regular expression, too."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)


class CustomTool(_ToolHints):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: schemas.FunctionName
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    tags = {"function": FUNCTION, "custom": CUSTOM, "namespace": NAMESPACE}
    return tags.get(kind, BUILT_IN) if isinstance(kind, str) else BUILT_IN


class NamespaceTool(StrictModel):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: schemas.FunctionName
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag(FUNCTION)] | Annotated[CustomTool, Tag(CUSTOM)],
            Discriminator(
                lambda value: kind if (kind := _kind_of_tool(value)) in (FUNCTION, CUSTOM) else None,
                custom_error_type="tool",
                custom_error_message="Input should be a tool of type 'function' or 'custom'",
            ),
        ]
    ] = Field(max_length=schemas.MAX_TOOLS)


def _built_in(kind: str) -> str:
    if kind not in BUILT_IN_TOOLS:
        known = ", ".join(map(repr, _OWN_TOOLS))
        raise PydanticCustomError("tool_type", "{kind} is not supported; use one of {known}", {
            "kind": repr(kind), "known": known,
        })  # fmt: skip
    return kind


class BuiltInTool(StrictModel):
    """A tool of OpenAI's own servers. Skipped, with all its settings."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, AfterValidator(_built_in)]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag(FUNCTION)]
    | Annotated[CustomTool, Tag(CUSTOM)]
    | Annotated[NamespaceTool, Tag(NAMESPACE)]
    | Annotated[BuiltInTool, Tag(BUILT_IN)],
    Discriminator(_kind_of_tool),
]


class NamedChoice(StrictModel):
    """A tool that must be called, or that may be; also in the form of chats."""

    type: Name
    name: Name | None = None
    namespace: Name | None = None
    function: schemas.NamedFunction | None = None
    server_label: Name | None = None
    """Server of the built-in tool ``mcp``."""

    @property
    def is_built_in(self) -> bool:
        return self.type not in ("function", "custom")


class AllowedChoice(StrictModel):
    """Restricts the prompt to these tools; ``mode`` is the choice among them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=schemas.MAX_TOOLS)


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(STRING)]
    | Annotated[NamedChoice, Tag(NAMED)]
    | Annotated[AllowedChoice, Tag(ALLOWED)],
    tool_choice(),
]


@dataclass(frozen=True)
class ToolTarget:
    """The tool that a function of the chat stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name that a tool's function has in the chat."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def chat_tools(tools: Sequence[Any]) -> list[tuple[schemas.Tool, ToolTarget]]:
    """Return the chat's functions, with the tools that they stand for. Raises InvalidRequest for too many of them, for
    one name of two of them, for a name that is too long, and for grammars that together are."""
    made: list[tuple[schemas.Tool, ToolTarget]] = []
    names: set[str] = set()
    room = MAX_GRAMMAR_LENGTH
    for number, given in enumerate(tools):
        path = f"tools[{number}]"
        group = given if isinstance(given, NamespaceTool) else None
        for inner, tool in enumerate(group.tools if group else (given,)):
            if isinstance(tool, BuiltInTool):
                continue
            target = ToolTarget(tool.name, group.name if group else None, isinstance(tool, CustomTool))
            inner_path = f"{path}.tools[{inner}]" if group else path
            where = f"{inner_path}.name"
            name = chat_name(target.name, target.namespace)
            if len(name) > schemas.MAX_FUNCTION_NAME:
                raise InvalidRequest(f"{where}: {name!r} exceeds {schemas.MAX_FUNCTION_NAME} characters", where)
            if name in names:
                raise InvalidRequest(f"{where}: {name!r} is the name of another tool", where)
            names.add(name)
            if isinstance(tool, CustomTool) and isinstance(tool.format, GrammarInput):
                room -= len(tool.format.definition)
            if room < 0:
                where = f"{inner_path}.format.definition"
                raise InvalidRequest(f"{where}: the tools' grammars exceed {MAX_GRAMMAR_LENGTH} characters", where)
            made.append((_function(tool, name, group, inner_path), target))
    if len(made) > schemas.MAX_TOOLS:
        raise InvalidRequest(f"{len(made)} tools, at most {schemas.MAX_TOOLS} are allowed", "tools")
    return made


def _function(tool: FunctionTool | CustomTool, name: str, group: NamespaceTool | None, path: str) -> schemas.Tool:
    described = [one for one in (group and group.description, tool.description) if one]
    if isinstance(tool, FunctionTool):
        parameters, strict = tool.parameters, tool.strict
    else:
        text: dict[str, Any] = {"type": "string"}
        if isinstance(tool.format, GrammarInput):
            described.append(f"The input matches this {tool.format.syntax} grammar:\n{tool.format.definition}")
            definition = tool.format.definition
            if tool.format.syntax == "lark":
                definition = lark_regex(definition, f"{path}.format.definition")
            # a schema's pattern may match anywhere in the text; the input matches as a whole
            text["pattern"] = f"^(?:{_END.sub('', definition.removeprefix('^'))})$"
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        strict = True
    function = schemas.Function(
        name=name, description="\n\n".join(described) or None, parameters=parameters, strict=strict
    )
    return schemas.Tool(type="function", function=function)


def described(tool: StrictModel) -> dict[str, Any]:
    """Return a tool as answers repeat it."""
    fields = tool.model_dump(exclude_unset=True, by_alias=True)
    return {"parameters": None, "strict": None} | fields if isinstance(tool, FunctionTool) else fields


def chat_choice(choice: str | NamedChoice | AllowedChoice | None, has_tools: bool) -> Any:
    """Return the choice in the format of chats. Raises InvalidRequest for a tool that is never called."""
    match choice:
        case "auto" if not has_tools:  # of agents whose only tools are built in
            return None
        case NamedChoice():
            if choice.is_built_in:
                raise InvalidRequest(f"tool_choice: the built-in tool {choice.type!r} is never called", "tool_choice")
            return _named(choice)
        case AllowedChoice(mode=mode, tools=tools):
            named = [_named(tool) for tool in tools if not tool.is_built_in]
            if not named:
                raise InvalidRequest("tool_choice.tools: built-in tools are never called", "tool_choice.tools")
            allowed = schemas.AllowedTools(mode=mode, tools=named)
            return schemas.AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(choice: NamedChoice) -> schemas.NamedTool:
    name = choice.function.name if choice.function else choice.name
    if name is None:
        raise InvalidRequest("tool_choice.name: Field required", "tool_choice.name")
    function = schemas.NamedFunction.model_construct(name=chat_name(name, choice.namespace))
    return schemas.NamedTool(type="function", function=function)


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
