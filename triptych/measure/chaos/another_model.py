"""Another model of the same architecture: a copy of a checkpoint, with other weights."""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO

from triptych.checkpoint.safetensors_header import LENGTH_BYTES, weight_files
from triptych.errors import CheckpointError


def make_another(model: Path, folder: Path) -> Path:
    """Make a folder with links to a checkpoint's files, but in one of its files of weights, matrices of the same size
    have changed places. Raises CheckpointError when there are none, and OSError."""
    folder.mkdir()
    changed = next((file for file in weight_files(model) if _swap(file, folder / file.name)), None)
    if changed is None:
        raise CheckpointError(f"{model}: no two matrices are of the same size, so another model can't be made of it")
    for path in model.iterdir():
        if path.name != changed.name:
            (folder / path.name).symlink_to(path.absolute())
    return folder


def _swap(file: Path, copy: Path) -> bool:
    """Copy a file of tensors, with the first and the last matrix of each size swapped. Return False, without a copy, if
    there is nothing to swap."""
    if file.suffix != ".safetensors":
        return False
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        header = json.loads(stream.read(length))
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for name, entry in header.items():
        if name != "__metadata__" and len(entry["shape"]) == 2:
            begin, end = entry["data_offsets"]
            alike[(entry["dtype"], *entry["shape"], end - begin)].append(LENGTH_BYTES + length + begin)
    pairs = [(places[0], places[-1], size) for (*_, size), places in alike.items() if len(places) > 1]
    if pairs:
        shutil.copyfile(file, copy)
        with copy.open("r+b") as stream:
            for first, last, size in pairs:
                _swap_bytes(stream, first, last, size)
    return bool(pairs)


def _swap_bytes(stream: BinaryIO, first: int, last: int, size: int) -> None:
    one, other = (_bytes_at(stream, place, size) for place in (first, last))
    for place, content in ((first, other), (last, one)):
        stream.seek(place)
        stream.write(content)


def _bytes_at(stream: BinaryIO, place: int, size: int) -> bytes:
    stream.seek(place)
    return stream.read(size)
