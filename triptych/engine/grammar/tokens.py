"""The bytes that each token of a checkpoint's tokenizer adds to a text, as grammars count them."""

import json
import re
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_AROUND = "a"


def load_tokens(folder: Path, vocabulary: int | None = None) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each of ``vocabulary`` tokens, by default of all that have text, and the special tokens,
    which clients' texts lack. Tokens without text have no bytes."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if vocabulary is None:
        vocabulary = 1 + max(tokenizer.get_vocab().values())
    added = tokenizer.get_added_tokens_decoder()
    special = [number for number, token in added.items() if token.special and number < vocabulary]
    names = [tokenizer.id_to_token(number) for number in range(vocabulary)]
    decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
    if '"ByteLevel"' in decoder:
        found = [_of_byte_level(name) if name is not None else b"" for name in names]
    else:
        found = _decoded(tokenizer, names)
        if '"ByteFallback"' in decoder:
            for number, name in enumerate(names):
                if name is not None and (byte := _BYTE.fullmatch(name)):
                    found[number] = bytes.fromhex(byte[1])
    for number in special:
        found[number] = added[number].content.encode()
    return found, special


def _of_byte_level(name: str) -> bytes:
    """A token that isn't spelled in the alphabet of bytes is text as it is."""
    try:
        return bytes(_BYTE_OF[letter] for letter in name)
    except KeyError:
        return name.encode()


def _byte_of_letter() -> dict[str, int]:
    """The letters by which byte-level vocabularies spell bytes: printable ones stand for themselves, and the others
    for the missing bytes in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    others = [letter for letter in alphabet if ord(letter) >= 256]
    return printable | dict(zip(others, sorted(set(range(256)) - set(printable.values())), strict=True))


_BYTE_OF = _byte_of_letter()


def _decoded(tokenizer: tokenizers.Tokenizer, names: list[str | None]) -> list[bytes]:
    """Decode each token between two others, because the first of a text may lose a space."""
    around = tokenizer.token_to_id(_AROUND)
    if around is None:
        raise ValueError(f"the vocabulary has no token for {_AROUND!r}")
    numbers = [number for number, name in enumerate(names) if name is not None]
    texts = tokenizer.decode_batch([[around, number, around] for number in numbers], skip_special_tokens=False)
    found = [b""] * len(names)
    for number, text in zip(numbers, texts, strict=True):
        found[number] = text.removeprefix(_AROUND).removesuffix(_AROUND).encode()
    return found
