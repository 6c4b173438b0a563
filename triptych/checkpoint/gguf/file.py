"""Reads what stands before the values of a GGUF file: settings, and each tensor's name, type, shape and place.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian: ``GGUF``, a version, the
numbers of tensors and settings; the settings; the tensors' descriptions; then, aligned, their values.

``gguf.GGUFReader`` isn't used: it makes an object of each token, and a file that claims 2**60 of them keeps it busy.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from triptych.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME = 64
"""Bytes of a tensor's name, by the format."""
MAX_COUNT = 2**24
"""More settings, tensors, or elements of an array than any file has."""
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of settings that have a fixed size, as numpy's."""

Value = str | int | float | bool | list[str] | NDArray[Any]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """In PyTorch's order: the last dimension is contiguous."""
    offset: int
    """Where its first byte is in the file."""
    path: Path = Path()
    """The file: of a model in several, one of them."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is as long as the last dimension."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """What a file says of its values."""

    path: Path
    settings: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Raises CheckpointError, naming the file, for one that can't be read, is damaged, or has types of values that
    don't exist. Takes memory in proportion to the file's size at most."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).file()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole GGUF file: {error}") from error


def is_served(kind: GGMLQuantizationType) -> bool:
    """Return whether values of a type can be read."""
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def file(self) -> GgufFile:
        if self._bytes(4) != MAGIC:
            raise self._wrong("it doesn't begin with GGUF")
        if (version := self._number("<u4")) not in VERSIONS:
            raise self._wrong(f"version {version} is not served; served: 2 and 3")
        num_tensors, num_settings = self._count(), self._count()
        settings: dict[str, Value] = {}
        for _ in range(num_settings):
            name = self._string()
            settings[name] = self._value(self._number("<u4"))
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = settings.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"{ALIGNMENT} {alignment!r} is no power of two")
        begin = -(-self._at // alignment) * alignment
        tensors = {}
        for one in described:
            placed = GgufTensor(one.name, one.kind, one.shape, begin + one.offset, self._path)
            if (end := placed.offset + placed.num_bytes) > len(self._data):
                raise self._wrong(f"tensor {one.name!r} ends at byte {end} of {len(self._data)}")
            if one.name in tensors:
                raise self._wrong(f"there are two tensors {one.name!r}")
            tensors[one.name] = placed
        return GgufFile(self._path, settings, tensors)

    def _tensor(self) -> GgufTensor:
        """Return a tensor whose offset is counted from the values' beginning."""
        name = self._string()
        if len(name.encode()) > MAX_NAME:
            raise self._wrong(f"the name of a tensor is over {MAX_NAME} bytes long: {name[:MAX_NAME]!r}…")
        if not 1 <= (dimensions := self._number("<u4")) <= MAX_DIMENSIONS:
            raise self._wrong(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self._wrong(f"tensor {name!r} of shape {list(shape)} has no values")
        number, offset = self._number("<u4"), self._number("<u8")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._wrong(f"tensor {name!r} is of type {number}, which is unknown") from None
        block, _ = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._wrong(f"tensor {name!r} of type {kind.name}: {shape[-1]} values are no blocks of {block}")
        return GgufTensor(name, kind, shape, offset)

    def _value(self, kind: int) -> Value:
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            number: int | float | bool = self._number(NUMBERS[kind])
            return number
        if kind != ARRAY:
            raise self._wrong(f"a setting is of type {kind}, which is unknown")
        of, count = self._number("<u4"), self._count()
        if of == STRING:
            return [self._string() for _ in range(count)]
        if of not in NUMBERS:
            raise self._wrong(f"an array is of type {of}, which is unknown")
        dtype = np.dtype(NUMBERS[of])
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self._bytes(kind.itemsize), kind)[0].item()

    def _count(self) -> int:
        if (count := self._number("<u8")) > MAX_COUNT:
            raise self._wrong(f"it counts {count}, over the limit of {MAX_COUNT}")
        return int(count)

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        self._at += 8
        return self._bytes(length).decode()

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._wrong("it is truncated")
        self._at += count
        return self._data[self._at - count : self._at]

    def _wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem} (at byte {self._at})")
