"""Reads what a WebM or Matroska file says about its video track, and its audio track (RFC 9559), hopping from element
to element.

Where the header has the duration, as all files have that were finished, the clusters aren't looked at. Where it hasn't
(a recording that was broken off, or made by a browser), their blocks are counted. That duration is the longest track's:
how long the sound is, its first and its last blocks say. Untrusted bytes: every loop advances and is bounded, and
nothing but MediaError and ``struct.error`` or ``IndexError`` (which the client takes for a truncated file) leaves here.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.types import AudioHeader, VideoHeader

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
_SOUND_CODECS = frozenset(
    {b"A_OPUS", b"A_VORBIS", b"A_AAC", b"A_FLAC", b"A_MPEG/L3", b"A_PCM/INT/LIT", b"A_PCM/INT/BIG", b"A_PCM/FLOAT/IEEE"}
)
_VIDEO_TYPE, _AUDIO_TYPE = 1, 2
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
class _Track:
    """``frame_duration`` in nanoseconds, 0 where the header doesn't say it."""

    number: int = 0
    kind: int = 0
    codec: bytes = b""
    frame_duration: int = 0
    width: int = 0
    height: int = 0


@dataclass
class _File:
    """``duration`` in units of ``scale`` nanoseconds, 0 where the header says nothing; clusters begin at
    ``clusters``, all of what is within the ``segment``."""

    segment: tuple[int, int]
    clusters: int
    scale: int = 1_000_000
    duration: float = 0.0
    tracks: list[_Track] = field(default_factory=list)

    def first(self, kind: int, codecs: frozenset[bytes], *, name: str, missing: str) -> _Track:
        """The first track of a kind. Raises UnsupportedMedia where there is none, or of another codec."""
        track = next((track for track in self.tracks if track.kind == kind and track.number), None)
        if track is None:
            raise UnsupportedMedia(f"the WebM {missing}")
        if track.codec not in codecs:
            codec = track.codec[:32].decode("latin-1")
            raise UnsupportedMedia(f"the WebM {name} is encoded as {codec!r}, which isn't supported")
        return track


def probe_webm(data: bytes) -> VideoHeader:
    """The header of the file's first video track. Raises UnsupportedMedia, TruncatedMedia, ``struct.error`` or
    IndexError."""
    source = _Source(data)
    file = _read(source)
    track = file.first(_VIDEO_TYPE, _CODECS, name="video", missing="file has no video track")
    if file.duration and track.frame_duration:
        frames = round(file.duration * file.scale / track.frame_duration)
        return _header(track, frames, _rate(track.frame_duration), counted=False)
    return _counted(source, file, track)


def probe_webm_audio_track(data: bytes) -> AudioHeader:
    """The header of the file's first audio track. Raises as ``probe_webm`` does."""
    source = _Source(data)
    file = _read(source)
    track = file.first(_AUDIO_TYPE, _SOUND_CODECS, name="video's sound", missing="video has no audio track")
    first, before_last, last = _block_times(source, file, track)
    end = last * file.scale + ((last - before_last) * file.scale or track.frame_duration)
    if file.duration:
        end = min(end, max(round(file.duration), last) * file.scale)
    ticks = end - first * file.scale
    if ticks < 1:
        raise UnsupportedMedia("the WebM video's audio track is empty")
    return AudioHeader("WebM", _NANO, 1, ticks, in_video=True)


def _read(source: _Source) -> _File:
    """What the file says before its first cluster."""
    data = source.data
    segment = next(((start, end) for kind, start, end in _elements(source, 0, len(data)) if kind == _SEGMENT), None)
    if segment is None:
        raise TruncatedMedia("the WebM video ends before its header")
    file = _File(segment, segment[1])
    for kind, start, end in _elements(source, *segment):
        if kind == _INFO:
            _read_info(source, start, end, file)
        elif kind == _TRACKS:
            file.tracks += [
                _read_track(source, inner, inner_end)
                for inner_kind, inner, inner_end in _elements(source, start, end)
                if inner_kind == _TRACK
            ]
        elif kind == _CLUSTER:
            file.clusters = start
            break
    return file


def _counted(source: _Source, file: _File, track: _Track) -> VideoHeader:
    times = list(_times(source, file.clusters, file.segment[1], track))
    if not times:
        raise UnsupportedMedia("the WebM video has no frames")
    frames, seconds = len(times), (max(times) - min(times)) * file.scale / _NANO
    if track.frame_duration:
        rate = _rate(track.frame_duration)
    else:
        rate = (frames - 1) / seconds if frames > 1 and seconds > 0 else 1.0
    return _header(track, frames, rate, counted=True)


def _block_times(source: _Source, file: _File, track: _Track) -> tuple[int, int, int]:
    """When the first, the last but one and the last block of a track begin, in the file's units. Clusters between are
    hopped over."""
    first = next(_times(source, file.clusters, file.segment[1], track), None)
    clusters = [(start, end) for kind, start, end in _elements(source, *file.segment) if kind == _CLUSTER]
    for start, end in reversed(clusters):
        last = list(_times(source, start, end, track))[-2:]
        if last and first is not None:
            return first, last[0], last[-1]
    raise UnsupportedMedia("the WebM video's audio track is empty")


def _rate(frame_duration: int) -> float:
    seconds = Fraction(frame_duration, _NANO).limit_denominator(_MAX_RATE_TERM)
    return float(1 / seconds) if seconds else float("inf")


def _header(track: _Track, frames: int, rate: float, *, counted: bool) -> VideoHeader:
    if frames < 1:
        raise UnsupportedMedia("the WebM video has no frames")
    return VideoHeader("WebM", track.width, track.height, frames, rate, counted=counted)


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


def _float(data: bytes, start: int, end: int) -> float:
    """0 for one of a length that floats haven't got."""
    code = {4: ">f", 8: ">d"}.get(end - start)
    value: float = struct.unpack_from(code, data, start)[0] if code else 0.0
    return value


def _unsigned(data: bytes, start: int, end: int) -> int:
    if end - start > 8:
        raise UnsupportedMedia("the WebM video has a number of more than 8 bytes")
    return int.from_bytes(data[start:end], "big")


def _read_info(source: _Source, start: int, end: int, file: _File) -> None:
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _TIMESTAMP_SCALE:
            file.scale = _unsigned(source.data, inner, inner_end)
        elif kind == _DURATION:
            duration = _float(source.data, inner, inner_end)
            file.duration = duration if 0 < duration < 2**53 else 0.0


def _read_track(source: _Source, start: int, end: int) -> _Track:
    track = _Track()
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _TRACK_NUMBER:
            track.number = _unsigned(source.data, inner, inner_end)
        elif kind == _TRACK_TYPE:
            track.kind = _unsigned(source.data, inner, inner_end)
        elif kind == _CODEC:
            track.codec = source.data[inner:inner_end].rstrip(b"\x00")
        elif kind == _DEFAULT_DURATION:
            track.frame_duration = _unsigned(source.data, inner, inner_end)
        elif kind == _VIDEO:
            _read_size(source, inner, inner_end, track)
    return track


def _read_size(source: _Source, start: int, end: int, track: _Track) -> None:
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _PIXEL_WIDTH:
            track.width = _unsigned(source.data, inner, inner_end)
        elif kind == _PIXEL_HEIGHT:
            track.height = _unsigned(source.data, inner, inner_end)


def _times(source: _Source, start: int, end: int, track: _Track) -> Iterator[int]:
    """When the track's blocks begin, in the file's units; ``start`` is where a cluster's content begins."""
    cluster_time = 0
    for kind, inner, inner_end in _flattened(source, start, end):
        if kind == _TIMESTAMP:
            cluster_time = _unsigned(source.data, inner, inner_end)
        elif kind in (_SIMPLE_BLOCK, _BLOCK):
            number, number_bytes = _number(source.data, inner, keep_marker=False)
            if number == track.number:
                time: int = struct.unpack_from(">h", source.data, inner + number_bytes)[0]
                yield cluster_time + time


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
