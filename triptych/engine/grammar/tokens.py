"""The bytes that each token of a checkpoint's tokenizer adds to a text, as grammars count them."""

from pathlib import Path

from triptych.text.decoders import steps_of, token_bytes
from triptych.text.tokenizer_file import load_tokenizer

MAX_BYTES = 1000
"""Bytes of the longest token that llguidance takes, rounded down."""


def load_tokens(folder: Path, vocabulary: int | None = None) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each of ``vocabulary`` tokens, by default of all that have text, and the special tokens,
    which clients' texts lack. Tokens without text, and those of more than MAX_BYTES, have no bytes.
    Raises CheckpointError."""
    tokenizer = load_tokenizer(folder)
    if vocabulary is None:
        vocabulary = 1 + max(tokenizer.get_vocab().values())
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special and number < vocabulary}
    steps = steps_of(tokenizer.decoder)
    found = []
    for number in range(vocabulary):
        token = tokenizer.id_to_token(number) or ""
        data = token.encode() if number in special else token_bytes(token, steps)
        found.append(data if token and len(data) <= MAX_BYTES else b"")
    return found, sorted(special)
