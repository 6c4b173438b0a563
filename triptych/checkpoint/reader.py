"""Reads tensors of a checkpoint folder, memory-mapped."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from triptych.checkpoint.config_files import load_config, quantization_section
from triptych.checkpoint.safetensors_header import TensorInfo, read_folder
from triptych.errors import CheckpointError

MANY = 1000
"""Tensors in a file whose header takes long to parse, so that it isn't opened for each."""
KEPT_OPEN = 32 * 2**20
"""Bytes of tensors that are read of such a file before it is opened again: what has been read counts as the process's
memory as long as the file is open."""


def listed(keys: Iterable[str]) -> str:
    """Return the first of some tensors' names and how many more there are, for messages."""
    first, *others = sorted(keys)
    return repr(first) + (f" and {len(others):,} more" if others else "")


class Checkpoint:
    """A checkpoint folder. ``tensors`` describes its tensors by key, before any is loaded."""

    def __init__(self, folder: Path | str, on_read: Callable[[int], None] | None = None) -> None:
        """``on_read`` is called with the number of bytes of tensors that are read. Raises CheckpointError as
        ``read_folder`` does."""
        self.folder = Path(folder)
        self.on_read = on_read
        self.tensors = read_folder(self.folder)

    @cached_property
    def quantization(self) -> object:
        """What the config says of quantized weights, or None. Raises CheckpointError as ``load_config`` does."""
        return quantization_section(load_config(self.folder))

    @cached_property
    def _num_tensors(self) -> Counter[Path]:
        return Counter(info.file for info in self.tensors.values())

    @cached_property
    def _opened(self) -> dict[Path, tuple[Any, int]]:
        """Files that are open, and how many bytes have been read of each."""
        return {}

    def info(self, key: str) -> TensorInfo:
        """Return a tensor's dtype, shape and size. Raises CheckpointError, naming the key, if there is no such
        tensor."""
        try:
            return self.tensors[key]
        except KeyError:
            raise CheckpointError(f"{self.folder}: tensor {key!r} is missing") from None

    def read_shaped(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Return the named tensors as ``read`` does. Raises CheckpointError, naming the key, for one that is missing or
        has another shape than ``shapes`` says."""
        for key, shape in shapes.items():
            if (found := self.info(key).shape) != tuple(shape):
                raise CheckpointError(
                    f"{self.folder}: tensor {key!r} has shape {list(found)}; the config makes it {list(shape)}"
                )
        return self.read(shapes)

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the named tensors, on the CPU, in the file's dtype.

        They are views of memory-mapped files. Unless they are written to or converted, their memory is the page cache:
        shared by all processes that map the file, and reclaimable. Quantized ones of GGUF files are dequantized, to
        float32. Raises CheckpointError, naming the key, for a key that the folder doesn't have.
        """
        keys_by_file: dict[Path, list[str]] = defaultdict(list)
        for key in keys:
            keys_by_file[self.info(key).file].append(key)
        tensors: dict[str, Tensor] = {}
        for path, names in keys_by_file.items():
            try:
                tensors |= self._read_file(path, names)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: can't be read: {error}") from error
            if self.on_read is not None:
                self.on_read(sum(self.info(name).num_bytes for name in names))
        return tensors

    def read_blocks(self, key: str) -> Tensor:
        """Return a tensor of a GGUF file as its bytes, uint8 [rows, bytes of one]: memory-mapped, if the file has the
        rows in order. Raises CheckpointError as ``read`` does, and ValueError for a tensor of another file."""
        from triptych.checkpoint.gguf.values import read_rows  # its library takes a while to import

        info = self.info(key)
        if info.entry is None:
            raise ValueError(f"{key!r} is not in a GGUF file")
        try:
            rows = read_rows(info.file, info.entry)
        except OSError as error:
            raise CheckpointError(f"{info.file}: can't be read: {error}") from error
        if self.on_read is not None:
            self.on_read(info.num_bytes)
        return rows

    def _read_file(self, path: Path, names: Sequence[str]) -> dict[str, Tensor]:
        infos = {name: self.info(name) for name in names}
        places = {name: info.entry for name, info in infos.items() if info.entry is not None}
        if places:
            from triptych.checkpoint.gguf.values import read_tensor  # its library takes a while to import

            return {name: read_tensor(path, entry) for name, entry in places.items()}
        file, num_bytes = self._opened.pop(path) if path in self._opened else (safe_open(path, framework="pt"), 0)
        num_bytes += sum(info.num_bytes for info in infos.values())
        if num_bytes <= KEPT_OPEN and self._num_tensors[path] >= MANY:
            self._opened[path] = file, num_bytes
        return {name: file.get_tensor(info.stored_name or name) for name, info in infos.items()}
