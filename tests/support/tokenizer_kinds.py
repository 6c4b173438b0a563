"""Small tokenizers, one of each kind that models have: their vocabularies, normalizers and decoders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

SPECIAL = ("<s>", "</s>", "<unk>", "<|im_end|>")
_WORDS = ["▁", "▁a", "▁the", "the", "▁▁", "é", "ing", "▁is", "▁.", ".", ",", "▁你", "好", "\n", "a", "b", "'s", "n't"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece(decoder: Any, normalizer: Any) -> tokenizers.Tokenizer:
    words = [*SPECIAL, *_BYTES, *_WORDS]
    vocab = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer, made.decoder = normalizer, decoder
    return made


_SPACES = decoders.Replace("▁", " ")
_PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _llama2() -> tokenizers.Tokenizer:
    parts = [_SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(parts), _PREPENDED)


def _gemma() -> tokenizers.Tokenizer:
    decoder = decoders.Sequence([_SPACES, decoders.ByteFallback(), decoders.Fuse()])
    return _sentencepiece(decoder, normalizers.Replace(" ", "▁"))


def _whole_text() -> tokenizers.Tokenizer:
    """As Llama 2's, with the spaces of the whole text replaced."""
    parts = [
        decoders.ByteFallback(),
        decoders.Fuse(),
        _SPACES,
        decoders.Replace("  ", " "),
        decoders.Strip(" ", 1, 0),
    ]
    return _sentencepiece(decoders.Sequence(parts), _PREPENDED)


def _tokens_stripped() -> tokenizers.Tokenizer:
    parts = [_SPACES, decoders.ByteFallback(), decoders.Strip(" ", 1, 0), decoders.Fuse()]
    return _sentencepiece(decoders.Sequence(parts), _PREPENDED)


def _byte_level(added: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġthe", "ä½ł", "å¥½", "ĠðŁ", "ðŁİī", "Ċ", "ing"]
    made = tokenizers.Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken(text, normalized=False) for text in added])
    return made


def _word_piece() -> tokenizers.Tokenizer:
    words = [
        "[UNK]",
        "the",
        "##ing",
        "##s",
        ".",
        ",",
        "'",
        "n't",
        "do",
        "not",
        "##n't",
        "a",
        "é",
        "你",
        "##好",
        "!",
        "##",
    ]
    made = tokenizers.Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece("##", cleanup=True)
    return made


def _metaspace() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({word: n for n, word in enumerate(_WORDS)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def _unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in _WORDS)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    return made


def _suffixed() -> tokenizers.Tokenizer:
    words = ["the</w>", "th", "e</w>", "</w>", "a</w>", "a", "b", "é</w>", "好", ".</w>"]
    made = tokenizers.Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], end_of_word_suffix="</w>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    return made


def _ctc() -> tokenizers.Tokenizer:
    words = ["<pad>", "|", "a", "b", " .", "é", "n't", " ", "'s"]
    made = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    made.decoder = decoders.CTC()
    return made


def _none() -> tokenizers.Tokenizer:
    words = ["<unk>", "the", "a", "é", "你好", ".", "<0x41>"]
    made = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def _mixed() -> tokenizers.Tokenizer:
    """A chain that no model has: patterns by token and of the whole text, and stages behind one that joins."""
    parts = [
        decoders.Replace(Regex("▁+"), " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.WordPiece("##", cleanup=True),
        decoders.Replace(Regex("a+"), "a"),
        decoders.Sequence([decoders.Strip(" ", 2, 0), decoders.Fuse()]),
    ]
    return _sentencepiece(decoders.Sequence(parts), normalizers.Replace(" ", "▁"))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "Llama 2": _llama2,
    "Gemma": _gemma,
    "whole text": _whole_text,
    "tokens stripped": _tokens_stripped,
    "Llama 3": _byte_level,
    "DeepSeek": lambda: _byte_level(("<｜User｜>", "<think>", "é", " ")),
    "WordPiece": _word_piece,
    "Metaspace": _metaspace,
    "T5": _unigram,
    "suffix": _suffixed,
    "CTC": _ctc,
    "no decoder": _none,
    "mixed": _mixed,
}


def save_kind(kind: str, folder: Path) -> tokenizers.Tokenizer:
    """Write a kind's ``tokenizer.json`` to a folder and return it as the tokenizers package reads it."""
    made = KINDS[kind]()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    path = folder / "tokenizer.json"
    made.save(str(path))
    return tokenizers.Tokenizer.from_file(str(path))
