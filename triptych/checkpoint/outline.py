"""Checkpoints without values: what loaders would read, and of a folder with a config alone how large it would be."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.checkpoint.safetensors_header import ITEM_BYTES, TensorInfo

META = torch.device("meta")
FEW_VALUES = 2
"""Integers of that many are shapes of quantized weights."""
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Names in configs, and in safetensors files."""

STORED = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""By their names in safetensors files; floats of other widths have no values to tell them apart."""


class Outline(Checkpoint):
    """A ``Checkpoint`` that has each tensor that is read, in the shape that is asked for, without its values.

    What loads from it must be on the device ``META``. ``tensors`` has what was read so far, in the dtype that the
    config names: float32 if it names none.
    """

    def __init__(self, folder: Path | str) -> None:
        """Raises CheckpointError for a folder without a readable config."""
        self.folder = Path(folder)
        self.on_read = None
        self.tensors: dict[str, TensorInfo] = {}
        self.quantization = None
        self._dtype = _dtype(load_config(folder))

    def read_shaped(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Return a tensor for each name, on ``META``; single values are 1, since loaders read them."""
        made = {
            key: torch.ones(tuple(shape), device=META if prod(shape) > 1 else "cpu") for key, shape in shapes.items()
        }
        for key, tensor in made.items():
            num_bytes = tensor.numel() * ITEM_BYTES[self._dtype]
            self.tensors[key] = TensorInfo(self.folder, self._dtype, tuple(tensor.shape), num_bytes)
        return made


class StoredOutline(Checkpoint):
    """A ``Checkpoint`` whose tensors have their stored shapes but no values, so that loading takes no time.

    What loads from it must be on the device ``META``.
    """

    def __init__(self, folder: Path | str) -> None:
        """Raises CheckpointError as ``Checkpoint`` does."""
        super().__init__(folder)
        self.names_read: set[str] = set()
        """The tensors that have been read."""

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return a tensor for each name on ``META``, in its dtype. Single values, and shapes of quantized weights, are
        as stored, since loaders read them."""
        found = {key: self.info(key) for key in keys}
        self.names_read.update(found)
        small = super().read(
            key for key, one in found.items() if prod(one.shape) <= (1 if one.is_float else FEW_VALUES)
        )
        kinds = {key: STORED.get(one.dtype, torch.float32) for key, one in found.items()}
        return {key: torch.empty(one.shape, dtype=kinds[key], device=META) for key, one in found.items()} | small

    def read_blocks(self, key: str) -> Tensor:
        """Return a tensor for the bytes of a GGUF file's one, on ``META``."""
        info = self.info(key)
        self.names_read.add(key)
        return torch.empty((info.shape[0], info.num_bytes // max(1, info.shape[0])), dtype=torch.uint8, device=META)


def _dtype(config: Mapping[str, object]) -> str:
    text = config.get("text_config")
    sections = [config, text] if isinstance(text, dict) else [config]
    named = (section.get(key) for section in sections for key in ("dtype", "torch_dtype"))
    return next((DTYPES[name] for name in named if isinstance(name, str) and name in DTYPES), "F32")
