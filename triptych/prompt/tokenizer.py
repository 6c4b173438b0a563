"""Text to tokens, with a checkpoint's ``tokenizer.json``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from triptych.errors import CheckpointError
from triptych.models.config_files import load_config, read_json_object


class Tokenizer:
    """``eos_token_ids`` end generation: those of generation_config.json, else of config.json or its text_config.

    Raises CheckpointError, naming the file, for a missing or unreadable tokenizer.json and for a bad end token.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; a checkpoint folder has a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers package raises nothing more specific
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
        # The file may carry settings for training batches, which would cut or fill a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_ids = _eos_token_ids(folder)

    @property
    def vocab_size(self) -> int:
        """Tokens that have text, added ones included. The model's table may have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Adds no token of its own; special tokens written out in ``text`` become those tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Bytes that aren't UTF-8 become U+FFFD; ids without text are skipped."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_of(self, token_id: int) -> str | None:
        """How the vocabulary spells a token: a special token's literal text; None for an id without one."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token


def _eos_token_ids(folder: Path) -> frozenset[int]:
    path = folder / "generation_config.json"
    config = load_config(folder)
    text_config = config.get("text_config")
    sources = [("generation_config.json", read_json_object(path) if path.is_file() else {}), ("config.json", config)]
    if isinstance(text_config, dict):
        sources.append(("config.json: text_config", text_config))
    for source, values in sources:
        value = values.get("eos_token_id")
        if value is not None:
            return frozenset(_token_ids(value, f"{folder / source}: eos_token_id"))
    return frozenset()


def _token_ids(value: Any, name: str) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"{name} must be a token id or a list of them, not {value!r}")
    return ids
