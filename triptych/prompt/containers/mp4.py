"""Reads the headers of video and audio tracks in MP4 and QuickTime files (ISO/IEC 14496-12), box by box.

Untrusted bytes: every loop advances and is bounded. Only MediaError and ``struct.error`` are raised; the latter means
that the file is truncated.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.types import AudioHeader, VideoHeader

_MAX_BOXES = 1 << 18
"""Limit on the boxes read in a file, counting repeated reads. Long recordings in short fragments have many."""
_MAX_FRAMES = 2**27
_SAMPLED_ENTRIES = 256
"""Tables, and entries of each, from which the most common sample duration is estimated."""

_VIDEO, _AUDIO = b"vide", b"soun"
_CODECS = frozenset({b"avc1", b"avc3", b"hvc1", b"hev1", b"vp08", b"vp09", b"av01"})
_AUDIO_CODECS = frozenset(
    {b"mp4a", b".mp3", b"Opus", b"fLaC", b"sowt", b"twos", b"lpcm", b"ipcm", b"in24", b"fl32", b"ulaw", b"alaw"}
)

# Of the matrix in a track's header: (a, b, c, d) in 16.16 fixed point, of x' = ax + cy, y' = bx + dy.
_ONE = 1 << 16
_ROTATIONS = {(0, _ONE, -_ONE, 0): 90, (-_ONE, 0, 0, -_ONE): 180, (0, -_ONE, _ONE, 0): 270}

# Flags of a track fragment's header and of a run of samples.
_TFHD_BASE_OFFSET, _TFHD_DESCRIPTION, _TFHD_DURATION = 0x1, 0x2, 0x8
_TRUN_OFFSET, _TRUN_FIRST_FLAGS, _TRUN_DURATION = 0x1, 0x4, 0x100
_TRUN_FIELDS = (0x100, 0x200, 0x400, 0x800)


@dataclass
class _Mp4File:
    """A file's bytes, with a budget of boxes to read."""

    data: bytes
    boxes_left: int = _MAX_BOXES


_Durations: TypeAlias = NDArray[np.integer[Any]]


@dataclass
class Mp4Track:
    """A track's header and sample durations."""

    number: int
    header: int
    """Offset of its header's content."""
    description: int
    """Offset of its sample description."""
    codec: bytes
    timescale: int
    """Ticks per second."""
    samples: int
    table: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Numbers of samples, and their durations in ticks."""
    even: Counter[int] = field(default_factory=Counter)
    """From fragments: numbers of samples by duration in ticks."""
    uneven: list[_Durations] = field(default_factory=list)
    """From fragments: a duration in ticks for each sample."""

    def ticks(self, *, without_gaps: bool = False) -> int:
        """Return the total duration of the samples. ``without_gaps``: a sample of more than twice the usual duration is
        followed by a gap, and counts as one of the usual duration."""
        usual = self._usual() if without_gaps else 0

        def clipped(durations: _Durations) -> _Durations:
            return np.where(durations > 2 * usual, usual, durations) if usual else durations

        counts, durations = self.table
        even = np.array([*self.even], np.int64)
        ticks = int((counts * clipped(durations)).sum()) + int((np.array([*self.even.values()]) * clipped(even)).sum())
        return ticks + (int(clipped(np.concatenate(self.uneven)).sum(dtype=np.int64)) if self.uneven else 0)

    def _usual(self) -> int:
        """Return the most common sample duration, estimated from the first entries; 0 if there are none."""
        of_duration = Counter(self.even)
        for count, duration in zip(*(column[:_SAMPLED_ENTRIES].tolist() for column in self.table), strict=True):
            of_duration[duration] += count
        for durations in self.uneven[:_SAMPLED_ENTRIES]:
            of_duration.update(durations[:_SAMPLED_ENTRIES].tolist())
        return of_duration.most_common(1)[0][0] if of_duration else 0


def probe_mp4(data: bytes) -> VideoHeader:
    """Return the header of the first video track. Raises UnsupportedMedia, TruncatedMedia or ``struct.error``."""
    track = _counted(_Mp4File(data), _VIDEO, _CODECS, name="video", missing="file has no video track")
    ticks = track.ticks()
    if not track.samples or not ticks:
        raise UnsupportedMedia("the MP4 video's track has no frames")
    matrix = struct.unpack_from(">9l", data, track.header + (52 if data[track.header] == 1 else 40))
    width, height = struct.unpack_from(">HH", data, track.description + 32)
    rotation = _ROTATIONS.get((matrix[0], matrix[1], matrix[3], matrix[4]), 0)
    swapped = rotation in (90, 270)
    return VideoHeader(
        format="MP4",
        width=height if swapped else width,
        height=width if swapped else height,
        frames=track.samples,
        rate=track.samples * track.timescale / ticks,
        rotation=rotation,
    )


def probe_mp4_audio_track(data: bytes) -> AudioHeader:
    """Return the header of the file's first audio track. Raises as ``probe_mp4`` does."""
    track = _counted(_Mp4File(data), _AUDIO, _AUDIO_CODECS, name="video's sound", missing="video has no audio track")
    ticks = track.ticks(without_gaps=True)  # the decoder leaves gaps out
    if not ticks or not track.timescale:
        raise UnsupportedMedia("the MP4 video's audio track is empty")
    return AudioHeader("MP4", track.timescale, 1, ticks, in_video=True)


def _counted(file: _Mp4File, handler: bytes, codecs: frozenset[bytes], *, name: str, missing: str) -> Mp4Track:
    """Return the file's first track of a handler, with the samples of fragments. Raises UnsupportedMedia if there is
    none, or its codec isn't supported."""
    movie = _movie(file)
    track = _first_track(file, movie, handler)
    if track is None:
        raise UnsupportedMedia(f"the MP4 {missing}")
    if track.codec not in codecs:
        codec = track.codec.decode("latin-1")
        raise UnsupportedMedia(f"the MP4 {name} is encoded as {codec!r}, which isn't supported")
    _count(file, movie, track)
    return track


def _movie(file: _Mp4File) -> tuple[int, int]:
    data = file.data
    movie = next(((start, end) for kind, start, end in _boxes(file, 0, len(data)) if kind == b"moov"), None)
    if movie is None:
        raise TruncatedMedia("the MP4 video ends before its header (no moov box)")
    return movie


def _boxes(file: _Mp4File, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of each box's content, cut at ``end``."""
    while start + 8 <= end:
        file.boxes_left -= 1
        if file.boxes_left < 0:
            raise UnsupportedMedia(f"the MP4 video has more than {_MAX_BOXES} boxes")
        length, kind = struct.unpack_from(">L4s", file.data, start)
        content = start + 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", file.data, content)
            content += 8
        box_end = end if length == 0 else start + length
        if box_end < content:
            raise UnsupportedMedia("the MP4 video has a box of impossible size")
        yield kind, content, min(box_end, end)
        start = box_end


def _child(file: _Mp4File, parent: tuple[int, int], *path: bytes) -> tuple[int, int] | None:
    """Return (start, end) of the first box at a path below ``parent``; None if there is none."""
    place: tuple[int, int] | None = parent
    for name in path:
        if place is None:
            return None
        place = next(((start, end) for kind, start, end in _boxes(file, *place) if kind == name), None)
    return place


def _first_track(file: _Mp4File, movie: tuple[int, int], wanted: bytes) -> Mp4Track | None:
    for kind, start, end in _boxes(file, *movie):
        if kind != b"trak":
            continue
        handler = _child(file, (start, end), b"mdia", b"hdlr")
        if handler is not None and file.data[handler[0] + 8 : handler[0] + 12] == wanted:
            return _read_track(file, (start, end))
    return None


def _read_track(file: _Mp4File, place: tuple[int, int]) -> Mp4Track:
    header, media = _child(file, place, b"tkhd"), _child(file, place, b"mdia", b"mdhd")
    table = _child(file, place, b"mdia", b"minf", b"stbl")
    description = _child(file, table, b"stsd") if table else None
    if header is None or media is None or table is None or description is None:
        raise UnsupportedMedia("the MP4 video's track lacks a header")
    (number,) = struct.unpack_from(">L", file.data, header[0] + (20 if file.data[header[0]] == 1 else 12))
    (timescale,) = struct.unpack_from(">L", file.data, media[0] + (20 if file.data[media[0]] == 1 else 12))
    (codec,) = struct.unpack_from("4s", file.data, description[0] + 12)
    samples, durations = _samples(file, table)
    return Mp4Track(
        number=number,
        header=header[0],
        description=description[0] + 8,
        codec=codec,
        timescale=timescale,
        samples=samples,
        table=durations,
    )


def _count(file: _Mp4File, movie: tuple[int, int], track: Mp4Track) -> None:
    """Add the samples of fragments, if the track has none of its own."""
    if not track.samples:
        _count_fragments(file, track, _default_duration(file, movie, track.number))
    if track.samples > _MAX_FRAMES:
        raise UnsupportedMedia(f"the MP4 video says that it has {track.samples} frames")


def _samples(file: _Mp4File, table: tuple[int, int]) -> tuple[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the number of samples in the sample table, and (numbers of samples, their durations)."""
    times = _child(file, table, b"stts")
    sizes = _child(file, table, b"stsz") or _child(file, table, b"stz2")
    if times is None or sizes is None:
        raise UnsupportedMedia("the MP4 video's track has no table of frames")
    (samples,) = struct.unpack_from(">L", file.data, sizes[0] + 8)
    (entries,) = struct.unpack_from(">L", file.data, times[0] + 4)
    if times[0] + 8 + 8 * entries > times[1]:
        raise TruncatedMedia("the MP4 video ends within its header")
    pairs = (
        np.frombuffer(file.data, dtype=">u4", count=2 * entries, offset=times[0] + 8).reshape(-1, 2).astype(np.int64)
    )
    counted = int(pairs[:, 0].sum())
    if counted != samples:
        raise UnsupportedMedia(f"the MP4 video's header contradicts itself: {samples} frames, {counted} with a time")
    if samples > _MAX_FRAMES:
        raise UnsupportedMedia(f"the MP4 video says that it has {samples} frames")
    return samples, (pairs[:, 0], pairs[:, 1])


def _default_duration(file: _Mp4File, movie: tuple[int, int], track: int) -> int:
    """Return the default duration of a fragment's samples, in ticks; 0 if there is none."""
    for kind, start, end in _boxes(file, *(_child(file, movie, b"mvex") or (0, 0))):
        if kind == b"trex" and end - start >= 24:
            number, _, duration = struct.unpack_from(">LLL", file.data, start + 4)
            if number == track:
                return int(duration)
    return 0


def _count_fragments(file: _Mp4File, track: Mp4Track, default_duration: int) -> None:
    """Add the samples of all fragments of a track."""
    for kind, start, end in _boxes(file, 0, len(file.data)):
        if kind != b"moof":
            continue
        for inner, fragment_start, fragment_end in _boxes(file, start, end):
            if inner == b"traf":
                _count_fragment(file, (fragment_start, fragment_end), track, default_duration)


def _count_fragment(file: _Mp4File, place: tuple[int, int], track: Mp4Track, default_duration: int) -> None:
    header = _child(file, place, b"tfhd")
    if header is None:
        raise UnsupportedMedia("a fragment of the MP4 video lacks a header")
    flags, number = struct.unpack_from(">LL", file.data, header[0])
    if number != track.number:
        return
    if flags & _TFHD_DURATION:
        offset = header[0] + 8 + 8 * bool(flags & _TFHD_BASE_OFFSET) + 4 * bool(flags & _TFHD_DESCRIPTION)
        (default_duration,) = struct.unpack_from(">L", file.data, offset)
    for kind, start, end in _boxes(file, *place):
        if kind != b"trun":
            continue
        flags, samples = struct.unpack_from(">LL", file.data, start)
        track.samples += samples
        if not flags & _TRUN_DURATION:
            track.even[default_duration] += samples
            continue
        first = start + 8 + 4 * bool(flags & _TRUN_OFFSET) + 4 * bool(flags & _TRUN_FIRST_FLAGS)
        fields = sum(bool(flags & field) for field in _TRUN_FIELDS)
        if first + 4 * fields * samples > end:
            raise TruncatedMedia("the MP4 video ends within a fragment's header")
        table = np.frombuffer(file.data, dtype=">u4", count=fields * samples, offset=first).reshape(-1, fields)
        if samples:
            track.uneven.append(table[:, 0])
