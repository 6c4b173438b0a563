"""Reads the headers of video and audio tracks in WebM and Matroska files (RFC 9559), element by element.

The format declares no numbers of frames, so the file's blocks are counted: all of them, in one pass over the headers of
elements. What can't be read is skipped up to the next cluster, as FFmpeg does; a block that the file's end cuts off
doesn't count.

Untrusted bytes: every loop advances and is bounded. Only MediaError, ``struct.error`` and IndexError are raised; the
latter two mean that the file is truncated.
"""

import itertools
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.media.hidden import hidden_packets
from triptych.prompt.containers.audio_chunks import alac_samples
from triptych.prompt.containers.flac import frame_place
from triptych.prompt.containers.ogg import OPUS_RATE, opus_samples
from triptych.types import AudioHeader, VideoHeader

_MAX_ELEMENTS = 1 << 19
"""Limit on the elements read in a file. An hour at 60 frames a second, with packets of sound of 20 ms, has 400,000."""

_EBML, _SEGMENT, _INFO, _TRACKS, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675
_CLUSTER_ID = _CLUSTER.to_bytes(4, "big")
_TIMESTAMP_SCALE, _DURATION = 0x2AD7B1, 0x4489
_TRACK, _TRACK_NUMBER, _TRACK_TYPE, _CODEC, _DEFAULT_DURATION, _VIDEO = 0xAE, 0xD7, 0x83, 0x86, 0x23E383, 0xE0
_ENCODINGS, _CODEC_DELAY, _DISCARD_PADDING = 0x6D80, 0x56AA, 0x75A2
_PIXEL_WIDTH, _PIXEL_HEIGHT = 0xB0, 0xBA
_AUDIO, _SAMPLE_RATE = 0xE1, 0xB5
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = 0xE7, 0xA3, 0xA0, 0xA1
_BLOCKS = frozenset({_SIMPLE_BLOCK, _BLOCK})
_PARENTS = frozenset({_SEGMENT, _CLUSTER, _BLOCK_GROUP})
"""Elements whose content is read as if it were their parent's. So those of unknown size need no end."""
_LACING = 0x06

_CODECS = {
    b"V_VP8": "vp8",
    b"V_VP9": "vp9",
    b"V_AV1": "av1",
    b"V_MPEG4/ISO/AVC": "h264",
    b"V_MPEGH/ISO/HEVC": "hevc",
}
"""Names of codecs, as FFmpeg has them."""
_AUDIO_CODECS = frozenset({b"A_OPUS", b"A_VORBIS", b"A_AAC", b"A_FLAC", b"A_ALAC", b"A_AC3", b"A_EAC3", b"A_DTS"})
_AUDIO_CODECS |= {b"A_MPEG/L1", b"A_MPEG/L2", b"A_MPEG/L3", b"A_PCM/INT/LIT", b"A_PCM/INT/BIG", b"A_PCM/FLOAT/IEEE"}
_SHORT_LAST = (b"A_FLAC", b"A_PCM/")
"""Codecs whose last packet may hold fewer samples than the others. That of others is decoded whole."""
_MAX_PACKET_SECONDS = 0.25
"""Longer times between packets of sound are gaps, unless most are as long. The decoder leaves gaps out."""
_VIDEO_TYPE, _AUDIO_TYPE = 1, 2
_NANO = 1_000_000_000
_MILLISECOND = 1_000_000
_MAX_RATE_TERM = 30_000
"""Frame durations are whole nanoseconds: 33333333 stands for 1/30 s, 33366667 for 1001/30000 s."""


@dataclass
class _WebmTrack:
    """A track's header."""

    number: int = 0
    kind: int = 0
    codec: bytes = b""
    frame_duration: int = 0
    """In nanoseconds; 0 if the header doesn't have it."""
    sound: tuple[int, int] = (0, 0)
    """Start and end of the sound's description, which isn't read for the picture alone."""
    width: int = 0
    height: int = 0
    encoded: bool = False
    """Whether the blocks are compressed once more, or encrypted."""
    delay: int = 0
    """Nanoseconds of sound that the decoder makes first and leaves out."""


@dataclass
class _WebmFile:
    """A file's bytes, with a budget of elements to read, and what was read."""

    data: bytes
    elements_left: int = _MAX_ELEMENTS
    scale: int = _MILLISECOND
    """Unit of time, in nanoseconds."""
    duration: float = 0.0
    """The longest track's, in that unit; 0 if the header doesn't have it."""
    tracks: list[_WebmTrack] = field(default_factory=list)
    blocks: defaultdict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By track number: (time in that unit, start, end) of each block, from its flags on."""

    padding: Counter[int] = field(default_factory=Counter)
    """By track number: nanoseconds of sound that the decoder leaves out."""

    def first(self, kind: int) -> _WebmTrack | None:
        """Return the first track of a kind that has blocks, or the first one if none has."""
        tracks = [track for track in self.tracks if track.kind == kind and track.number]
        return next((track for track in tracks if self.blocks[track.number]), tracks[0] if tracks else None)

    def look(self) -> None:
        self.elements_left -= 1
        if self.elements_left < 0:
            raise UnsupportedMedia(f"the WebM video has more than {_MAX_ELEMENTS} elements")


def probe_webm(data: bytes) -> VideoHeader:
    """Return the header of the file's first video track that has frames. Raises UnsupportedMedia, TruncatedMedia,
    ``struct.error`` or IndexError."""
    file = _read(data)
    track = file.first(_VIDEO_TYPE)
    if track is None:
        raise UnsupportedMedia("the WebM file has no video track")
    codec = _CODECS.get(track.codec)
    if codec is None:
        raise _unsupported("video", track)
    times = _frame_times(file, track, codec)
    if not times:
        raise UnsupportedMedia("the WebM video has no frames")
    return VideoHeader("WebM", track.width, track.height, len(times), _rate(file, track, times))


def probe_webm_audio_track(data: bytes) -> AudioHeader:
    """Return the header of the file's first audio track. Raises as ``probe_webm`` does."""
    file = _read(data)
    track = file.first(_AUDIO_TYPE)
    if track is None:
        raise UnsupportedMedia("the WebM video has no audio track")
    if track.codec not in _AUDIO_CODECS and not track.codec.startswith((b"A_AAC/", b"A_AC3/", b"A_DTS/")):
        raise _unsupported("video's sound", track)
    ticks = _sound_ticks(file, track)
    if ticks < 1:
        raise UnsupportedMedia("the WebM video's audio track is empty")
    return AudioHeader("WebM", _NANO, 1, ticks, in_video=True)


def _sound_ticks(file: _WebmFile, track: _WebmTrack) -> int:
    """Return how long a track's sound is without gaps, in nanoseconds. The last packet's length isn't declared: it is
    the most common one."""
    blocks = file.blocks[track.number]
    if not blocks:
        return 0
    times = [time * file.scale for time, _, _ in blocks]
    lengths = [later - earlier for earlier, later in itertools.pairwise(times)]
    usual = Counter(lengths).most_common(1)[0][0] if lengths else track.frame_duration
    last = max(0, usual)
    last = _declared(file, track, blocks[-1][1]) or last
    longest = max(2 * usual, round(_MAX_PACKET_SECONDS * _NANO))
    left = max(0, round(file.duration * file.scale) - times[-1])
    if file.duration and track.codec.startswith(_SHORT_LAST):
        last = min(last, left)
    total = sum(length if length <= longest else usual for length in lengths) + (last or left)
    return total - track.delay - file.padding[track.number]


def _declared(file: _WebmFile, track: _WebmTrack, start: int) -> int:
    """Return how long the packet of a block says that it is, in nanoseconds; 0 if it doesn't."""
    if track.encoded or file.data[start] & _LACING:
        return 0
    if track.codec == b"A_OPUS":
        return opus_samples(file.data, start + 1) * _NANO // OPUS_RATE
    samples = 0
    if track.codec == b"A_FLAC" and (place := frame_place(file.data, start + 1, 0)):
        samples = place[1]
    elif track.codec == b"A_ALAC":
        samples = alac_samples(file.data, start + 1, 0)
    rate = _sample_rate(file, track)
    return round(samples * _NANO / rate) if rate >= 1 else 0


def _sample_rate(file: _WebmFile, track: _WebmTrack) -> float:
    """Return the samples per second; 0 if the header doesn't have them."""
    try:
        values = {kind: _float(file.data, start, end) for kind, start, end in _elements(file, *track.sound)}
    except (UnsupportedMedia, TruncatedMedia, IndexError):
        return 0.0
    rate = values.get(_SAMPLE_RATE, 0.0)
    return rate if rate < _NANO else 0.0


def _unsupported(name: str, track: _WebmTrack) -> UnsupportedMedia:
    codec = track.codec[:32].decode("latin-1")
    return UnsupportedMedia(f"the WebM {name} is encoded as {codec!r}, which isn't supported")


def _frame_times(file: _WebmFile, track: _WebmTrack, codec: str) -> list[int]:
    """Return when each frame is shown, in the file's unit, in file order."""
    blocks = file.blocks[track.number]
    hidden: frozenset[int] = frozenset()
    if not track.encoded and not any(file.data[start] & _LACING for _, start, _ in blocks):
        view = memoryview(file.data)
        hidden = hidden_packets(codec, (view[start + 1 : end] for _, start, end in blocks))
    times: list[int] = []
    for number, (time, start, _) in enumerate(blocks):
        if file.data[start] & _LACING:
            frame = track.frame_duration // file.scale
            times += [time + lace * frame for lace in range(file.data[start + 1] + 1)]
        elif number not in hidden:
            times.append(time)
    return times


def _rate(file: _WebmFile, track: _WebmTrack, times: list[int]) -> float:
    """Return the average rate: the declared one if the frames' times agree, which are rounded to the file's unit."""
    declared = Fraction(track.frame_duration, _NANO).limit_denominator(_MAX_RATE_TERM)
    gaps = len(times) - 1
    spent = (max(times) - min(times)) * file.scale
    if declared and abs(gaps * track.frame_duration - spent) <= file.scale:
        return float(1 / declared)
    if not spent:
        return float(1 / declared) if declared else 1.0
    return gaps / (spent / _NANO)


def _read(data: bytes) -> _WebmFile:
    """Read the header, wherever it is, and note all blocks."""
    file = _WebmFile(data)
    cluster_time = number = 0
    for kind, start, end in _flattened(file):
        if kind in _BLOCKS:
            number, number_bytes = _number(data, start, keep_marker=False)
            flags = start + number_bytes + 2
            if flags + 1 < end:
                time = cluster_time + int.from_bytes(data[flags - 2 : flags], "big", signed=True)
                file.blocks[number].append((time, flags, end))
        elif kind == _DISCARD_PADDING:
            file.padding[number] += max(0, int.from_bytes(data[start : min(end, start + 8)], "big", signed=True))
        elif kind == _TIMESTAMP:
            cluster_time = _unsigned(data, start, end)
        elif kind == _INFO:
            _read_info(file, start, end)
        elif kind == _TRACKS and not file.tracks:
            file.tracks = [
                _read_track(file, inner, inner_end)
                for inner_kind, inner, inner_end in _elements(file, start, end)
                if inner_kind == _TRACK
            ]
    if not file.tracks:
        raise TruncatedMedia("the WebM video ends before its header")
    return file


def _flattened(file: _WebmFile) -> Iterator[tuple[int, int, int]]:
    """Yield (id, start, end) of the content of all elements but ``_PARENTS``, whose own follow instead, in file order.

    Behind a damaged element, goes on at the next cluster. A last element that the file's end cuts off is left out.
    """
    data, end, start = file.data, len(file.data), 0
    while start < end:
        file.look()
        try:
            kind, id_bytes = _number(data, start, keep_marker=True)
            size, size_bytes = _number(data, start + id_bytes, keep_marker=False)
        except (IndexError, TruncatedMedia):
            return
        except UnsupportedMedia:
            start = _next_cluster(data, start + 1)
            continue
        content = start + id_bytes + size_bytes
        if kind in _PARENTS:
            start = content
        elif size < 0 or content + size > end:
            start = _next_cluster(data, content)
        else:
            yield kind, content, content + size
            start = content + size


def _next_cluster(data: bytes, start: int) -> int:
    found = data.find(_CLUSTER_ID, start)
    return found if found >= 0 else len(data)


def _number(data: bytes, start: int, *, keep_marker: bool) -> tuple[int, int]:
    """Return (value, bytes) of an EBML variable-length integer; the value is -1 for all bits set, meaning unknown."""
    first = data[start]
    length = 9 - first.bit_length()
    if length == 1:
        return (first if keep_marker else -1 if first == 0xFF else first & 0x7F), 1
    if length > 8:
        raise UnsupportedMedia("the WebM video has a damaged element")
    if start + length > len(data):
        raise TruncatedMedia("the WebM video ends within an element")
    value = int.from_bytes(data[start : start + length], "big")
    if keep_marker:
        return value, length
    value &= (1 << 7 * length) - 1
    return (-1 if value == (1 << 7 * length) - 1 else value), length


def _elements(file: _WebmFile, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (id, start, end) of each element's content, cut at ``end``."""
    while start < end:
        file.look()
        kind, id_bytes = _number(file.data, start, keep_marker=True)
        size, size_bytes = _number(file.data, start + id_bytes, keep_marker=False)
        content = start + id_bytes + size_bytes
        if size < 0:
            raise UnsupportedMedia("the WebM video has an element of unknown size")
        yield kind, content, min(content + size, end)
        start = content + size


def _float(data: bytes, start: int, end: int) -> float:
    """Return a float of 4 or 8 bytes; 0 for any other length."""
    code = {4: ">f", 8: ">d"}.get(end - start)
    value: float = struct.unpack_from(code, data, start)[0] if code else 0.0
    return value


def _unsigned(data: bytes, start: int, end: int) -> int:
    if end - start > 8:
        raise UnsupportedMedia("the WebM video has a number of more than 8 bytes")
    return int.from_bytes(data[start:end], "big")


def _read_info(file: _WebmFile, start: int, end: int) -> None:
    for kind, inner, inner_end in _elements(file, start, end):
        if kind == _TIMESTAMP_SCALE:
            file.scale = _unsigned(file.data, inner, inner_end) or _MILLISECOND
        elif kind == _DURATION:
            duration = _float(file.data, inner, inner_end)
            file.duration = duration if 0 < duration < 2**53 else 0.0


def _read_track(file: _WebmFile, start: int, end: int) -> _WebmTrack:
    track = _WebmTrack()
    for kind, inner, inner_end in _elements(file, start, end):
        if kind == _TRACK_NUMBER:
            track.number = _unsigned(file.data, inner, inner_end)
        elif kind == _TRACK_TYPE:
            track.kind = _unsigned(file.data, inner, inner_end)
        elif kind == _CODEC:
            track.codec = file.data[inner:inner_end].rstrip(b"\x00")
        elif kind == _DEFAULT_DURATION:
            track.frame_duration = _unsigned(file.data, inner, inner_end)
        elif kind == _CODEC_DELAY:
            track.delay = _unsigned(file.data, inner, inner_end)
        elif kind == _ENCODINGS:
            track.encoded = True
        elif kind == _AUDIO:
            track.sound = inner, inner_end
        elif kind == _VIDEO:
            _read_size(file, inner, inner_end, track)
    return track


def _read_size(file: _WebmFile, start: int, end: int, track: _WebmTrack) -> None:
    for kind, inner, inner_end in _elements(file, start, end):
        if kind == _PIXEL_WIDTH:
            track.width = _unsigned(file.data, inner, inner_end)
        elif kind == _PIXEL_HEIGHT:
            track.height = _unsigned(file.data, inner, inner_end)
