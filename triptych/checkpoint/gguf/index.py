"""The index of a checkpoint folder whose values are in GGUF files: where each tensor is, and what changes it on the
way. Neither torch nor the library ``gguf``: the frontend reads it, too."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import msgspec

from triptych.errors import CheckpointError

INDEX = "gguf.json"
SUFFIX = ".gguf"
WITHOUT_TOWERS = "gguf_without_mmproj"
"""Setting of the config of a file that was given without one of towers."""


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
    """Number of heads whose rows, or values of a vector, are in the order of pairs; 0: they aren't."""
    shift: int = 0
    """What is added to its values."""
    parts: list["Entry"] = []
    """Where the tensor's parts are, if files have it in several; what is above then says its shape alone."""
    axis: int = 0
    """Dimension along which the parts are joined; the result may have other dimensions of as many values."""
    transposed: bool = False
    """Whether the last two dimensions of ``shape``, which is the file's, change places: of parts alone."""

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.parts) or prod(self.shape[:-1]) * self.row_bytes

    @property
    def is_plain(self) -> bool:
        """Whether the tensor's values are those of the file's one."""
        return not self.parts and not self.shift and not self.transposed

    @property
    def places(self) -> Sequence["Entry"]:
        """The entries of the parts or, without any, the entry itself."""
        return self.parts or (self,)


def joined(parts: Sequence[Entry], axis: int) -> Entry:
    """Return the entry of a tensor of several parts, or the only one. Raises ValueError for shapes that don't fit."""
    if len(parts) == 1:
        return parts[0]
    first, shapes = parts[0], [_shape(one) for one in parts]
    rests = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
    if any(len(shape) <= axis for shape in shapes) or any(rest != rests[0] for rest in rests):
        raise ValueError(f"parts of shapes {shapes} can't be joined")
    shape = [*rests[0][:axis], sum(one[axis] for one in shapes), *rests[0][axis:]]
    return Entry(first.file, first.kind, shape, 0, 0, parts=list(parts), axis=axis)


def _shape(part: Entry) -> list[int]:
    return [*part.shape[:-2], *part.shape[:-3:-1]] if part.transposed else part.shape


def written(entries: dict[str, Entry]) -> bytes:
    """Return an index's content."""
    return msgspec.json.encode(entries)


def read_index(folder: Path) -> dict[str, Entry]:
    """Return the tensors of a folder by name. Raises CheckpointError, naming what is wrong, for an index that is
    damaged, or names a file elsewhere, or places beyond a file's end."""
    path = folder / INDEX
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, Entry])
        places = [(key, place) for key, one in entries.items() for place in one.places]
        sizes = {name: _checked(path, name).stat().st_size for name in {one.file for _, one in places}}
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be read: {error.strerror}") from error
    for key, one in places:
        is_empty = not one.shape or min(*one.shape, one.row_bytes) < 1
        if one.parts or is_empty or min(one.offset, one.rotated) < 0 or one.offset + one.num_bytes > sizes[one.file]:
            raise CheckpointError(f"{path}: the entry of tensor {key!r} is malformed")
        if (one.rotated and one.shape[0] % (2 * one.rotated)) or (one.transposed and len(one.shape) < 2):
            raise CheckpointError(f"{path}: the shape of tensor {key!r} doesn't fit what is done with it")
    for key, one in entries.items():
        if one.parts and not _fits(one):
            raise CheckpointError(f"{path}: the entry of tensor {key!r} is malformed")
    return entries


def _fits(one: Entry) -> bool:
    try:
        return min(one.axis, *one.shape) >= 0 and prod(joined(one.parts, one.axis).shape) == prod(one.shape)
    except ValueError:
        return False


def _checked(index: Path, name: str) -> Path:
    if not name.endswith(SUFFIX) or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"{index}: {name!r} is not the name of a GGUF file in this folder")
    return index.with_name(name)
