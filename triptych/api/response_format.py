"""The grammar of a chat's whole answer: reasoning, tool calls and the format of the text."""

import json
from collections.abc import Sequence

from triptych.api.schemas import ChatCompletionRequest
from triptych.api.tool_schemas import Tool, constraint_of
from triptych.errors import InvalidRequest
from triptych.prompt import lark
from triptych.prompt.answer_grammar import AnswerGrammar, GrammarPart
from triptych.prompt.formats.catalog import Formats
from triptych.prompt.formats.constrain import MAX_LENGTH, CallWriter
from triptych.prompt.formats.hermes import Hermes
from triptych.prompt.formats.reasoning import THINK, Reasoning

_LINE_BREAKS = lark.choice(("\n\n", "\n"))
"""What may be around the tags of reasoning."""
_USUAL = Formats((THINK,), (Hermes(),), reasons=True, special={})


def answer_grammar(
    request: ChatCompletionRequest, reasoning: Reasoning, formats: Formats = _USUAL
) -> AnswerGrammar | None:
    """Return the grammar of the answer, or None if it is unconstrained. Where calls are forced, the answer has no text
    that a format could apply to.

    Raises InvalidRequest for constraints that exclude each other."""
    text, tools, writer, inner = request.text_grammar, request.callable_tools, formats.writer, None
    if tools and request.must_call:
        forced, parallel = _forced(request, tools)
        rules, parts = _call_rules(writer, request, forced, all_strict=True)
        answer = f"calls\n{_calls(writer, parallel)}"
    elif text is not None:
        if not tools and reasoning is Reasoning.NONE:
            return text.alone()
        inner = None if text.is_expression else text.text
        rules, parts = _call_rules(writer, request, tools, all_strict=True) if tools else ("", [])
        begin = formats.calls[0].text_begin if reasoning is not Reasoning.NONE else ""
        answer = f"{writer.spelled(begin)} {text.text if inner is None else '@format'}"
        parts = [GrammarPart(text.param, text.text, text.is_expression), *parts]
        if tools:
            answer = f"text | calls\ntext: {answer}\n{_calls(writer, request.parallel_tool_calls)}"
    elif any(tool.function.strict for tool in tools) and (free := writer.free()) is not None:
        rules, parts = _call_rules(writer, request, tools, all_strict=False)
        answer = free
    else:
        return None
    tags = formats.reasoning[0] if formats.reasoning else THINK
    before = ""
    if reasoning is not Reasoning.NONE:
        rules += "\n" + writer.until("reasoning", tags.close)
        after = writer.spelled(tags.after) if tags.after else f"{_LINE_BREAKS}?"
        before = f"reasoning {after} "
        if not reasoning.is_open:
            before = f"({_LINE_BREAKS}? {writer.spelled(tags.open)} {before})? "
    whole = f"{lark.HEADER}\nstart: {before}answer\nanswer: {answer}\n{rules}"
    if inner is not None:
        listed = [{"lark_grammar": whole}, {"name": "format", "lark_grammar": inner}]
        whole = json.dumps({"grammars": listed})
    if len(whole) > MAX_LENGTH:
        raise InvalidRequest(f"the tools' parameters and the answer's format exceed {MAX_LENGTH} characters", "tools")
    return AnswerGrammar(whole, parts)


def _forced(request: ChatCompletionRequest, tools: Sequence[Tool]) -> tuple[Sequence[Tool], bool | None]:
    if (name := request.named_tool) is not None:
        return [tool for tool in tools if tool.function.name == name], False
    return tools, request.parallel_tool_calls


def _calls(writer: CallWriter, parallel: bool | None) -> str:
    """One call or more, and nothing else."""
    return f"calls: {writer.spelled(writer.form.opener)} {writer.section(parallel is not False)}"


def _call_rules(
    writer: CallWriter, request: ChatCompletionRequest, tools: Sequence[Tool], *, all_strict: bool
) -> tuple[str, list[GrammarPart]]:
    """Return the rules of calls, and what the request's fields contribute. Arguments are valid if the tool is
    strict."""
    numbers = {tool.function.name: number for number, tool in enumerate(request.functions)}
    rules, parts = [], []
    for tool in tools:
        number = numbers[tool.function.name]
        param = f"tools[{number}].{constraint_of((request.tools or [])[number])}"
        parameters = tool.function.parameters if all_strict or tool.function.strict else None
        rule, arguments = writer.tool(number, tool.function.name, parameters, param)
        rules.append(rule)
        if parameters:
            parts.append(GrammarPart(param, arguments))
    names = " | ".join(f"tool_{numbers[tool.function.name]}" for tool in tools)
    return "\n".join([f"call: {names}", *rules]), parts
