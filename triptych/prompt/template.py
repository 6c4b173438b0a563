"""Renders conversations with a checkpoint's chat template, in Jinja's sandbox, as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from triptych.checkpoint.config_files import read_json_object
from triptych.errors import CheckpointError, InvalidRequest
from triptych.prompt.bounded_jinja import BoundedEnvironment
from triptych.prompt.formats.reasoning import THINK

_TEMPLATE_FILE = "chat_template.jinja"
_LEGACY_TEMPLATE_FILE = "chat_template.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# What templates raise on messages of an unexpected shape, besides Jinja's own errors.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


class ChatTemplate:
    """A checkpoint's template: ``chat_template.jinja``, else ``chat_template`` of tokenizer_config.json, else that of
    chat_template.json, else ``default``, which those two don't precede if ``ignores_tokenizers`` is set. Raises
    CheckpointError when there is none or it doesn't parse.
    """

    def __init__(self, folder: Path, default: str | None = None, *, ignores_tokenizers: bool = False) -> None:
        tokenizer_config = _read_if_there(folder / _TOKENIZER_CONFIG_FILE)
        configs = [] if ignores_tokenizers else [tokenizer_config, _read_if_there(folder / _LEGACY_TEMPLATE_FILE)]
        source = _template_source(folder, configs, default)
        # transformers defines these two for every template, and some test them against none.
        self._variables: dict[str, Any] = {"tools": None, "documents": None, **_special_tokens(tokenizer_config)}
        self._environment = environment = _environment()
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{folder}: the chat template doesn't parse: {error}") from error
        self.supports_tools = "tools" in read
        self.supports_reasoning = THINK.open in source
        """Whether the template handles reasoning between tags."""
        own = {"messages", "add_generation_prompt", "continue_final_message", *self._variables, *environment.globals}
        self.variables = frozenset(read - own)
        """Variables that it reads besides the conversation, such as ``enable_thinking``; requests may set them."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """Return the prompt's text. With ``continue_final_message`` it ends with the last message's text, which the
        model then continues. ``extra`` are further variables of the template, such as ``tools``.

        Raises InvalidRequest for messages that the template rejects or can't handle.
        """
        text = self._render(messages, add_generation_prompt and not continue_final_message, extra)
        return _until_end_of(_last_text(messages), text) if continue_final_message else text

    def starts_sequence(self, text: str) -> bool:
        """Return whether a rendered ``text`` starts with the token that starts a sequence, so that the tokenizer must
        not add it again."""
        start: str = self._variables.get("bos_token", "")
        return start != "" and text.startswith(start)

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, extra: Any) -> str:
        variables = {**self._variables, **extra}
        try:
            with self._environment.bounded():
                return self._template.render(
                    messages=messages, add_generation_prompt=add_generation_prompt, **variables
                )
        except _TEMPLATE_ERRORS as error:
            reason = str(error).strip().splitlines()[:1]
            raise InvalidRequest(
                f"the model's chat template can't render these messages: {(reason or ['no reason given'])[0][:200]}",
                "messages",
            ) from error


def _last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[-1]["content"]
    return content if isinstance(content, str) else str(content[-1]["text"])


def _until_end_of(last: str, text: str) -> str:
    """Cut the prompt after the last message's text. If the template strips that text, its trailing white space is lost,
    as in transformers."""
    for wanted in (last, last.rstrip(), last.strip()):
        if (start := text.rfind(wanted)) >= 0:
            return text[: start + len(wanted)]
    raise InvalidRequest("the model's chat template changes the last message, so it can't be continued", "messages")


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


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _template_source(folder: Path, configs: Sequence[dict[str, Any]], default: str | None) -> str:
    path = folder / _TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: can't be read as UTF-8") from error
    for config in configs:
        source = _default_template(config.get("chat_template"))
        if source is not None:
            return source
    if default is not None:
        return default
    raise CheckpointError(
        f"{folder}: no chat template in {_TEMPLATE_FILE}, {_TOKENIZER_CONFIG_FILE} or {_LEGACY_TEMPLATE_FILE}"
    )


def _default_template(value: Any) -> str | None:
    """Return the template in ``chat_template``: a string, or the one named ``default`` in a list."""
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the text of each token that the tokenizer's config names, such as ``eos_token``."""
    extra = tokenizer_config.get("extra_special_tokens")
    named = {**tokenizer_config, **extra} if isinstance(extra, dict) else tokenizer_config
    tokens = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
