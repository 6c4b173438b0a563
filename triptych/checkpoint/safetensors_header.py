"""Lists the tensors of a checkpoint folder from the files' headers alone. No torch and no safetensors package: the
frontend, the supervisor and ``triptych doctor`` size a model quickly and in little memory.

The format (https://huggingface.co/docs/safetensors): eight bytes, the header's length N as a little-endian integer;
N bytes of JSON, ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, offsets counted from the header's end;
then the data. A folder has either ``model.safetensors`` or several shards and ``model.safetensors.index.json``, whose
``weight_map`` names each tensor's shard.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from triptych.checkpoint.config_files import LORA_FILE, lora_folders, parse_json_object, read_json_object
from triptych.checkpoint.gguf.index import INDEX as GGUF_INDEX
from triptych.checkpoint.gguf.index import Entry, read_index
from triptych.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

OTHER_WEIGHTS = {
    (".gguf",): "a GGUF file: MODEL may be the path of one",
    (".bin", ".pt", ".pth", ".ckpt"): "pickled weights, which can run code and aren't served: safetensors are",
    (".safetensors",): "safetensors under another name than those",
    (".onnx", ".msgpack", ".h5", ".npz"): "in a format that isn't served: safetensors are",
}
"""Suffixes of files with weights → what such a file is."""

LORA_PREFIX = "base_model.model."
"""What peft puts before the names of a model's layers."""

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
LENGTH_BYTES = 8

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Location, dtype, shape and size of a tensor."""

    file: Path
    dtype: str
    """The file's spelling: ``F32``, ``BF16``, …; in GGUF files ``Q4_K``, …"""
    shape: tuple[int, ...]
    num_bytes: int
    stored_name: str = ""
    """Its name in the file, unless that is its key."""
    entry: Entry | None = None
    """Its place in a GGUF file; None in others."""

    @property
    def is_float(self) -> bool:
        return self.entry is not None or not self.dtype.startswith(("I", "U"))


def read_folder(folder: Path | str) -> dict[str, TensorInfo]:
    """Return every tensor of a checkpoint folder by name, without loading any. Those of LoRAs in folders of their own
    have the names that files with LoRAs among the weights give them, ``LAYER.lora_A.LORA.weight``.

    Raises CheckpointError, naming the file or the tensor, for a folder without safetensors, a damaged header or a
    missing shard. Raises it, too, for an index that names a file outside the folder or disagrees with its shards.
    """
    loras = {key: one for name, place in lora_folders(folder).items() for key, one in _lora(place, name).items()}
    return _weights(Path(folder)) | loras


def _lora(place: Path, name: str) -> dict[str, TensorInfo]:
    """Return the tensors of a LoRA as peft stores them."""
    file, found = place / LORA_FILE, {}
    for stored, info in read_header(file).items():
        layer, kind, rest = stored.removeprefix(LORA_PREFIX).partition(".lora_")
        if rest not in ("A.weight", "B.weight"):
            raise CheckpointError(f"{file}: tensor {stored!r} is not a LoRA's of a linear layer")
        found[f"{layer}{kind}{rest[0]}.{name}.weight"] = replace(info, stored_name=stored)
    return found


def _weights(folder: Path) -> dict[str, TensorInfo]:
    main = _main_file(folder)
    if main.name == GGUF_INDEX:
        return {
            key: TensorInfo(folder / one.file, one.kind, tuple(one.shape), one.num_bytes, entry=one)
            for key, one in read_index(folder).items()
        }
    if main.name == SINGLE_FILE:
        return read_header(main)
    index, weight_map = main, _read_index(main)
    shards = {name: read_header(_shard_path(index, name)) for name in sorted(set(weight_map.values()))}
    for key, name in weight_map.items():
        if key not in shards[name]:
            raise CheckpointError(f"{index}: names tensor {key!r} in {name}, which doesn't hold it")
    return {key: shards[name][key] for key, name in weight_map.items()}


def weight_files(folder: Path | str) -> list[Path]:
    """Return the files that decide every tensor's value, in a fixed order: the single file, or the index and its
    shards, and LoRAs. Raises CheckpointError as ``read_folder`` does, but reads no header."""
    main = _main_file(Path(folder))
    if main.name == GGUF_INDEX:
        names = {place.file for one in read_index(main.parent).values() for place in one.places}
        return [main, *(main.with_name(name) for name in sorted(names))]
    shards = [] if main.name == SINGLE_FILE else sorted(set(_read_index(main).values()))
    loras = [place / LORA_FILE for place in lora_folders(folder).values()]
    return [main, *(_shard_path(main, name) for name in shards), *loras]


def has_weights(folder: Path | str) -> bool:
    """Return whether a folder has a file of weights; an index of such files alone is none. Raises CheckpointError for a
    malformed index."""
    single, index, gguf = (Path(folder) / name for name in (SINGLE_FILE, INDEX_FILE, GGUF_INDEX))
    shards = shard_names(index) if index.is_file() else []
    return single.is_file() or gguf.is_file() or any(index.with_name(name).is_file() for name in shards)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return every tensor of one safetensors file. Raises CheckpointError, naming the file, for a damaged header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header, data_start = _parse_header(stream, file, size)
    except OSError as error:
        raise CheckpointError(f"{file}: can't be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    return {key: _tensor_info(file, key, entry, size - data_start) for key, entry in header.items()}


def shard_names(index: Path) -> list[str]:
    """Return the names of the shards that an index names, which may be missing. Raises CheckpointError for an index
    that is malformed, or names something else than a safetensors file beside it."""
    names = sorted(set(_read_index(index).values()))
    for name in names:
        _check_shard_name(index, name)
    return names


def no_weights(names: Iterable[str]) -> str:
    """Return the end of an error message: what a folder of these files has in place of safetensors, if anything."""
    for suffixes, meaning in OTHER_WEIGHTS.items():
        if found := next((name for name in sorted(names) if name.endswith(suffixes)), ""):
            return f"; {found} is {meaning}"
    return ""


def _main_file(folder: Path) -> Path:
    """Return the single file or, without one, the index. If both exist, transformers prefers the single file too."""
    for name in (SINGLE_FILE, INDEX_FILE, GGUF_INDEX):
        if (folder / name).is_file():
            return folder / name
    other = no_weights(path.name for path in folder.iterdir()) if folder.is_dir() else ""
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there{other}")


def _read_index(index: Path) -> dict[str, str]:
    """Return the map from tensor name to shard name."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    return weight_map


def _shard_path(index: Path, name: str) -> Path:
    """Return the shard's path, which must be in the index's own folder, so that an index can't name other files."""
    _check_shard_name(index, name)
    shard = index.with_name(name)
    if not shard.is_file():
        raise CheckpointError(f"{shard}: missing; {index.name} names it")
    return shard


def _check_shard_name(index: Path, name: str) -> None:
    if not name.endswith(".safetensors") or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file in this folder")


def _parse_header(stream: BinaryIO, file: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header's JSON object and the offset of the data."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    data_start = LENGTH_BYTES + length
    if size < LENGTH_BYTES or data_start > size:
        raise CheckpointError(f"{file}: truncated: its header would be {length} bytes long, the file is {size}")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{file}: a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return parse_json_object(stream.read(length), file), data_start


def _tensor_info(file: Path, key: str, entry: Any, data_bytes: int) -> TensorInfo:
    """Validate one header entry; ``data_bytes`` is the size of the file's data."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if all(
            type(number) is int and number >= 0 for number in (*shape, begin, end)
        ):
            pass
        case _:
            raise CheckpointError(f"{file}: the header's entry for {key!r} is malformed")
    if not begin <= end <= data_bytes:
        raise CheckpointError(
            f"{file}: tensor {key!r} lies at bytes {begin} to {end}, but the file holds {data_bytes} bytes of data"
        )
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(f"{file}: tensor {key!r} has {end - begin} bytes, which {dtype} {shape} doesn't fill")
    return TensorInfo(file, dtype, tuple(shape), end - begin)
