"""Reads what a checkpoint's files say about its chat templates: their text, and the special tokens that they name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.checkpoint.config_files import read_json_object
from triptych.errors import CheckpointError

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
LEGACY_TEMPLATE_FILE = "chat_template.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: the one for conversations with tools, if there is one, and the one for all others."""


def read_templates(folder: Path, default: str | None, *, ignores_tokenizers: bool) -> dict[str, str]:
    """Return the templates of a folder by their names; empty if it has none.

    The first of these that is there counts: ``chat_template.jinja`` with ``additional_chat_templates/NAME.jinja``,
    ``chat_template`` of tokenizer_config.json, that of chat_template.json, ``default``. With ``ignores_tokenizers``,
    the second and the third don't. Raises CheckpointError for a file that can't be read.
    """
    more = {path.stem: _text(path) for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (path := folder / TEMPLATE_FILE).is_file():
        return {**more, DEFAULT: _text(path)}
    if more:
        return more
    for name in () if ignores_tokenizers else (TOKENIZER_CONFIG_FILE, LEGACY_TEMPLATE_FILE):
        if named := _named(_read_if_there(folder / name).get("chat_template")):
            return named
    return {} if default is None else {DEFAULT: default}


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the text of each token that the tokenizer's files name, such as ``eos_token``.

    tokenizer_config.json precedes special_tokens_map.json, as in transformers. Raises CheckpointError for a file that
    isn't a JSON object.
    """
    config = _read_if_there(folder / TOKENIZER_CONFIG_FILE)
    named = (config.get(name) for name in ("extra_special_tokens", "model_specific_special_tokens"))
    sources = [_read_if_there(folder / SPECIAL_TOKENS_FILE), config, *(one for one in named if isinstance(one, dict))]
    tokens = {}
    for name, value in (item for source in sources for item in source.items()):
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: can't be read as UTF-8") from error


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _named(value: Any) -> dict[str, str]:
    """Return the templates in ``chat_template`` by name: a string, a list of objects with name and template, or an
    object of templates by name."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, Sequence):
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    pairs = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
