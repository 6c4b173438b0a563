"""Reads tensors of a checkpoint folder, memory-mapped."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from triptych.checkpoint.safetensors_header import TensorInfo, read_folder
from triptych.errors import CheckpointError


class Checkpoint:
    """A checkpoint folder. ``tensors`` says what is in it, by key, before anything is loaded.

    ``on_read`` is told the size of each tensor that is asked for, in bytes. Raises CheckpointError as ``read_folder``
    does.
    """

    def __init__(self, folder: Path | str, on_read: Callable[[int], None] | None = None) -> None:
        self.folder = Path(folder)
        self.on_read = on_read
        self.tensors = read_folder(self.folder)

    def info(self, key: str) -> TensorInfo:
        """Dtype, shape and size of a tensor. Raises CheckpointError, naming the key, when there is none."""
        try:
            return self.tensors[key]
        except KeyError:
            raise CheckpointError(f"{self.folder}: tensor {key!r} is missing") from None

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors, on the CPU, in the file's dtype.

        They are views of memory-mapped files: until something writes to or converts them, their pages belong to the
        page cache, are shared by every process that maps the file, and can be dropped under memory pressure.
        Raises CheckpointError, naming the key, for a key that the folder doesn't hold.
        """
        keys_by_file: dict[Path, list[str]] = defaultdict(list)
        for key in keys:
            keys_by_file[self.info(key).file].append(key)
        tensors: dict[str, Tensor] = {}
        for path, names in keys_by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    tensors.update((name, file.get_tensor(name)) for name in names)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: can't be read: {error}") from error
            if self.on_read is not None:
                self.on_read(sum(self.info(name).num_bytes for name in names))
        return tensors
