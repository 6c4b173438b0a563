"""Reads the headers of video and audio tracks in MP4 and QuickTime files (ISO/IEC 14496-12), box by box.

Untrusted bytes: every loop advances and is bounded. Only MediaError and ``struct.error`` are raised; the latter means
that the file is truncated.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.prompt.containers.mp4_edits import Edit, SampleTimes, read_edits, shown_samples
from triptych.prompt.containers.ogg import OPUS_RATE
from triptych.types import AudioHeader, VideoHeader

_MAX_BOXES = 1 << 18
"""Limit on the boxes read in a file, counting repeated reads. Long recordings in short fragments have many."""
_MAX_SAMPLES = 2**27
_MAX_FRAMES = 2**20
"""Limit on a video's frames: all packets are read, however few frames are sampled."""
_SAMPLED_ENTRIES = 256
"""Tables, and entries of each, from which the most common sample duration is estimated."""

_VIDEO, _AUDIO = b"vide", b"soun"
_CODECS = frozenset({b"avc1", b"avc3", b"hvc1", b"hev1", b"vp08", b"vp09", b"av01"})
_AUDIO_CODECS = frozenset({b"mp4a", b".mp3", b"Opus", b"fLaC", b"alac", b"ac-3", b"ec-3", b"dtsc", b"samr", b"sawb"})
_AUDIO_CODECS |= {b"sowt", b"twos", b"lpcm", b"ipcm", b"fpcm", b"in24", b"in32", b"fl32", b"fl64", b"raw ", b"NONE"}
_AUDIO_CODECS |= {b"ulaw", b"alaw", b"ima4", b"ms\x00\x02", b"ms\x00\x11", b"ms\x00\x55"}
_SHORT_LAST = frozenset({b"fLaC", b"alac"})
"""Codecs whose last packet may hold fewer samples than the others. That of others is decoded whole."""

_SOUND_ENTRY = 36
"""Bytes of a description of sound before its boxes."""

_ONE = 1 << 16
"""One in fixed point."""
_MAX_TURN_ERROR = 1.0
"""Degrees by which a rotation may differ from a multiple of 90. Others aren't applied."""

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

    place: tuple[int, int]
    """Start and end of the track's boxes."""
    tables: tuple[int, int]
    """Start and end of its sample tables."""
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
    last: int = 0
    """The duration of the last sample in fragments."""

    @property
    def stored(self) -> int:
        """The number of samples that aren't in fragments."""
        return int(self.table[0].sum())

    def ticks(self) -> int:
        """Return the total duration of the samples."""
        counts, durations = self.table
        return int((counts * durations).sum()) + self.fragment_ticks()

    def fragment_ticks(self) -> int:
        """Return the total duration of the samples in fragments."""
        even = sum(duration * count for duration, count in self.even.items())
        return even + sum(int(durations.sum(dtype=np.int64)) for durations in self.uneven)

    def sound_ticks(self, edits: Sequence[Edit]) -> int:
        """Return the duration of the sound that edits show. FFmpeg cuts the first one's start exactly, but the starts
        of others and all ends at the next sample. A sample of more than twice the usual duration is followed by a gap,
        which the decoder leaves out: it counts as one of the usual duration."""
        usual = self._usual()
        counts, durations = self.table
        ends = np.cumsum(counts * durations)
        begins, steps = ends - counts * durations, np.maximum(durations, 1)
        total = 0
        for number, edit in enumerate(edits):
            start = begins + -((begins - edit.start) // steps) * steps if number else np.array(edit.start)
            behind = begins + -((begins - edit.start - edit.duration) // steps) * steps
            shown = np.clip(np.minimum(ends, behind) - np.maximum(begins, start), 0, None)
            total += int(np.where(durations > 2 * usual, shown * usual // steps, shown).sum())
            if len(ends) and edit.start + edit.duration > ends[-1] - durations[-1] and self.codec not in _SHORT_LAST:
                total += max(0, usual - int(durations[-1]))
        even = sum(min(duration, 2 * usual) * count for duration, count in self.even.items())
        uneven = sum(
            int(np.where(durations > 2 * usual, usual, durations).sum(dtype=np.int64)) for durations in self.uneven
        )
        if self.last and self.codec not in _SHORT_LAST:
            total += max(0, usual - self.last)
        return total + even + uneven

    def _usual(self) -> int:
        """Return the most common sample duration, estimated from the first entries; 0 if there are none."""
        of_duration = Counter(self.even)
        for count, duration in zip(*(column[:_SAMPLED_ENTRIES].tolist() for column in self.table), strict=True):
            of_duration[duration] += count
        for durations in self.uneven[:_SAMPLED_ENTRIES]:
            of_duration.update(durations[:_SAMPLED_ENTRIES].tolist())
        return of_duration.most_common(1)[0][0] if of_duration else 0


def probe_mp4(data: bytes) -> VideoHeader:
    """Return the header of the first video track with samples. Raises UnsupportedMedia, TruncatedMedia or
    ``struct.error``."""
    file = _Mp4File(data)
    track = _counted(file, _VIDEO, _CODECS, name="video", missing="file has no video track")
    if track.samples > _MAX_FRAMES:
        raise UnsupportedMedia(f"the MP4 video has {track.samples} frames; at most {_MAX_FRAMES} are supported")
    samples, ticks = _shown(file, track)
    if not samples or not ticks:
        raise UnsupportedMedia("the MP4 video's track has no frames")
    width, height = _size(file, track)
    rotation, mirrored = _turn(file, track)
    swapped = rotation in (90, 270)
    return VideoHeader(
        format="MP4",
        width=height if swapped else width,
        height=width if swapped else height,
        frames=samples,
        rate=samples * track.timescale / ticks,
        rotation=rotation,
        mirrored=mirrored,
    )


def probe_mp4_audio_track(data: bytes) -> AudioHeader:
    """Return the header of the file's first audio track. Raises as ``probe_mp4`` does."""
    file = _Mp4File(data)
    track = _counted(file, _AUDIO, _AUDIO_CODECS, name="video's sound", missing="video has no audio track")
    edits = _edits(file, track)
    ticks = track.sound_ticks(edits or [Edit(0, track.ticks())]) - _left_out(file, track, edits)
    if ticks < 1 or not track.timescale:
        raise UnsupportedMedia("the MP4 video's audio track is empty")
    return AudioHeader("MP4", track.timescale, 1, ticks, in_video=True)


def _counted(file: _Mp4File, handler: bytes, codecs: frozenset[bytes], *, name: str, missing: str) -> Mp4Track:
    """Return the file's first track of a handler that has samples, with those of fragments; the first one if none has
    any. Raises UnsupportedMedia if there is no such track, or its codec isn't supported."""
    movie = _movie(file)
    first: Mp4Track | None = None
    for place in _tracks(file, movie, handler):
        track = _read_track(file, place)
        _count(file, movie, track)
        if first is None or track.samples:
            first = track
        if track.samples:
            break
    if first is None:
        raise UnsupportedMedia(f"the MP4 {missing}")
    if first.codec not in codecs:
        codec = first.codec.decode("latin-1")
        raise UnsupportedMedia(f"the MP4 {name} is encoded as {codec!r}, which isn't supported")
    return first


def _shown(file: _Mp4File, track: Mp4Track) -> tuple[int, int]:
    """Return the number of samples that are shown, and their duration in ticks."""
    edits = _edits(file, track)
    if edits is None:
        return track.samples, track.ticks()
    durations = np.repeat(track.table[1], track.table[0])
    times = SampleTimes(durations, _shifts(file, track), _keyframes(file, track))
    shown = shown_samples(edits, times)
    return len(shown) + track.samples - track.stored, int(durations[shown].sum()) + track.fragment_ticks()


def _left_out(file: _Mp4File, track: Mp4Track, edits: list[Edit] | None) -> int:
    """Return the duration of the sound that FFmpeg's decoder makes first and leaves out, though no edit says so."""
    if track.codec == b"mp4a" and edits is None:
        listed = _listed_edits(file, track)
        return max(0, listed[0].start) if listed else 0
    if track.codec == b"Opus" and (not edits or not edits[0].start):
        (size,) = struct.unpack_from(">L", file.data, track.description)
        place = _child(file, (track.description + _SOUND_ENTRY, track.description + size), b"dOps")
        if place is not None:
            return int(struct.unpack_from(">H", file.data, place[0] + 2)[0]) * track.timescale // OPUS_RATE
    return 0


def _edits(file: _Mp4File, track: Mp4Track) -> list[Edit] | None:
    """Return the edits that apply to a track's samples outside fragments; None if all are shown."""
    return _listed_edits(file, track) if _has_edits(file, _movie(file), track) else None


def _listed_edits(file: _Mp4File, track: Mp4Track) -> list[Edit] | None:
    """Return the edits that a track lists; None if it lists none."""
    header, edits = _child(file, _movie(file), b"mvhd"), _child(file, track.place, b"edts", b"elst")
    if edits is None or header is None:
        return None
    scale = struct.unpack_from(">L", file.data, header[0] + (20 if file.data[header[0]] == 1 else 12))[0]
    return read_edits(file.data, edits, track.timescale, scale or 1)


def _has_edits(file: _Mp4File, movie: tuple[int, int], track: Mp4Track) -> bool:
    """Whether a track's edit list applies: as in FFmpeg, not from the first track on whose samples are in fragments."""
    for place in _tracks(file, movie):
        times = _child(file, place, b"mdia", b"minf", b"stbl", b"stts")
        if times is None or not struct.unpack_from(">L", file.data, times[0] + 4)[0]:
            return False
        if place == track.place:
            break
    return True


def _shifts(file: _Mp4File, track: Mp4Track) -> NDArray[np.int64] | None:
    """Return the samples' shifts from decoding to presentation, in ticks; None if the track doesn't have them."""
    place = _child(file, track.tables, b"ctts")
    if place is None:
        return None
    pairs = _table(file, place, columns=2)
    counts = np.diff(np.minimum(np.cumsum(pairs[:, 0].astype(np.int64)), track.stored), prepend=0)
    shifts = np.repeat(pairs[:, 1].astype(np.int32).astype(np.int64), counts)
    return np.pad(shifts, (0, track.stored - len(shifts)))


def _keyframes(file: _Mp4File, track: Mp4Track) -> NDArray[np.bool_]:
    """Return which samples are keyframes: all, if the track has no table of them."""
    places = [place for name in (b"stss", b"stps") if (place := _child(file, track.tables, name)) is not None]
    if not places:
        return np.ones(track.stored, np.bool_)
    made = np.zeros(track.stored, np.bool_)
    numbers = np.concatenate([_table(file, place, columns=1)[:, 0].astype(np.int64) for place in places])
    made[numbers[(numbers >= 1) & (numbers <= track.stored)] - 1] = True
    made[:1] |= not len(numbers)
    return made


def _table(file: _Mp4File, place: tuple[int, int], *, columns: int) -> NDArray[np.uint32]:
    """Return a box's table of 32-bit numbers, whose number of rows comes before it. Raises TruncatedMedia."""
    (entries,) = struct.unpack_from(">L", file.data, place[0] + 4)
    if place[0] + 8 + 4 * columns * entries > place[1]:
        raise TruncatedMedia("the MP4 video ends within its header")
    table = np.frombuffer(file.data, dtype=">u4", count=columns * entries, offset=place[0] + 8)
    return table.reshape(-1, columns).astype(np.uint32)


def _size(file: _Mp4File, track: Mp4Track) -> tuple[int, int]:
    """Return the width and height of stored frames. Some writers declare only the displayed ones."""
    width, height = struct.unpack_from(">HH", file.data, track.description + 32)
    if width and height:
        return width, height
    width, height = struct.unpack_from(">LL", file.data, track.header + (88 if file.data[track.header] == 1 else 76))
    return width >> 16, height >> 16


def _turn(file: _Mp4File, track: Mp4Track) -> tuple[int, bool]:
    """Return by how many degrees frames are rotated clockwise, and whether they are then mirrored, by the matrices of
    track and movie: x' = ax + cy, y' = bx + dy."""
    header = _child(file, _movie(file), b"mvhd")
    matrix = _matrix(file, track.header + (52 if file.data[track.header] == 1 else 40))
    if header is not None:
        matrix = matrix @ _matrix(file, header[0] + (48 if file.data[header[0]] == 1 else 36))
    a, b, c, d = matrix.reshape(-1).tolist()
    mirrored = a * d - b * c < 0
    if mirrored:
        a, c = -a, -c
    across, down = math.hypot(a, c), math.hypot(b, d)
    if not across or not down:
        return 0, False
    degrees = math.degrees(math.atan2(b / down, a / across))
    turns = round(degrees / 90)
    if abs(degrees - 90 * turns) > _MAX_TURN_ERROR:
        return 0, False
    return 90 * turns % 360, mirrored


def _matrix(file: _Mp4File, start: int) -> NDArray[np.float64]:
    """Return ((a, b), (c, d)) of a matrix."""
    a, b, _, c, d = struct.unpack_from(">5l", file.data, start)
    return np.array(((a, b), (c, d))) / _ONE


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


def _tracks(file: _Mp4File, movie: tuple[int, int], handler: bytes | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each track, or of each one of a handler."""
    for kind, start, end in _boxes(file, *movie):
        if kind != b"trak":
            continue
        found = _child(file, (start, end), b"mdia", b"hdlr") if handler else None
        if handler is None or (found is not None and file.data[found[0] + 8 : found[0] + 12] == handler):
            yield start, end


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
        place=place,
        tables=table,
        number=number,
        header=header[0],
        description=description[0] + 8,
        codec=codec,
        timescale=timescale,
        samples=samples,
        table=durations,
    )


def _count(file: _Mp4File, movie: tuple[int, int], track: Mp4Track) -> None:
    """Add the samples of fragments."""
    _count_fragments(file, track, _default_duration(file, movie, track.number))
    if track.samples > _MAX_SAMPLES:
        raise UnsupportedMedia(f"the MP4 video says that it has {track.samples} frames")


def _samples(file: _Mp4File, table: tuple[int, int]) -> tuple[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the number of samples in the sample table, and (numbers of samples, their durations)."""
    times = _child(file, table, b"stts")
    sizes = _child(file, table, b"stsz") or _child(file, table, b"stz2")
    if times is None or sizes is None:
        raise UnsupportedMedia("the MP4 video's track has no table of frames")
    (samples,) = struct.unpack_from(">L", file.data, sizes[0] + 8)
    pairs = _table(file, times, columns=2).astype(np.int64)
    counted = int(pairs[:, 0].sum())
    if counted != samples:
        raise UnsupportedMedia(f"the MP4 video's header contradicts itself: {samples} frames, {counted} with a time")
    if samples > _MAX_SAMPLES:
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
            track.last = default_duration if samples else track.last
            continue
        first = start + 8 + 4 * bool(flags & _TRUN_OFFSET) + 4 * bool(flags & _TRUN_FIRST_FLAGS)
        fields = sum(bool(flags & field) for field in _TRUN_FIELDS)
        if first + 4 * fields * samples > end:
            raise TruncatedMedia("the MP4 video ends within a fragment's header")
        table = np.frombuffer(file.data, dtype=">u4", count=fields * samples, offset=first).reshape(-1, fields)
        if samples:
            track.uneven.append(table[:, 0])
            track.last = int(table[-1, 0])
