"""What a GGUF file says of a checkpoint folder's tokenizer: the inverse of ``tokenizer``.

How text is divided is found by dividing ``PROBE``, as llama.cpp's converter does: tokenizers say the same in many ways.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from triptych.checkpoint.config_files import read_json_object
from triptych.checkpoint.gguf.file import GgufFile, Value
from triptych.checkpoint.gguf.tokenizer import (
    CONTROL,
    DEFAULT,
    NORMAL,
    PRE_TOKENIZERS,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    tokenizer_json,
)
from triptych.errors import CheckpointError

UNUSED, BYTE = 5, 6
"""Types of tokens that are only written."""
PROBE = (
    "Hello World's HelloWorld don't WE'LL naïve cafe\u0301 1 12 123 1234 12345 3.14 a/b //\n\n x\n \n  y\t\tz   \r\n"
    " ---- #include <stdio.h>; x_1 += 2 !!?? ...a 你好世界 こんにちは 안녕 Привет ΑΒγ 🙂🚀 ¼² é\u200d١٢٣ A1b2 "
    "' \"'re  end "
)
SPECIAL_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
"""By the names in tokenizers' files, without those of padding: what GGUF files call their numbers."""
ENDS = ("eos", "eot", "eom")
"""What they call tokens that end an answer."""


@dataclass(frozen=True)
class PromptFiles:
    """What a folder's files say of prompts and answers."""

    special_tokens: Mapping[str, str]
    """By name, such as ``eos_token``."""
    ends: Collection[int]
    """Tokens that end an answer."""
    template: str | None
    """For conversations."""


@dataclass(frozen=True)
class _Source:
    folder: Path
    tokenizer: Tokenizer
    model: Mapping[str, Any]
    tokens: Sequence[str]
    """The texts of all numbers up to the embedding's last."""
    types: Sequence[int]


def tokenizer_settings(folder: Path, size: int, prompts: PromptFiles) -> dict[str, Value]:
    """Return the settings of a folder's ``tokenizer.json`` for an embedding of ``size`` rows. Raises CheckpointError,
    naming what can't be written, for end tokens that settings can't name, and for a tokenizer that would not encode
    ``PROBE`` as it does."""
    source = _source(folder, size)
    ids = {text: number for number, text in enumerate(source.tokens)}
    settings: dict[str, Value] = {
        "tokenizer.ggml.tokens": list(source.tokens),
        "tokenizer.ggml.token_type": np.array(source.types, np.int32),
    }
    for name, setting in SPECIAL_TOKENS.items():
        if (number := ids.get(prompts.special_tokens.get(name, ""))) is not None:
            settings[f"tokenizer.ggml.{setting}"] = number
    named = settings.get("tokenizer.ggml.eos_token_id")
    ends = sorted(prompts.ends, key=lambda one: (one != named, one))
    if not 1 <= len(ends) <= len(ENDS):
        raise CheckpointError(f"{folder}: GGUF files name 1 to {len(ENDS)} tokens that end an answer, not {len(ends)}")
    if max(ends) >= size:
        raise CheckpointError(f"{folder}: end token {max(ends)} has no row in an embedding of {size}")
    settings |= {f"tokenizer.ggml.{name}_token_id": one for name, one in zip(ENDS, ends, strict=False)}
    first = source.tokenizer.encode("a", add_special_tokens=True).ids
    settings["tokenizer.ggml.add_bos_token"] = first[:1] == [settings.get("tokenizer.ggml.bos_token_id")]
    if prompts.template is not None:
        settings["tokenizer.chat_template"] = prompts.template
    settings |= _sentencepiece(source) if source.model.get("byte_fallback") else _byte_level(source)
    made = Tokenizer.from_str(tokenizer_json(GgufFile(folder, settings, {})))
    if made.encode(PROBE).ids != source.tokenizer.encode(PROBE).ids:
        raise CheckpointError(f"{folder}: GGUF files can't say how its tokenizer.json divides text")
    return settings


def _source(folder: Path, size: int) -> _Source:
    path = folder / "tokenizer.json"
    content = read_json_object(path)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise CheckpointError(f"{path}: a vocabulary of kind {kind!r} can't be written to GGUF files; 'BPE' can")
    try:
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    texts = {number: text for text, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.get_added_tokens_decoder()
    if texts and max(texts) >= size:
        raise CheckpointError(f"{path}: token {max(texts)} has no row in an embedding of {size}")
    unknown, falls_back = model.get("unk_token"), bool(model.get("byte_fallback"))
    types = []
    for number in range(size):
        text = texts.get(number)
        if text is None:
            types.append(UNUSED)
        elif text == unknown:
            types.append(UNKNOWN)
        elif number in added:
            types.append(CONTROL if added[number].special else USER_DEFINED)
        else:
            types.append(BYTE if falls_back and len(text) == 6 and text.startswith("<0x") else NORMAL)
    return _Source(folder, tokenizer, model, [texts.get(number, f"[PAD{number}]") for number in range(size)], types)


def _pairs(source: _Source) -> list[tuple[str, str]]:
    merges = source.model.get("merges", [])
    return [tuple(one.split(" ", 1) if isinstance(one, str) else one) for one in merges]


def _byte_level(source: _Source) -> dict[str, Value]:
    """Try each way to divide text, on an alphabet of few tokens, until one divides ``PROBE`` as the source does."""
    settings: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _pairs(source)],
    }
    expected = _divided(source.tokenizer)
    small: dict[str, Value] = {
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.token_type": np.ones(1),
        "tokenizer.ggml.merges": [],
    }
    for name in (one for one in PRE_TOKENIZERS if one != DEFAULT):
        tried = settings | small | {"tokenizer.ggml.pre": name}
        made = json.loads(tokenizer_json(GgufFile(source.folder, tried, {})))
        same_merges = bool(made["model"]["ignore_merges"]) == bool(source.model.get("ignore_merges"))
        if same_merges and _divided(Tokenizer.from_str(json.dumps(made))) == expected:
            return settings | {"tokenizer.ggml.pre": name}
    raise CheckpointError(f"{source.folder}: GGUF files have no name for how its tokenizer.json divides text")


def _divided(tokenizer: Tokenizer, text: str = PROBE) -> list[str]:
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer is not None else text
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _sentencepiece(source: _Source) -> dict[str, Value]:
    """A piece's score is the lower, the later its first merge is, as in the models that such files were made of."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_pairs(source)):
        ranks.setdefault("".join(pair), rank)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": np.array([-float(ranks.get(one, len(ranks))) for one in source.tokens], np.float32),
        "tokenizer.ggml.add_space_prefix": _divided(source.tokenizer, "a") == [SPACE + "a"],
    }
