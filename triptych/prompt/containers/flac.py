"""Reads the header of native FLAC (RFC 9639).

Untrusted bytes: every loop advances and is bounded. Only MediaError, ``struct.error`` and IndexError are raised; the
latter two mean that the file is truncated.
"""

import struct

from triptych.errors import UnsupportedMedia
from triptych.types import AudioHeader

_MAX_CANDIDATES = 65_536
"""Places that may be the last frame and are looked at."""
_CRC = [0] * 256
for _byte in range(256):
    _rest = _byte
    for _ in range(8):
        _rest = (_rest << 1 ^ 0x07 if _rest & 0x80 else _rest << 1) & 0xFF
    _CRC[_byte] = _rest


def probe_flac(data: bytes) -> AudioHeader:
    """Return the header of the stream, from its first block. Without a number of samples there, as of a
    file that was written to where its end was unknown, the last frame says it."""
    rate, channels, samples = stream_info(data, 4)
    return AudioHeader("FLAC", rate, channels, samples or _behind_last_frame(data))


def stream_info(data: bytes, block: int) -> tuple[int, int, int]:
    """Return (samples per second, channels, samples) from the first block, whose header is at ``block``."""
    if data[block] & 0x7F:
        raise UnsupportedMedia("the FLAC audio doesn't begin with its stream's description")
    (packed,) = struct.unpack_from(">Q", data, block + 14)
    return packed >> 44, (packed >> 41 & 7) + 1, packed & ((1 << 36) - 1)


def _behind_last_frame(data: bytes) -> int:
    (block_samples,) = struct.unpack_from(">H", data, 8)
    position = len(data)
    for _ in range(_MAX_CANDIDATES):
        position = data.rfind(b"\xff", 42, position)
        if position < 0:
            break
        if (found := frame_place(data, position, block_samples)) is not None:
            return sum(found)
    raise UnsupportedMedia("the FLAC audio doesn't say how long it is")


def frame_place(data: bytes, position: int, block_samples: int) -> tuple[int, int] | None:
    """Return the first sample of the frame at a position, and its number of samples; None if there is no frame.
    ``block_samples`` is the number of samples of a whole frame in a stream of equal ones."""
    header = data[position : position + 16]
    if len(header) < 6 or header[0] != 0xFF or header[1] & 0xFE != 0xF8:
        return None
    length = max(1, 8 - (header[4] ^ 0xFF).bit_length()) if header[4] & 0x80 else 1
    if length > 7 or any(byte & 0xC0 != 0x80 for byte in header[5 : 4 + length]):
        return None
    number = header[4] & (0x7F if length == 1 else 0x7F >> length)
    for byte in header[5 : 4 + length]:
        number = number << 6 | byte & 0x3F
    code, at = header[2] >> 4, 4 + length
    if code in (6, 7):
        samples, at = int.from_bytes(header[at : at + code - 5], "big") + 1, at + code - 5
    else:
        samples = 192 if code == 1 else 576 << code - 2 if code < 6 else 256 << code - 8
    at += {12: 1, 13: 2, 14: 2}.get(header[2] & 0xF, 0)
    crc = 0
    for byte in header[:at]:
        crc = _CRC[crc ^ byte]
    if not code or at >= len(header) or header[at] != crc:
        return None
    return number if header[1] & 1 else number * block_samples, samples
