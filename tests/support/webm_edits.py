"""Edits of WebM files that FFmpeg's muxer doesn't make."""

import struct
from collections.abc import Callable

_SEGMENT, _SEEK_HEAD, _TRACKS, _CLUSTER = 0x18538067, 0x114D9B74, 0x1654AE6B, 0x1F43B675
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK, _VOID = 0xE7, 0xA3, 0xA0, 0xA1, 0xEC
_XIPH_LACING = 0x02

Element = tuple[int, bytes]


def _number(data: bytes, start: int, *, marked: bool) -> tuple[int, int]:
    length = 9 - data[start].bit_length()
    value = int.from_bytes(data[start : start + length], "big")
    return (value if marked else value & ((1 << 7 * length) - 1)), start + length


def elements(data: bytes) -> list[Element]:
    """Return (id, content) of each element."""
    found, start = [], 0
    while start < len(data):
        kind, at = _number(data, start, marked=True)
        size, at = _number(data, at, marked=False)
        found.append((kind, data[at : at + size]))
        start = at + size
    return found


def joined(parts: list[Element]) -> bytes:
    """Undo ``elements``, with sizes of eight bytes."""
    made = b""
    for kind, content in parts:
        made += kind.to_bytes((kind.bit_length() + 7) // 8, "big") + struct.pack(">Q", len(content) | 1 << 56) + content
    return made


def _with_segment(data: bytes, parts: list[Element]) -> bytes:
    """Replace what is in the segment. Its own index is left out."""
    return joined([elements(data)[0], (_SEGMENT, joined(parts))])


def _segment(data: bytes) -> list[Element]:
    return [part for part in elements(elements(data)[1][1]) if part[0] not in (_SEEK_HEAD, _VOID)]


def tracks_last(data: bytes) -> bytes:
    """Move the tracks' headers behind the clusters."""
    parts = sorted(_segment(data), key=lambda part: part[0] == _TRACKS)

    def seek(position: int) -> Element:
        entry = joined([(0x53AB, _TRACKS.to_bytes(4, "big")), (0x53AC, position.to_bytes(8, "big"))])
        return _SEEK_HEAD, joined([(0x4DBB, entry)])

    before = len(joined([seek(0), *(part for part in parts if part[0] != _TRACKS)]))
    return _with_segment(data, [seek(before), *parts])


def _with_clusters(data: bytes, edit: Callable[[list[Element]], list[Element]]) -> bytes:
    """Replace what is in each cluster."""
    parts = [
        (kind, joined(edit(elements(content))) if kind == _CLUSTER else content) for kind, content in _segment(data)
    ]
    return _with_segment(data, parts)


def laced(data: bytes) -> bytes:
    """Store each two frames as one block."""

    def edit(inner: list[Element]) -> list[Element]:
        blocks = [content for kind, content in inner if kind == _SIMPLE_BLOCK]
        made = [element for element in inner if element[0] == _TIMESTAMP]
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            sizes = b"\x01" + b"\xff" * ((len(first) - 4) // 255) + bytes([(len(first) - 4) % 255])
            made.append((_SIMPLE_BLOCK, first[:3] + bytes([first[3] | _XIPH_LACING]) + sizes + first[4:] + second[4:]))
        return made

    return _with_clusters(data, edit)


def grouped(data: bytes) -> bytes:
    """Store each frame in a group, behind an element that says nothing."""

    def edit(inner: list[Element]) -> list[Element]:
        return [
            (_BLOCK_GROUP, joined([(_VOID, b"abc"), (_BLOCK, content)])) if kind == _SIMPLE_BLOCK else (kind, content)
            for kind, content in inner
        ]

    return _with_clusters(data, edit)


def damaged_between_clusters(data: bytes) -> bytes:
    """Put bytes that are no element between the first cluster and the second."""
    second = data.index(_CLUSTER.to_bytes(4, "big"), data.index(_CLUSTER.to_bytes(4, "big")) + 4)
    return data[:second] + bytes(7) + data[second:]
