"""Identifies the model of a checkpoint folder: every process of a service must agree on it, and it is part of every
key. No torch, because the frontend uses this too."""

from pathlib import Path

from blake3 import blake3

from triptych.checkpoint.config_files import LORA_CONFIG, lora_folders, quantization_file
from triptych.checkpoint.digests import file_digests
from triptych.checkpoint.safetensors_header import weight_files
from triptych.errors import CheckpointError
from triptych.messages.identity import ModelIdentity, update_with_length

_CONFIG_FILES = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_TOKENIZER_FILE = "tokenizer.json"


def model_identity(folder: Path, adapter: str) -> ModelIdentity:
    """Return the identity of a checkpoint that the adapter of that name serves.

    Each field that is hashed is preceded by its length; a missing config file counts as empty. Weights are the names
    and the digests of the files that hold them. Reads all weights, unless their digests are known: minutes for a large
    checkpoint, at its first start on a machine. Raises CheckpointError, naming the file, if one can't be read.
    """
    folder = Path(folder)
    files = weight_files(folder)
    others = [place / LORA_CONFIG for place in lora_folders(folder).values()]
    others += [path] if (path := quantization_file(folder)) is not None else []
    weights = [
        field.encode() for file, digest in zip(files, file_digests(files), strict=True) for field in (file.name, digest)
    ]
    return ModelIdentity(
        weights=_digest(weights),
        config=_digest([_read(path) for path in (*(folder / name for name in _CONFIG_FILES), *others)]),
        adapter=adapter,
        tokenizer=_digest([_read(folder / _TOKENIZER_FILE)]),
    )


def _digest(fields: list[bytes]) -> str:
    digest = blake3()
    for field in fields:
        update_with_length(digest, field)
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
