"""The grammar of a chat's whole answer: reasoning, tool calls and the format of the text."""

import json
from collections.abc import Sequence

from triptych.api.schemas import ChatCompletionRequest, NamedTool, Tool
from triptych.errors import InvalidRequest
from triptych.prompt import lark
from triptych.prompt.answer_grammar import AnswerGrammar, GrammarPart
from triptych.prompt.formats.hermes import CALL, END_CALL
from triptych.prompt.formats.reasoning import THINK, Reasoning

MAX_GRAMMAR_LENGTH = 2**18
_ANY_OBJECT = lark.json_schema({"type": "object"})


def answer_grammar(request: ChatCompletionRequest, reasoning: Reasoning) -> AnswerGrammar | None:
    """Return the grammar of the answer, or None if it is unconstrained. Where calls are forced, the answer has no text
    that a format could apply to.

    Raises InvalidRequest for constraints that exclude each other."""
    text = request.text_grammar
    tools = request.callable_tools
    if tools and request.call_choice not in (None, "auto"):
        forced, parallel = _forced(request, tools)
        rules, parts = _call_rules(request, forced, all_strict=True)
        answer, inner = f"calls\n{_calls(parallel)}", None
    elif text is not None:
        if not tools and reasoning is Reasoning.NONE:
            return text.alone()
        inner = None if text.is_expression else text.text
        rules, parts = _call_rules(request, tools, all_strict=True) if tools else ("", [])
        answer = text.text if inner is None else "@format"
        parts = [GrammarPart(text.param, text.text, text.is_expression), *parts]
        if tools:
            answer = f"text | calls\ntext: {answer}\n{_calls(request.parallel_tool_calls)}"
    elif any(tool.function.strict for tool in tools):
        rules, parts = _call_rules(request, tools, all_strict=False)
        opened = lark.until("opened", lark.literal(CALL))
        answer, inner = f"(opened body)* REST\n{opened}\nREST: {lark.TEXT}", None
    else:
        return None
    whole = f"{lark.HEADER}\nstart: {_reasoning(reasoning)}answer\nanswer: {answer}\n{rules}"
    if reasoning is not Reasoning.NONE:
        whole += "\n" + lark.until("reasoning", lark.literal(THINK.close))
    if inner is not None:
        listed = [{"lark_grammar": whole}, {"name": "format", "lark_grammar": inner}]
        whole = json.dumps({"grammars": listed})
    if len(whole) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(
            f"the tools' parameters and the answer's format exceed {MAX_GRAMMAR_LENGTH} characters", "tools"
        )
    return AnswerGrammar(whole, parts)


def _reasoning(reasoning: Reasoning) -> str:
    """What comes before the answer."""
    if reasoning is Reasoning.NONE:
        return ""
    line_breaks = lark.literal("\n\n")
    ended = f"reasoning {line_breaks}? "
    return ended if reasoning.is_open else f"({lark.literal(THINK.open)} {ended})? "


def _forced(request: ChatCompletionRequest, tools: Sequence[Tool]) -> tuple[Sequence[Tool], bool | None]:
    if isinstance(choice := request.call_choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name], False
    return tools, request.parallel_tool_calls


def _calls(parallel: bool | None) -> str:
    """One call or more, and nothing else."""
    line_break = lark.literal("\n")
    more = "" if parallel is False else f" ({line_break} call)*"
    return f"calls: call{more}\ncall: {lark.literal(CALL)} body"


def _call_rules(
    request: ChatCompletionRequest, tools: Sequence[Tool], *, all_strict: bool
) -> tuple[str, list[GrammarPart]]:
    """Return the rules of what follows a call's opening tag, and what the request's fields contribute. Arguments are
    valid if the tool is strict."""
    numbers = {tool.function.name: number for number, tool in enumerate(request.tools or ())}
    rules, parts = [], []
    for tool in tools:
        number, arguments = numbers[tool.function.name], _ANY_OBJECT
        if tool.function.parameters and (all_strict or tool.function.strict):
            param = f"tools[{number}].function.parameters"
            arguments = lark.json_schema(tool.function.parameters, param)
            parts.append(GrammarPart(param, arguments))
        begin = lark.literal(f'\n{{"name": "{tool.function.name}", "arguments": ')
        end = lark.literal(f"}}\n{END_CALL}")
        rules.append(f"tool_{number}: {begin} {arguments} {end}")
    names = " | ".join(f"tool_{numbers[tool.function.name]}" for tool in tools)
    return "\n".join([f"body: {names}", *rules]), parts
