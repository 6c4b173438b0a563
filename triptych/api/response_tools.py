"""Tools of ``/v1/responses``: their schemas, and the functions of a chat that stand for them.

A function in a namespace has the name ``NAMESPACE__NAME`` in the chat. A custom tool is a function whose only argument
is the input as text. Built-in tools are skipped: there are none, so none is called."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from triptych.api import tool_schemas
from triptych.api.fields import (
    ALLOWED,
    BUILT_IN,
    CUSTOM,
    FUNCTION,
    NAMED,
    NAMESPACE,
    STRING,
    JsonObject,
    Name,
    StrictModel,
    tool_choice,
)
from triptych.errors import InvalidRequest

SEPARATOR = "__"
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


class FunctionTool(tool_schemas.Function, _ToolHints):
    """A function that the answer may call."""

    type: Literal["function"]
    output_schema: JsonObject | None = None
    """Has no effect."""


class GrammarInput(tool_schemas.Grammar):
    type: Literal["grammar"]


class CustomTool(_ToolHints):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: tool_schemas.FunctionName
    description: str | None = None
    format: Annotated[tool_schemas.TextInput | GrammarInput, Field(discriminator="type")] | None = None

    @property
    def grammar(self) -> tool_schemas.Grammar | None:
        return self.format if isinstance(self.format, GrammarInput) else None


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    tags = {"function": FUNCTION, "custom": CUSTOM, "namespace": NAMESPACE}
    return tags.get(kind, BUILT_IN) if isinstance(kind, str) else BUILT_IN


class NamespaceTool(StrictModel):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: tool_schemas.FunctionName
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
    ] = Field(max_length=tool_schemas.MAX_TOOLS)


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
    function: tool_schemas.NamedFunction | None = None
    server_label: Name | None = None
    """Server of the built-in tool ``mcp``."""

    @property
    def is_built_in(self) -> bool:
        return self.type not in ("function", "custom")


class AllowedChoice(StrictModel):
    """Restricts the prompt to these tools; ``mode`` is the choice among them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=tool_schemas.MAX_TOOLS)


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


def chat_tools(tools: Sequence[Any]) -> list[tuple[tool_schemas.Tool, ToolTarget]]:
    """Return the chat's functions, with the tools that they stand for. Raises InvalidRequest for too many of them, for
    one name of two of them, for a name that is too long, and for grammars that together are."""
    made: list[tuple[tool_schemas.Tool, ToolTarget]] = []
    names: set[str] = set()
    stand_ins = tool_schemas.StandIns()
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
            if len(name) > tool_schemas.MAX_FUNCTION_NAME:
                raise InvalidRequest(f"{where}: {name!r} exceeds {tool_schemas.MAX_FUNCTION_NAME} characters", where)
            if name in names:
                raise InvalidRequest(f"{where}: {name!r} is the name of another tool", where)
            names.add(name)
            description = [group.description if group else None, tool.description]
            if isinstance(tool, CustomTool):
                param = f"{inner_path}.format.definition"
                made.append((stand_ins.function(name, description, tool.grammar, param), target))
            else:
                made.append((_function(tool, name, description), target))
    if len(made) > tool_schemas.MAX_TOOLS:
        raise InvalidRequest(f"{len(made)} tools, at most {tool_schemas.MAX_TOOLS} are allowed", "tools")
    return made


def _function(tool: FunctionTool, name: str, description: list[str | None]) -> tool_schemas.Tool:
    text = "\n\n".join(one for one in description if one) or None
    function = tool_schemas.Function(name=name, description=text, parameters=tool.parameters, strict=tool.strict)
    return tool_schemas.Tool(type="function", function=function)


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
            named: list[Any] = [_named(tool) for tool in tools if not tool.is_built_in]
            if not named:
                raise InvalidRequest("tool_choice.tools: built-in tools are never called", "tool_choice.tools")
            allowed = tool_schemas.AllowedTools(mode=mode, tools=named)
            return tool_schemas.AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(choice: NamedChoice) -> tool_schemas.NamedTool:
    name = choice.function.name if choice.function else choice.name
    if name is None:
        raise InvalidRequest("tool_choice.name: Field required", "tool_choice.name")
    function = tool_schemas.NamedFunction.model_construct(name=chat_name(name, choice.namespace))
    return tool_schemas.NamedTool(type="function", function=function)
