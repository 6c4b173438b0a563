"""How rows are written where other processes read them: a header, and the rows' bytes."""

from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from triptych import __version__
from triptych.encode.store import EmbeddingRows
from triptych.messages.identity import update_with_length

_LENGTH = 4  # bytes of the header's length


class _Header(msgspec.Struct, frozen=True):
    """What a value begins with, in MessagePack, after its length."""

    version: str
    """The version of the program that computed the rows."""
    shape: tuple[int, int]
    checksum: bytes
    """Digest of the rows, their shape and their name."""


def encoded(rows: EmbeddingRows, name: str = "", key: bytes | None = None) -> tuple[bytes, memoryview]:
    """Return header and bytes of rows. ``name`` is theirs where a value has one alone. With a ``key`` of 32 bytes, only
    those who know it can write values that are read."""
    values = np.ascontiguousarray(rows).reshape(-1).data
    header = msgspec.msgpack.encode(_Header(__version__, rows.shape, _checksum(values, rows.shape, name, key)))
    return len(header).to_bytes(_LENGTH, "little") + header, values


def decoded(data: bytearray, name: str = "", key: bytes | None = None) -> EmbeddingRows | None:
    """Return the rows of a value; None if it is damaged, of another version or key, or of another name."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    try:
        header = msgspec.msgpack.decode(data[_LENGTH:start], type=_Header)
    except msgspec.DecodeError:
        return None
    fits = min(header.shape) > 0 and start + header.shape[0] * header.shape[1] == len(data)
    if header.version != __version__ or not fits:
        return None
    values = np.frombuffer(data, np.uint8, offset=start)
    if _checksum(values.data, header.shape, name, key) != header.checksum:
        return None
    return values.reshape(header.shape)


def _checksum(values: memoryview, shape: tuple[Any, ...], name: str, key: bytes | None) -> bytes:
    digest = blake3(key=key) if key else blake3()
    update_with_length(digest, f"{name}|{shape}".encode())
    digest.update(values)
    return digest.digest()
