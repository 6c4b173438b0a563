"""The ``tokenizer.json`` of a checkpoint."""

from pathlib import Path

import tokenizers

from triptych.errors import CheckpointError


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Raises CheckpointError, naming the file, if it is missing or unreadable."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a checkpoint folder has a tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
