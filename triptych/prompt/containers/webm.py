"""Reads what a WebM or Matroska file says about its video track (RFC 9559), hopping from element to element.

Where the header has the duration, as all files have that were finished, the clusters aren't looked at. Where it hasn't
(a recording that was broken off, or made by a browser), their blocks are counted. Untrusted bytes: every loop advances
and is bounded, and nothing but MediaError and ``struct.error`` or ``IndexError`` (which the caller takes for a
truncated file) leaves here.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.types import VideoHeader

_MAX_ELEMENTS = 1 << 18
"""Of a file. One without a duration has one for each frame and packet of sound."""

_EBML, _SEGMENT, _INFO, _TRACKS, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675
_TIMESTAMP_SCALE, _DURATION = 0x2AD7B1, 0x4489
_TRACK, _TRACK_NUMBER, _TRACK_TYPE, _CODEC, _DEFAULT_DURATION, _VIDEO = 0xAE, 0xD7, 0x83, 0x86, 0x23E383, 0xE0
_PIXEL_WIDTH, _PIXEL_HEIGHT = 0xB0, 0xBA
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = 0xE7, 0xA3, 0xA0, 0xA1
_PARENTS = frozenset({_SEGMENT, _CLUSTER})
"""Elements that may have an unknown size: what is in them follows, and they end where a parent's element begins."""

_CODECS = frozenset({b"V_VP8", b"V_VP9", b"V_AV1", b"V_MPEG4/ISO/AVC", b"V_MPEGH/ISO/HEVC"})
_VIDEO_TYPE = 1
_NANO = 1_000_000_000
_MAX_RATE_TERM = 30_000
"""Frame durations are whole nanoseconds: 33333333 stands for 1/30 s, 33366667 for 1001/30000 s."""


@dataclass
class _Source:
    """A file's bytes, and how many of its elements may still be looked at: they are small, and within each other."""

    data: bytes
    elements_left: int = _MAX_ELEMENTS

    def look(self) -> None:
        self.elements_left -= 1
        if self.elements_left < 0:
            raise UnsupportedMedia(f"the WebM video has more than {_MAX_ELEMENTS} elements")


@dataclass
class _File:
    """``duration`` in units of ``scale`` nanoseconds, and ``frame_duration`` in nanoseconds; 0 where the header says
    nothing."""

    scale: int = 1_000_000
    duration: float = 0.0
    track: int = 0
    frame_duration: int = 0
    width: int = 0
    height: int = 0


def probe_webm(data: bytes) -> VideoHeader:
    """The header of the file's first video track. Raises UnsupportedMedia, TruncatedMedia, ``struct.error`` or
    IndexError."""
    source = _Source(data)
    segment = next(((start, end) for kind, start, end in _elements(source, 0, len(data)) if kind == _SEGMENT), None)
    if segment is None:
        raise TruncatedMedia("the WebM video ends before its header")
    file = _File()
    first_cluster = segment[1]
    for kind, start, end in _elements(source, *segment):
        if kind == _INFO:
            _read_info(source, start, end, file)
        elif kind == _TRACKS:
            _read_tracks(source, start, end, file)
        elif kind == _CLUSTER:
            first_cluster = start
            break
    if not file.track:
        raise UnsupportedMedia("the WebM file has no video track")
    if file.duration and file.frame_duration:
        frames = round(file.duration * file.scale / file.frame_duration)
        return _header(file, frames, _rate(file.frame_duration), counted=False)
    return _counted(source, segment, first_cluster, file)


def _counted(source: _Source, segment: tuple[int, int], first_cluster: int, file: _File) -> VideoHeader:
    frames, first, last = _count_blocks(source, segment[1], first_cluster, file.track)
    if not frames:
        raise UnsupportedMedia("the WebM video has no frames")
    seconds = (last - first) * file.scale / _NANO
    if file.frame_duration:
        rate = _rate(file.frame_duration)
    else:
        rate = (frames - 1) / seconds if frames > 1 and seconds > 0 else 1.0
    return _header(file, frames, rate, counted=True)


def _rate(frame_duration: int) -> float:
    seconds = Fraction(frame_duration, _NANO).limit_denominator(_MAX_RATE_TERM)
    return float(1 / seconds) if seconds else float("inf")


def _header(file: _File, frames: int, rate: float, *, counted: bool) -> VideoHeader:
    if frames < 1:
        raise UnsupportedMedia("the WebM video has no frames")
    return VideoHeader("WebM", file.width, file.height, frames, rate, counted=counted)


def _number(data: bytes, start: int, *, keep_marker: bool) -> tuple[int, int]:
    """(value, bytes) of an EBML variable-length integer; -1 for one with all bits set, which means unknown."""
    first = data[start]
    length = 9 - first.bit_length()
    if length > 8:
        raise UnsupportedMedia("the WebM video has a damaged element")
    if start + length > len(data):
        raise TruncatedMedia("the WebM video ends within an element")
    value = int.from_bytes(data[start : start + length], "big")
    if keep_marker:
        return value, length
    value &= (1 << 7 * length) - 1
    return (-1 if value == (1 << 7 * length) - 1 else value), length


def _elements(source: _Source, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(id, start, end) of each element's content. Those that end beyond ``end`` are cut there; those of unknown size go
    on to it."""
    while start < end:
        source.look()
        kind, id_bytes = _number(source.data, start, keep_marker=True)
        size, size_bytes = _number(source.data, start + id_bytes, keep_marker=False)
        content = start + id_bytes + size_bytes
        if size < 0 and kind not in _PARENTS:
            raise UnsupportedMedia("the WebM video has an element of unknown size")
        content_end = end if size < 0 else content + size
        yield kind, content, min(content_end, end)
        start = content_end


def _unsigned(data: bytes, start: int, end: int) -> int:
    if end - start > 8:
        raise UnsupportedMedia("the WebM video has a number of more than 8 bytes")
    return int.from_bytes(data[start:end], "big")


def _read_info(source: _Source, start: int, end: int, file: _File) -> None:
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _TIMESTAMP_SCALE:
            file.scale = _unsigned(source.data, inner, inner_end)
        elif kind == _DURATION:
            code = {4: ">f", 8: ">d"}.get(inner_end - inner)
            duration = struct.unpack_from(code, source.data, inner)[0] if code else 0.0
            file.duration = duration if 0 < duration < 2**53 else 0.0


def _read_tracks(source: _Source, start: int, end: int, file: _File) -> None:
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _TRACK and not file.track:
            _read_track(source, inner, inner_end, file)


def _read_track(source: _Source, start: int, end: int, file: _File) -> None:
    number = frame_duration = width = height = 0
    track_type, codec = 0, b""
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _TRACK_NUMBER:
            number = _unsigned(source.data, inner, inner_end)
        elif kind == _TRACK_TYPE:
            track_type = _unsigned(source.data, inner, inner_end)
        elif kind == _CODEC:
            codec = source.data[inner:inner_end].rstrip(b"\x00")
        elif kind == _DEFAULT_DURATION:
            frame_duration = _unsigned(source.data, inner, inner_end)
        elif kind == _VIDEO:
            for setting, value, value_end in _elements(source, inner, inner_end):
                if setting == _PIXEL_WIDTH:
                    width = _unsigned(source.data, value, value_end)
                elif setting == _PIXEL_HEIGHT:
                    height = _unsigned(source.data, value, value_end)
    if track_type != _VIDEO_TYPE:
        return
    if codec not in _CODECS:
        raise UnsupportedMedia(f"the WebM video is encoded as {codec[:32].decode('latin-1')!r}, which isn't supported")
    file.track, file.frame_duration, file.width, file.height = number, frame_duration, width, height


def _count_blocks(source: _Source, end: int, start: int, track: int) -> tuple[int, int, int]:
    """(number, first timestamp, last timestamp) of a track's blocks, in the file's units. ``start`` is where the first
    cluster's content begins."""
    count = cluster_time = 0
    first = last = 0
    for kind, inner, inner_end in _flattened(source, start, end):
        if kind == _TIMESTAMP:
            cluster_time = _unsigned(source.data, inner, inner_end)
        elif kind in (_SIMPLE_BLOCK, _BLOCK):
            number, number_bytes = _number(source.data, inner, keep_marker=False)
            if number == track:
                time = cluster_time + struct.unpack_from(">h", source.data, inner + number_bytes)[0]
                first, last = (min(first, time), max(last, time)) if count else (time, time)
                count += 1
    return count, first, last


def _flattened(source: _Source, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The elements of all clusters, those of block groups too, one after the other. A last one that was cut off is
    left out."""
    while start < end:
        source.look()
        try:
            kind, id_bytes = _number(source.data, start, keep_marker=True)
            size, size_bytes = _number(source.data, start + id_bytes, keep_marker=False)
        except (IndexError, TruncatedMedia):
            return
        content = start + id_bytes + size_bytes
        if kind in (_CLUSTER, _BLOCK_GROUP):
            start = content  # what is in it comes next
            continue
        if size < 0 or content + size > end:
            return
        yield kind, content, content + size
        start = content + size
