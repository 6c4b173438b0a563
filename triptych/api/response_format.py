"""The grammar of a chat's whole answer: reasoning, tool calls and the format of the text.

Formats are xgrammar's structural tags."""

import json
from collections.abc import Sequence
from typing import Any

from triptych.api.json_schema import StepBudget, check_schema
from triptych.api.schemas import ChatCompletionRequest, NamedTool, Tool
from triptych.errors import InvalidRequest
from triptych.messages.work import GrammarKind, GrammarSpec
from triptych.prompt.formats.hermes import CALL, END_CALL
from triptych.prompt.formats.reasoning import THINK, Reasoning

Format = dict[str, Any]

MAX_GRAMMAR_TAG_LENGTH = 2**18
_MAX_WHITESPACE = 20


def answer_grammar(request: ChatCompletionRequest, reasoning: Reasoning) -> GrammarSpec | None:
    """Return the grammar of the answer, or None if it is unconstrained. Where calls are forced, the answer has no text
    that a format could apply to.

    Raises InvalidRequest for constraints that exclude each other."""
    text_grammar = request.grammar_spec
    tools = request.callable_tools
    if tools and request.call_choice not in (None, "auto"):
        answer: Format | None = _forced(request, tools)
    elif text_grammar is not None:
        if not tools and reasoning is Reasoning.NONE:
            return text_grammar
        answer = _format(text_grammar)
        if tools:
            answer = {"type": "or", "elements": [answer, _calls(tools, request.parallel_tool_calls)]}
    else:
        answer = _triggered(tools) if any(tool.function.strict for tool in tools) else None
    if answer is None:
        return None
    text = json.dumps(_after_reasoning(answer, reasoning))
    if len(text) > MAX_GRAMMAR_TAG_LENGTH:
        raise InvalidRequest(
            f"the tools' parameters and the answer's format exceed {MAX_GRAMMAR_TAG_LENGTH} characters", "tools"
        )
    _check_tools(request, tools, all_enforced=text_grammar is not None)  # last, because it is slow for large schemas
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, text)


def _check_tools(request: ChatCompletionRequest, tools: Sequence[Tool], *, all_enforced: bool) -> None:
    """Raise InvalidRequest for a tool whose parameters are to be enforced, but can't be."""
    choice, budget = request.call_choice, StepBudget()
    if isinstance(choice, NamedTool):
        names = {choice.function.name}
    else:
        forced = all_enforced or choice == "required"
        names = {tool.function.name for tool in tools if forced or tool.function.strict}
    for number, tool in enumerate(request.tools or ()):
        if tool.function.name in names and tool.function.parameters:
            check_schema(tool.function.parameters, f"tools[{number}].function.parameters", budget)


def _forced(request: ChatCompletionRequest, tools: Sequence[Tool]) -> Format:
    if isinstance(choice := request.call_choice, NamedTool):
        return _calls([tool for tool in tools if tool.function.name == choice.function.name], parallel=False)
    return _calls(tools, request.parallel_tool_calls)


def _calls(tools: Sequence[Tool], parallel: bool | None) -> Format:
    """One call or more, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": [_call(tool, strict=True) for tool in tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": parallel is False,
    }


def _triggered(tools: Sequence[Tool]) -> Format:
    """Any text, but each call must be to one of the tools, with valid arguments if the tool is strict."""
    return {
        "type": "triggered_tags",
        "triggers": [CALL],
        "tags": [_call(tool, strict=bool(tool.function.strict)) for tool in tools],
    }


def _call(tool: Tool, *, strict: bool) -> Format:
    schema = (tool.function.parameters if strict else None) or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{CALL}\n{{"name": "{tool.function.name}", "arguments": ',
        "content": _json(schema),
        "end": f"}}\n{END_CALL}",
    }


def _after_reasoning(answer: Format, reasoning: Reasoning) -> Format:
    """Put unconstrained reasoning before the answer's format."""
    if reasoning is Reasoning.NONE:
        return answer
    tag: Format = {
        "type": "tag",
        "begin": "" if reasoning.is_open else THINK.open,
        "content": {"type": "any_text"},
        "end": [f"{THINK.close}\n\n", THINK.close],
    }
    first = tag if reasoning.is_open else {"type": "optional", "content": tag}
    return {"type": "sequence", "elements": [first, answer]}


def _format(spec: GrammarSpec) -> Format:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(_schema(spec.text))
        case GrammarKind.JSON_OBJECT:
            return _json({"type": "object"})
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": spec.text}
        case GrammarKind.CHOICE:
            choices = [{"type": "const_string", "value": choice} for choice in json.loads(spec.text)]
            return {"type": "or", "elements": choices}
        case GrammarKind.GRAMMAR:
            return {"type": "grammar", "grammar": spec.text}
        case GrammarKind.STRUCTURAL_TAG:
            return dict(json.loads(spec.text))


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}


def _schema(text: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest("structured_outputs.json is not a JSON schema", "structured_outputs.json")
    return schema
