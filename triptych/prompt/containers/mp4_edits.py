"""Reads the edit list of a track in an MP4 or QuickTime file (ISO/IEC 14496-12, 8.6.6), and finds the samples that it
shows, as FFmpeg's demuxer does. What players hide, such as the part that a phone's trim has cut away, isn't used.

Untrusted bytes: raises UnsupportedMedia or ``struct.error``.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.errors import UnsupportedMedia

_EMPTY = -1
"""Media time of an edit that shows nothing for a while."""
_MAX_EDITS = 1024
_MAX_LOOKED_AT = 1 << 24
"""Limit on the number of edits times that of samples."""


@dataclass(frozen=True)
class Edit:
    """A part of a track that is shown, in the track's ticks."""

    start: int
    duration: int


@dataclass(frozen=True)
class SampleTimes:
    """Times of a track's samples in decoding order, in ticks."""

    durations: NDArray[np.int64]
    shifts: NDArray[np.int64] | None
    """From decoding to presentation; None if the track has no such table."""
    keyframes: NDArray[np.bool_]


def read_edits(data: bytes, place: tuple[int, int], timescale: int, movie_timescale: int) -> list[Edit] | None:
    """Read an ``elst`` box. Empty edits before all others, which only delay these, are left out; to FFmpeg, later ones
    are edits that begin at -1. ``timescale`` is the track's. Return None for an empty list, which hides nothing. Raises
    UnsupportedMedia for too many edits."""
    version, entries = struct.unpack_from(">B3xL", data, place[0])
    entry = struct.Struct(">Qqhh" if version == 1 else ">Llhh")
    entries = min(entries, (place[1] - place[0] - 8) // entry.size)
    if entries > _MAX_EDITS:
        raise UnsupportedMedia(f"the MP4 video has {entries} edits; at most {_MAX_EDITS} are supported")
    edits: list[Edit] = []
    for number in range(entries):
        duration, start, _, _ = entry.unpack_from(data, place[0] + 8 + number * entry.size)
        if start != _EMPTY or edits:
            edits.append(Edit(start, (2 * duration * timescale + movie_timescale) // (2 * movie_timescale)))
    return edits if entries else None


def shown_samples(edits: list[Edit], times: SampleTimes) -> NDArray[np.int64]:
    """Return the indexes of the samples that the edits show, in order; those that several show are repeated. Raises
    UnsupportedMedia for too many edits."""
    samples = len(times.durations)
    if len(edits) * samples > _MAX_LOOKED_AT:
        raise UnsupportedMedia(f"the MP4 video has {len(edits)} edits of {samples} frames")
    decoded = np.cumsum(times.durations) - times.durations
    shown = decoded if times.shifts is None else decoded + times.shifts
    ends = shown + times.durations
    found = [np.zeros(0, np.int64)]
    for edit in edits:
        first = _first(edit, decoded, shown, times)
        end = edit.start + edit.duration
        ends[-1] = shown[-1] + edit.duration
        # FFmpeg stops at the first keyframe behind the edit, or at the second one, if samples are out of order
        behind = np.flatnonzero((ends[first:] >= end) & times.keyframes[first:])[(times.shifts is not None) :]
        last = first + int(behind[0]) + 1 if len(behind) else samples
        found.append(first + np.flatnonzero((shown[first:last] >= edit.start) & (shown[first:last] < end)))
    return np.concatenate(found)


def _first(edit: Edit, decoded: NDArray[np.int64], shown: NDArray[np.int64], times: SampleTimes) -> int:
    """Return the index of the sample at which decoding for an edit begins: the last keyframe before it."""
    before = int(np.searchsorted(decoded, edit.start, "right"))
    keyframes = np.flatnonzero(times.keyframes[:before] & (shown[:before] <= edit.start))
    if len(keyframes):
        return int(keyframes[-1])
    return max(before - 1, 0) if times.shifts is None else 0
