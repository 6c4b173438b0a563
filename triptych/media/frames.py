"""Packs a video given as a list of images into the bytes of one item."""

import msgspec

from triptych.errors import UnsupportedMedia

FORMAT = "frames"
"""Format in such a video's header."""

_MAGIC = b"triptych/frames\x00"


class PackedFrames(msgspec.Struct, frozen=True, array_like=True):
    """A video as image files."""

    rate: float
    """Frames per second."""
    frames: list[bytes]
    """Image files in display order."""


def pack_frames(packed: PackedFrames) -> bytes:
    """Return the item's bytes."""
    return _MAGIC + msgspec.msgpack.encode(packed)


def is_packed(data: bytes) -> bool:
    """Whether the bytes are marked as packed frames."""
    return data.startswith(_MAGIC)


def unpack_frames(data: bytes) -> PackedFrames:
    """Undo ``pack_frames``. Raises UnsupportedMedia for anything else."""
    try:
        return msgspec.msgpack.decode(memoryview(data)[len(_MAGIC) :], type=PackedFrames)
    except (msgspec.DecodeError, ValueError):
        raise UnsupportedMedia("the list of frames is damaged") from None
