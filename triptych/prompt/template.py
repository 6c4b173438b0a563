"""Renders conversations with a checkpoint's chat template, in Jinja's sandbox, as transformers does."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from triptych.errors import CheckpointError, InvalidRequest
from triptych.prompt.bounded_jinja import BoundedEnvironment
from triptych.prompt.template_files import DEFAULT, TOOL_USE, read_special_tokens, read_templates
from triptych.prompt.template_forms import PROBE_TOOLS

# What templates raise on messages of an unexpected shape, besides Jinja's own errors.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""What templates call the reasoning of an earlier answer."""
_PROBE_NAMES = [tool["function"]["name"] for tool in PROBE_TOOLS]
_MARK, _BLANKS = f"mark{secrets.token_hex(16)}", "\n\t \n"
"""What is rendered behind a text that is continued: clients can't know it, and templates that strip texts strip its
white space."""


class ChatTemplate:
    """A checkpoint's templates (``template_files``): that for tools, if there is one, and that for other conversations.

    Every conversation is refused if there is none. Raises CheckpointError for a template that doesn't parse.
    """

    def __init__(self, folder: Path, default: str | None = None, *, ignores_tokenizers: bool = False) -> None:
        sources = read_templates(folder, default, ignores_tokenizers=ignores_tokenizers)
        # transformers defines these two for every template, and some test them against none.
        self._variables: dict[str, Any] = {"tools": None, "documents": None, **read_special_tokens(folder)}
        self._environment = environment = _environment()
        self.names = sorted(sources)
        """Names of the templates; empty if the model has none."""
        self._templates = {}
        read: set[str] = set()
        for name in (DEFAULT, TOOL_USE):
            if (source := sources.get(name)) is None:
                continue
            try:
                self._templates[name] = environment.from_string(source)
                read |= jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as error:
                raise CheckpointError(f"{folder}: the chat template {name!r} doesn't parse: {error}") from error
        self.source = "\n".join(sources[name] for name in self._templates)
        self._tools_form: Callable[[Any], Any] | None = None
        if "tools" not in read and "tools" in self.source:
            self._tools_form = self._find_tools_form()
        self.supports_tools = "tools" in read or self._tools_form is not None
        own = {"messages", "add_generation_prompt", "continue_final_message", *self._variables, *environment.globals}
        self.variables = frozenset(read - own)
        """Variables that they read besides the conversation, such as ``enable_thinking``; requests may set them."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """Return the prompt's text. With ``continue_final_message`` it ends with the last message's text, which the
        model then continues: its content or, if that is empty, its reasoning. ``extra`` are further variables of the
        template, such as ``tools``.

        Raises InvalidRequest for messages that the template rejects or can't handle.
        """
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, extra)
        text = self._render([*messages[:-1], _marked(messages[-1])], False, extra)
        end = text.rfind(_MARK)
        if end < 0:
            where = f"messages[{len(messages) - 1}]"
            raise InvalidRequest(f"{where}: the model's chat template doesn't show it, so it can't be continued", where)
        if text.startswith(_MARK + _BLANKS, end):
            return text[:end]
        return text[:end].rstrip("\n" if text.startswith(_MARK + _BLANKS.rstrip("\n"), end) else None)

    def _find_tools_form(self) -> Callable[[Any], Any] | None:
        """Return the form of tools that the templates take as ``tools`` of a system message; None if they don't."""
        for form in (list, json.dumps):
            try:
                text = self._render(_with_tools([{"role": "user", "content": ""}], PROBE_TOOLS, form), True, {})
            except InvalidRequest:
                continue
            if all(name in text for name in _PROBE_NAMES) and "'name'" not in text:
                return form
        return None

    def starts_sequence(self, text: str) -> bool:
        """Return whether a rendered ``text`` starts with the token that starts a sequence, so that the tokenizer must
        not add it again."""
        start: str = self._variables.get("bos_token", "")
        return start != "" and text.startswith(start)

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, extra: Any) -> str:
        name = TOOL_USE if extra.get("tools") and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            others = f"; it has {', '.join(self.names)}" if self.names else ": use /v1/completions"
            raise InvalidRequest(f"the model has no chat template for these messages{others}", "messages")
        if self._tools_form is not None and extra.get("tools"):
            messages = _with_tools(messages, extra["tools"], self._tools_form)
        variables = {**self._variables, **extra}
        try:
            with self._environment.bounded():
                return self._templates[name].render(
                    messages=messages, add_generation_prompt=add_generation_prompt, **variables
                )
        except _TEMPLATE_ERRORS as error:
            reason = str(error).strip().splitlines()[:1]
            raise InvalidRequest(
                f"the model's chat template can't render these messages: {(reason or ['no reason given'])[0][:200]}",
                "messages",
            ) from error


def _with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: Callable[[Any], Any]
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with the tools' functions on a system message at the beginning, empty if there is none."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    return [{**first, "tools": form([tool["function"] for tool in tools])}, *messages[has_system:]]


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the mark behind the text that is continued."""
    mark = _MARK + _BLANKS
    match message["content"]:
        case "" | [] | [{"text": ""}]:
            return {**message, **{name: message[name] + mark for name in REASONING_FIELDS if message.get(name)}}
        case [*before, {"text": text, **rest}]:
            return {**message, "content": [*before, {**rest, "text": text + mark}]}
        case str(content):
            return {**message, "content": content + mark}
    return dict(message)


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; when serving, only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which escapes for HTML; models weren't trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
