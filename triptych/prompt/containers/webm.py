"""Reads the headers of video and audio tracks in WebM and Matroska files (RFC 9559), element by element.

If the header has the duration, as in every finished file, the clusters aren't read. Otherwise (an interrupted
recording, or one made by a browser) their blocks are counted. That duration is the longest track's; the audio track's
is taken from its first and last blocks.

Untrusted bytes: every loop advances and is bounded. Only MediaError, ``struct.error`` and IndexError are raised; the
latter two mean that the file is truncated.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.types import AudioHeader, VideoHeader

_MAX_ELEMENTS = 1 << 18
"""Limit on the elements read in a file. Without a duration, every frame and every packet of audio is one."""

_EBML, _SEGMENT, _INFO, _TRACKS, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675
_TIMESTAMP_SCALE, _DURATION = 0x2AD7B1, 0x4489
_TRACK, _TRACK_NUMBER, _TRACK_TYPE, _CODEC, _DEFAULT_DURATION, _VIDEO = 0xAE, 0xD7, 0x83, 0x86, 0x23E383, 0xE0
_PIXEL_WIDTH, _PIXEL_HEIGHT = 0xB0, 0xBA
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = 0xE7, 0xA3, 0xA0, 0xA1
_PARENTS = frozenset({_SEGMENT, _CLUSTER})
"""Elements that may have an unknown size: they end where the next element of their parent begins."""

_CODECS = frozenset({b"V_VP8", b"V_VP9", b"V_AV1", b"V_MPEG4/ISO/AVC", b"V_MPEGH/ISO/HEVC"})
_AUDIO_CODECS = frozenset(
    {b"A_OPUS", b"A_VORBIS", b"A_AAC", b"A_FLAC", b"A_MPEG/L3", b"A_PCM/INT/LIT", b"A_PCM/INT/BIG", b"A_PCM/FLOAT/IEEE"}
)
_VIDEO_TYPE, _AUDIO_TYPE = 1, 2
_NANO = 1_000_000_000
_MAX_RATE_TERM = 30_000
"""Frame durations are whole nanoseconds: 33333333 stands for 1/30 s, 33366667 for 1001/30000 s."""


@dataclass
class _WebmSource:
    """A file's bytes, with a budget of elements to read."""

    data: bytes
    elements_left: int = _MAX_ELEMENTS

    def look(self) -> None:
        self.elements_left -= 1
        if self.elements_left < 0:
            raise UnsupportedMedia(f"the WebM video has more than {_MAX_ELEMENTS} elements")


@dataclass
class _WebmTrack:
    """A track's header."""

    number: int = 0
    kind: int = 0
    codec: bytes = b""
    frame_duration: int = 0
    """In nanoseconds; 0 if the header doesn't have it."""
    width: int = 0
    height: int = 0


@dataclass
class _WebmFile:
    """A file's header."""

    segment: tuple[int, int]
    """Start and end of the segment, which contains everything else."""
    clusters: int
    """Offset of the first cluster."""
    scale: int = 1_000_000
    """Unit of time, in nanoseconds."""
    duration: float = 0.0
    """In that unit; 0 if the header doesn't have it."""
    tracks: list[_WebmTrack] = field(default_factory=list)

    def first(self, kind: int, codecs: frozenset[bytes], *, name: str, missing: str) -> _WebmTrack:
        """Return the first track of a kind. Raises UnsupportedMedia if there is none, or its codec isn't supported."""
        track = next((track for track in self.tracks if track.kind == kind and track.number), None)
        if track is None:
            raise UnsupportedMedia(f"the WebM {missing}")
        if track.codec not in codecs:
            codec = track.codec[:32].decode("latin-1")
            raise UnsupportedMedia(f"the WebM {name} is encoded as {codec!r}, which isn't supported")
        return track


def probe_webm(data: bytes) -> VideoHeader:
    """Return the header of the file's first video track. Raises UnsupportedMedia, TruncatedMedia, ``struct.error`` or
    IndexError."""
    source = _WebmSource(data)
    file = _read(source)
    track = file.first(_VIDEO_TYPE, _CODECS, name="video", missing="file has no video track")
    if file.duration and track.frame_duration:
        frames = round(file.duration * file.scale / track.frame_duration)
        return _header(track, frames, _rate(track.frame_duration), counted=False)
    return _counted(source, file, track)


def probe_webm_audio_track(data: bytes) -> AudioHeader:
    """Return the header of the file's first audio track. Raises as ``probe_webm`` does."""
    source = _WebmSource(data)
    file = _read(source)
    track = file.first(_AUDIO_TYPE, _AUDIO_CODECS, name="video's sound", missing="video has no audio track")
    first, before_last, last = _block_times(source, file, track)
    end = last * file.scale + ((last - before_last) * file.scale or track.frame_duration)
    if file.duration:
        end = min(end, max(round(file.duration), last) * file.scale)
    ticks = end - first * file.scale
    if ticks < 1:
        raise UnsupportedMedia("the WebM video's audio track is empty")
    return AudioHeader("WebM", _NANO, 1, ticks, in_video=True)


def _read(source: _WebmSource) -> _WebmFile:
    """Read the header, up to the first cluster."""
    data = source.data
    segment = next(((start, end) for kind, start, end in _elements(source, 0, len(data)) if kind == _SEGMENT), None)
    if segment is None:
        raise TruncatedMedia("the WebM video ends before its header")
    file = _WebmFile(segment, segment[1])
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


def _counted(source: _WebmSource, file: _WebmFile, track: _WebmTrack) -> VideoHeader:
    times = list(_times(source, file.clusters, file.segment[1], track))
    if not times:
        raise UnsupportedMedia("the WebM video has no frames")
    frames, seconds = len(times), (max(times) - min(times)) * file.scale / _NANO
    if track.frame_duration:
        rate = _rate(track.frame_duration)
    else:
        rate = (frames - 1) / seconds if frames > 1 and seconds > 0 else 1.0
    return _header(track, frames, rate, counted=True)


def _block_times(source: _WebmSource, file: _WebmFile, track: _WebmTrack) -> tuple[int, int, int]:
    """Return when the first, the last but one and the last block of a track begin, in the file's unit. Clusters in
    between are skipped."""
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


def _header(track: _WebmTrack, frames: int, rate: float, *, counted: bool) -> VideoHeader:
    if frames < 1:
        raise UnsupportedMedia("the WebM video has no frames")
    return VideoHeader("WebM", track.width, track.height, frames, rate, counted=counted)


def _number(data: bytes, start: int, *, keep_marker: bool) -> tuple[int, int]:
    """Return (value, bytes) of an EBML variable-length integer; the value is -1 for all bits set, meaning unknown."""
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


def _elements(source: _WebmSource, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (id, start, end) of each element's content, cut at ``end``; elements of unknown size extend to it."""
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
    """Return a float of 4 or 8 bytes; 0 for any other length."""
    code = {4: ">f", 8: ">d"}.get(end - start)
    value: float = struct.unpack_from(code, data, start)[0] if code else 0.0
    return value


def _unsigned(data: bytes, start: int, end: int) -> int:
    if end - start > 8:
        raise UnsupportedMedia("the WebM video has a number of more than 8 bytes")
    return int.from_bytes(data[start:end], "big")


def _read_info(source: _WebmSource, start: int, end: int, file: _WebmFile) -> None:
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _TIMESTAMP_SCALE:
            file.scale = _unsigned(source.data, inner, inner_end)
        elif kind == _DURATION:
            duration = _float(source.data, inner, inner_end)
            file.duration = duration if 0 < duration < 2**53 else 0.0


def _read_track(source: _WebmSource, start: int, end: int) -> _WebmTrack:
    track = _WebmTrack()
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


def _read_size(source: _WebmSource, start: int, end: int, track: _WebmTrack) -> None:
    for kind, inner, inner_end in _elements(source, start, end):
        if kind == _PIXEL_WIDTH:
            track.width = _unsigned(source.data, inner, inner_end)
        elif kind == _PIXEL_HEIGHT:
            track.height = _unsigned(source.data, inner, inner_end)


def _times(source: _WebmSource, start: int, end: int, track: _WebmTrack) -> Iterator[int]:
    """Yield when each of the track's blocks begins, in the file's unit. ``start`` is a cluster's first content byte."""
    cluster_time = 0
    for kind, inner, inner_end in _flattened(source, start, end):
        if kind == _TIMESTAMP:
            cluster_time = _unsigned(source.data, inner, inner_end)
        elif kind in (_SIMPLE_BLOCK, _BLOCK):
            number, number_bytes = _number(source.data, inner, keep_marker=False)
            if number == track.number:
                time: int = struct.unpack_from(">h", source.data, inner + number_bytes)[0]
                yield cluster_time + time


def _flattened(source: _WebmSource, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of all clusters, including those in block groups, in file order. A truncated last element is
    skipped."""
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
