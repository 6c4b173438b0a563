"""Finds where tags in front of audio end: ID3v2 and APE, several of them, before files of any format."""

import struct

_MAX_TAGS = 256
_APE_HEADER = 32
_APE_IS_HEADER = 1 << 29


def behind_tags(data: bytes, position: int = 0) -> int:
    """Return where the tags at a position end; the position itself if there are none."""
    for _ in range(_MAX_TAGS):
        length = _id3(data, position) or _ape(data, position)
        if not length:
            break
        position += length
    return min(position, len(data))


def _id3(data: bytes, position: int) -> int:
    """Return the length of an ID3v2 tag; 0 if there is none. Its size has seven bits in each byte."""
    header = data[position : position + 10]
    if len(header) < 10 or header[:3] != b"ID3" or 0xFF in header[3:5] or max(header[6:]) > 0x7F:
        return 0
    size = 0
    for byte in header[6:]:
        size = size << 7 | byte
    return 10 + size + (10 if header[5] & 0x10 else 0)


def _ape(data: bytes, position: int) -> int:
    """Return the length of an APE tag that begins with its header; 0 if there is none."""
    header = data[position : position + _APE_HEADER]
    if len(header) < _APE_HEADER or header[:8] != b"APETAGEX":
        return 0
    size, _, flags = struct.unpack_from("<LLL", header, 12)
    return _APE_HEADER + size if flags & _APE_IS_HEADER else _APE_HEADER
