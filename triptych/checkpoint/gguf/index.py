"""The index of a checkpoint folder whose values are in GGUF files: where each tensor is, and what changes it on the
way. Neither torch nor the library ``gguf``: the frontend reads it, too."""

from math import prod
from pathlib import Path

import msgspec

from triptych.errors import CheckpointError

INDEX = "gguf.json"
SUFFIX = ".gguf"


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's place in a file beside the index."""

    file: str
    kind: str
    """The type of its values, named as in ggml."""
    shape: list[int]
    offset: int
    """Where its first byte is."""
    row_bytes: int
    """Bytes of a row, which is as long as the last dimension."""
    rotated: int = 0
    """Number of heads whose rows are in the order of pairs; 0: they aren't."""
    shift: int = 0
    """What is added to its values."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


def written(entries: dict[str, Entry]) -> bytes:
    """Return an index's content."""
    return msgspec.json.encode(entries)


def read_index(folder: Path) -> dict[str, Entry]:
    """Return the tensors of a folder by name. Raises CheckpointError, naming what is wrong, for an index that is
    damaged, or names a file elsewhere, or places beyond a file's end."""
    path = folder / INDEX
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, Entry])
        sizes = {name: _checked(path, name).stat().st_size for name in {one.file for one in entries.values()}}
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be read: {error.strerror}") from error
    for key, one in entries.items():
        numbers = (*one.shape, one.offset, one.row_bytes, one.rotated)
        if not one.shape or min(numbers) < 0 or one.offset + one.num_bytes > sizes[one.file]:
            raise CheckpointError(f"{path}: the entry of tensor {key!r} is malformed")
    return entries


def _checked(index: Path, name: str) -> Path:
    if not name.endswith(SUFFIX) or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"{index}: {name!r} is not the name of a GGUF file in this folder")
    return index.with_name(name)
