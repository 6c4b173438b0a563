"""Makes the ``tokenizer.json`` of a GGUF file's vocabulary.

What the numbers and names mean: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's
``src/llama-vocab.cpp``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from triptych.checkpoint.gguf.file import GgufFile
from triptych.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens."""
MAX_PIECE = 1024
"""Characters of the longest piece that is divided to find its merges."""
SPACE = "▁"
DEFAULT = "default"
"""How text is divided where a file doesn't say. Its converter knew no better: no model was trained so."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKED_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}|"
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}|"
)
"""Words end where a small letter precedes a capital one."""
CASED_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)

JSON = dict[str, Any]


def tokenizer_json(file: GgufFile) -> str:
    """Return the tokenizer as ``tokenizers`` stores it. Raises CheckpointError for a kind that isn't served, and for
    lists that contradict each other."""
    settings = file.settings
    tokens = settings.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens must be different texts")
    types = [int(kind) for kind in _numbers(file, "tokenizer.ggml.token_type", len(tokens))]
    match settings.get("tokenizer.ggml.model"):
        case "gpt2":
            made = _byte_level(file, tokens)
        case "llama":
            made = _sentencepiece(file, tokens, types)
        case other:
            raise CheckpointError(f"{file.path}: tokenizer.ggml.model {other!r} is not served; served: 'gpt2', 'llama'")
    made["added_tokens"] = [
        {"id": number, "content": text, "special": kind == CONTROL, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and text
    ]  # fmt: skip
    bos = settings.get("tokenizer.ggml.bos_token_id")
    begins = settings["tokenizer.ggml.model"] == "llama" or settings.get("tokenizer.ggml.pre") in BEGINNING
    adds = settings.get("tokenizer.ggml.add_bos_token", begins)
    if adds and isinstance(bos, int) and 0 <= bos < len(tokens):
        made["post_processor"] = _leading(tokens, bos)
    try:
        return Tokenizer.from_str(json.dumps({"version": "1.0", **made}, ensure_ascii=False)).to_str()
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{file.path}: the tokenizer is not whole: {error}") from error


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> JSON:
    name = file.settings.get("tokenizer.ggml.pre", DEFAULT)
    split = PRE_TOKENIZERS.get(str(name))
    if split is None:
        served = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.pre {name!r} is not served; served: {served}")
    merges = file.settings.get("tokenizer.ggml.merges", [])
    if not isinstance(merges, list) or not all(" " in merge[1:] for merge in merges):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges must be pairs of tokens")
    pairs = [[merge[: (at := merge.index(" ", 1))], merge[at + 1 :]] for merge in merges]
    return {
        "model": _bpe(tokens, pairs, ignore_merges=name in WHOLE_FIRST),
        "normalizer": {"type": "NFC"} if name in NORMALISED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "decoder": _BYTES,
    }


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> JSON:
    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens))
    unknown = file.settings.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.unknown_token_id {unknown!r} is no token")
    if any(kind == NORMAL and len(text) > MAX_PIECE for text, kind in zip(tokens, types, strict=True)):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has a piece of over {MAX_PIECE} characters")
    begins = bool(file.settings.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces] if begins else [spaces]
    decoders: list[JSON] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if begins:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = _merges(tokens, types, scores)
    return {
        "model": _bpe(tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """Return the merges of a SentencePiece model: any two pieces that are a piece together, best score first."""
    rank = {text: number for number, text in enumerate(tokens)}
    pieces = [number for number, kind in enumerate(types) if kind == NORMAL and len(tokens[number]) > 1]
    merges: list[list[str]] = []
    for number in sorted(pieces, key=lambda one: (-scores[one], one)):
        text = tokens[number]
        halves = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in halves if pair[0] in rank and pair[1] in rank]
        merges += [list(pair) for pair in sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))]
    return merges


def _bpe(tokens: Sequence[str], merges: list[list[str]], **settings: Any) -> JSON:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}  # fmt: skip
    vocabulary = {text: number for number, text in enumerate(tokens)}
    return {"type": "BPE", **plain, **settings, "vocab": vocabulary, "merges": merges}


def _leading(tokens: Sequence[str], bos: int) -> JSON:
    """Return the step that puts a token before a text."""
    begin, text = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    named = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
    return {
        "type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, second], "special_tokens": named,
    }  # fmt: skip


def _numbers(file: GgufFile, name: str, count: int) -> Sequence[float]:
    found = file.settings.get(name)
    if not isinstance(found, np.ndarray) or len(found) != count or not np.isfinite(found).all():
        raise CheckpointError(f"{file.path}: {name} must be {count} numbers")
    return list(found)


def _by(pattern: str) -> list[JSON]:
    return [_split(pattern), _WHOLE]


def _split(pattern: str) -> JSON:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_WHOLE: JSON = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_BYTES: JSON = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_GPT2, _DIGITS = [_BYTES], [{"type": "Digits", "individual_digits": True}, _BYTES]
_LLAMA3, _QWEN2 = _by(WORDS + r"\p{N}{1,3}" + MARKS), _by(WORDS + r"\p{N}" + MARKS)
PRE_TOKENIZERS: Mapping[str, list[JSON]] = {
    name: steps
    for names, steps in (
        ("gpt-2 phi-2 mpt olmo jais", _GPT2),
        ("tekken", _by(CASED.format("") + r"\p{N}" + CASED_MARKS)),
        ("gpt-4o llama4", _by(CASED.format(ENDING) + r"\p{N}{1,3}" + CASED_MARKS)),
        ("qwen35", _by(MARKED_WORDS + r"\p{N}" + MARKS.replace(r"\p{L}", r"\p{L}\p{M}"))),
        ("deepseek-v3", [*map(_split, DEEPSEEK), _WHOLE]),
        ("smollm refact command-r starcoder codeshell", _DIGITS),
        ("llama-bpe llama3 llama-v3 pixtral falcon3 smaug-bpe dbrx chatglm-bpe glm4", _LLAMA3),
        ("qwen2 deepseek-r1-qwen stablelm2 hunyuan", _QWEN2),
        (DEFAULT, [*map(_split, (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), _WHOLE]),
    )
    for name in names.split()
}
"""By llama.cpp's names: how text is divided before its bytes are merged."""
BEGINNING = ("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "tekken")
"""The first token is that of the beginning, unless a setting says otherwise."""
WHOLE_FIRST = (*BEGINNING, "glm4")
"""A word that is a token is taken whole, without merges."""
NORMALISED = ("qwen2", "deepseek-r1-qwen")
