"""A video that came as a list of pictures, packed into the bytes of one item."""

import msgspec

from triptych.errors import UnsupportedMedia

FORMAT = "frames"
"""What such a video's header gives as its format."""

_MAGIC = b"triptych/frames\x00"


class PackedFrames(msgspec.Struct, frozen=True, array_like=True):
    """The files of a video's frames, in the order of display, ``rate`` of them a second."""

    rate: float
    frames: list[bytes]


def pack_frames(packed: PackedFrames) -> bytes:
    """One item's bytes."""
    return _MAGIC + msgspec.msgpack.encode(packed)


def is_packed(data: bytes) -> bool:
    """Whether these bytes say that they are packed frames."""
    return data.startswith(_MAGIC)


def unpack_frames(data: bytes) -> PackedFrames:
    """What was packed. Raises UnsupportedMedia for anything else."""
    try:
        return msgspec.msgpack.decode(memoryview(data)[len(_MAGIC) :], type=PackedFrames)
    except (msgspec.DecodeError, ValueError):
        raise UnsupportedMedia("the list of frames is damaged") from None
