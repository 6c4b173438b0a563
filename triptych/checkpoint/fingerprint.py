"""Identifies a model: every process of a service must agree on it, and it is part of every media item's key."""

from pathlib import Path

from blake3 import blake3

from triptych.checkpoint.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES
from triptych.errors import CheckpointError

_CONFIG_FILES = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


def fingerprint(folder: Path) -> str:
    """Return the hexadecimal 256-bit BLAKE3 digest of a checkpoint's configs and tensor headers.

    It covers config.json, the processors' configurations, and the name, size and header of each safetensors file. Each
    field is preceded by its length; a missing config file counts as empty. Weights aren't read, which keeps this fast
    for any model: the digest distinguishes models and formats, but not two trainings of one model. Raises
    CheckpointError, naming the file, if one can't be read.
    """
    folder = Path(folder)
    digest = blake3()
    try:
        fields = [path.read_bytes() if (path := folder / name).is_file() else b"" for name in _CONFIG_FILES]
        for path in sorted(folder.glob("*.safetensors")):
            fields += [path.name.encode(), str(path.stat().st_size).encode(), _header(path)]
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be read: {error.strerror}") from error
    for field in fields:
        update_with_length(digest, field)
    return digest.hexdigest()


def update_with_length(digest: blake3, field: bytes) -> None:
    """Hash a field after its length (eight bytes, little-endian), so that no two lists of fields hash alike."""
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)


def _header(path: Path) -> bytes:
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
        return stream.read(length)
