"""Tokenization with a checkpoint's ``tokenizer.json``."""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from triptych.checkpoint.config_files import GENERATION_CONFIG, load_config, load_generation_config
from triptych.errors import CheckpointError
from triptych.prompt.template_files import read_special_tokens
from triptych.text.decoders import TextDecoder, steps_of, strips_ends, token_bytes
from triptych.text.tokenizer_file import load_tokenizer

_SHRINKING = (normalizers.NFC, normalizers.Lowercase)
_MANY = 4096
"""Tokens from which decoding would hold the interpreter's lock too long."""
_CONTEXT = 16
_MAX_SHRINKING = 4
"""These normalizers leave no less than a quarter of a text's bytes: a character has four at most, and composition makes
one of 3.5 times its bytes at most (Unicode 16)."""


class Tokenizer:
    """``eos_token_ids`` end generation: those of generation_config.json, else of config.json or its text_config, and
    the ``eos_token`` of tokenizer_config.json, else of special_tokens_map.json.
    ``special_ids`` are those of the special tokens, which have no text unless it is asked for.

    Raises CheckpointError, naming the file, for a missing or unreadable tokenizer.json and for a bad end token.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        # The file may carry settings for training batches, which would cut or fill a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = self.id_of(read_special_tokens(folder).get("eos_token", ""))
        self.eos_token_ids = _eos_token_ids(folder) | (frozenset() if named is None else {named})
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._steps = steps_of(self._tokenizer.decoder)
        self._strips_ends = strips_ends(self._tokenizer.decoder)
        self._max_bytes_per_token = _max_bytes_per_token(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have text, added ones included. The model's embedding table may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Tokenize text. Special tokens written out in it become those tokens. ``add_special_tokens`` adds what the
        tokenizer puts around a text, such as a beginning-of-text token."""
        # ``encode`` would hold the interpreter's lock, and so block all other threads
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def num_added(self) -> tuple[int, int]:
        """Number of tokens that ``add_special_tokens`` puts before and after a text."""
        own, all_tokens = self.encode("a"), self.encode("a", add_special_tokens=True)
        num_added = len(all_tokens) - len(own)
        before = next((n for n in range(num_added) if all_tokens[n : n + len(own)] == own), num_added)
        return before, num_added - before

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of ``text``, without tokenizing it; 0 if there is no bound."""
        return len(text.encode()) // self._max_bytes_per_token if self._max_bytes_per_token else 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens to text. Bytes that aren't UTF-8 become U+FFFD; ids without text are skipped."""
        if self._strips_ends:
            decoder, hidden = self.text_decoder(), self.special_ids if skip_special_tokens else ()
            pieces = [decoder.push(token_id) for token_id in token_ids if token_id not in hidden]
            return "".join(pieces) + decoder.finish()
        if len(token_ids) > _MANY:
            # ``decode`` would hold the interpreter's lock, as ``encode`` does
            return str(self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def text_decoder(self, preceding: Sequence[int] = ()) -> TextDecoder:
        """Return a decoder of a text's tokens, special ones included. The text continues that of the ``preceding``
        tokens; a character that they begin and the text ends belongs to the text."""
        decoder = TextDecoder(self._tokenizer.id_to_token, self._steps)
        for token in preceding:
            decoder.push(token)
        if preceding:
            decoder.pause()
        return decoder

    def context_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """Return the last tokens that have text: those that decide how the next one is decoded."""
        hidden = self.special_ids if skip_special_tokens else ()
        last = list(islice((token_id for token_id in reversed(token_ids) if token_id not in hidden), _CONTEXT))
        return last[::-1]

    def bytes_of(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes that a token adds to a text, which need not be whole characters. The ``first`` token of a text may
        lack a space that others have."""
        token = self.token_of(token_id)
        return b"" if token is None else token_bytes(token, self._steps, first=first)

    def text_of(self, token_id: int, *, first: bool = False) -> str:
        """The text of ``bytes_of``, with U+FFFD for incomplete characters."""
        return self.bytes_of(token_id, first=first).decode(errors="replace")

    def token_of(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it: a special token's literal text; None for an unknown id."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def id_of(self, token: str) -> int | None:
        """Return the id of a token that the vocabulary spells so; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def _max_bytes_per_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token stands for. None unless every byte becomes (part of) a token: other
    kinds of tokenizers drop spaces, or replace any number of characters by one unknown token."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    keeps_every_byte = (
        isinstance(tokenizer.model, models.BPE)
        and isinstance(tokenizer.decoder, decoders.ByteLevel)
        and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        and _only_splits(tokenizer.pre_tokenizer)
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not keeps_every_byte or not isinstance(tokenizer.normalizer, (*_SHRINKING, type(None))):
        return None
    # a byte-level vocabulary spells each byte as one character
    longest = max([*map(len, vocabulary), *(len(token.content.encode()) for token in added)])
    return longest * (_MAX_SHRINKING if tokenizer.normalizer else 1)


def _only_splits(pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> bool:
    """Return whether it is byte-level and drops nothing."""
    if pre_tokenizer is None:
        return False
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state.get("pretokenizers", [state])
    keeping = all(
        step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    return keeping and any(step["type"] == "ByteLevel" for step in steps)


def _eos_token_ids(folder: Path) -> frozenset[int]:
    config = load_config(folder)
    text_config = config.get("text_config")
    sources = [(GENERATION_CONFIG, load_generation_config(folder)), ("config.json", config)]
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
