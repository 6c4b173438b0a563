"""Edits of MP4 files that FFmpeg's muxer doesn't make. The header must be at the file's end, as it is by default."""

import struct
from collections.abc import Sequence

_ONE = 1 << 16
_PARENTS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"}

Box = tuple[bytes, "bytes | list[Box]"]


def boxes(data: bytes, *, whole: bool = False) -> list[Box]:
    """Return (kind, content) of each box; ``whole`` for one whose content isn't read as boxes."""
    found: list[Box] = []
    start = 0
    while start < len(data):
        length, kind = struct.unpack_from(">L4s", data, start)
        content = data[start + 8 : start + length]
        found.append((kind, boxes(content) if kind in _PARENTS and not whole else content))
        start += length
    return found


def joined(parts: Sequence[Box]) -> bytes:
    """Undo ``boxes``."""
    made = b""
    for kind, content in parts:
        inner = content if isinstance(content, bytes) else joined(content)
        made += struct.pack(">L4s", len(inner) + 8, kind) + inner
    return made


def _child(parts: list[Box], kind: bytes) -> list[Box]:
    content = next(content for name, content in parts if name == kind)
    assert isinstance(content, list)
    return content


def with_edits(data: bytes, edits: Sequence[tuple[int, int]], version: int = 0) -> bytes:
    """Replace the first track's edit list. An edit is (duration in milliseconds, first time in ticks)."""
    parts = boxes(data)
    track = _child(_child(parts, b"moov"), b"trak")
    entry = ">QqHH" if version else ">LlHH"
    entries = b"".join(struct.pack(entry, *edit, 1, 0) for edit in edits)
    box: Box = (b"edts", [(b"elst", struct.pack(">BxxxL", version, len(edits)) + entries)])
    track[:] = [track[0], box, *(part for part in track[1:] if part[0] != b"edts")]
    return joined(parts)


def with_matrix(data: bytes, matrix: tuple[int, int, int, int], *, of_movie: bool = False) -> bytes:
    """Replace (a, b, c, d) of the first track's matrix, or of the movie's."""
    parts = boxes(data)
    movie = _child(parts, b"moov")
    where, kind, start = (movie, b"mvhd", 36) if of_movie else (_child(movie, b"trak"), b"tkhd", 40)
    index = next(index for index, part in enumerate(where) if part[0] == kind)
    content = bytearray(where[index][1])  # type: ignore[arg-type]
    a, b, c, d = (_ONE * value for value in matrix)
    struct.pack_into(">5l", content, start, a, b, 0, c, d)
    where[index] = kind, bytes(content)
    return joined(parts)


def without_size(data: bytes) -> bytes:
    """Leave the size of frames out of the first track's description."""
    start = data.index(b"stsd") + 4 + 8 + 8 + 24
    return data[:start] + bytes(4) + data[start + 4 :]


def behind_an_empty_track(data: bytes) -> bytes:
    """Put a video track without samples in front of the others."""
    parts = boxes(data)
    movie = _child(parts, b"moov")
    first = next(index for index, part in enumerate(movie) if part[0] == b"trak")
    empty = boxes(joined([movie[first]]))
    tables = _child(_child(_child(_child(empty, b"trak"), b"mdia"), b"minf"), b"stbl")
    for index, (kind, _) in enumerate(tables):
        if kind != b"stsd":
            tables[index] = kind, bytes(12 if kind == b"stsz" else 8)
    movie.insert(first, empty[0])
    return joined(parts)
