"""Counts the frames of audio without a container: MPEG audio (MP1, MP2, MP3), AAC in ADTS, AC-3, E-AC-3, DTS and AMR.

Each frame begins with its own header, which says how long it is. Untrusted bytes: every loop advances and is bounded.
Only MediaError, ``struct.error`` and IndexError are raised; the latter two mean that the file is truncated.
"""

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.media.sound_tags import behind_tags
from triptych.types import AudioHeader

_MAX_JUNK = 65_536
"""Bytes before the first frame."""
_MAX_CANDIDATES = 65_536
"""Places behind damage that may be frames and are looked at."""
_SYNC = re.compile(rb"\xff[\xe0-\xff]|\x0b\x77|\x7f\xfe\x80\x01", re.DOTALL)

# ISO/IEC 11172-3 and 13818-3, by the version's two bits: 2.5, reserved, 2, 1.
_MPEG_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_MPEG_KBITS = {
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""By whether it is version 1, and layer."""
_XING_OFFSETS = {(True, 2): 32, (True, 1): 17, (False, 2): 17, (False, 1): 9}
"""Bytes of side information, by whether it is version 1, and channels."""
_MONO = 3
_LAYER_3 = 1
_DECODER_DELAY = 529
"""Samples that every decoder of layer 3 makes first, which FFmpeg leaves out with the encoder's."""

_AAC_RATES = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000, 7_350)
_AC3_RATES = (48_000, 44_100, 32_000)
_AC3_KBITS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640)
_AC3_CHANNELS = (2, 1, 2, 3, 3, 4, 4, 5)
_DTS_RATES = {1: 8_000, 2: 16_000, 3: 32_000, 6: 11_025, 7: 22_050, 8: 44_100, 11: 12_000, 12: 24_000, 13: 48_000}

# 3GPP TS 26.101 and 26.201: bytes of a frame by its type, with the byte that holds the type.
_AMR_MAGICS = {
    b"#!AMR\n": (8_000, 160, (13, 14, 16, 18, 20, 21, 27, 32, 6, 1, 1, 1, 1, 1, 1, 1)),
    b"#!AMR-WB\n": (16_000, 320, (18, 24, 33, 37, 41, 47, 51, 59, 61, 6, 1, 1, 1, 1, 1, 1)),
}


class AudioFrame(NamedTuple):
    """What a frame's header says."""

    size: int
    """In bytes."""
    samples: int
    """Samples of each channel."""
    rate: int
    channels: int
    format: str


_Parser: TypeAlias = Callable[[bytes, int], AudioFrame | None]
"""Reads the header of the frame at a position; None if there is none."""


@dataclass
class _Frames:
    """Frames in a row."""

    first: AudioFrame
    samples: Counter[int] = field(default_factory=Counter)
    """Samples of each channel, by sample rate."""

    def total(self) -> int:
        """Return the number of samples at the first frame's rate."""
        rate = self.first.rate
        return round(sum(Fraction(count * rate, other) for other, count in self.samples.items()))


def probe_frames(data: bytes) -> AudioHeader | None:
    """Return the header of frames that begin at the start or behind a little junk; None if there are none."""
    found = _frames_in_a_row(data, (0, min(_MAX_JUNK, len(data))), len(data), _PARSERS, iter(range(_MAX_CANDIDATES)))
    if found is None:
        return None
    position, parser = found
    return _probe_mpeg(data, position) if parser is mpeg_frame else probe_frames_of(data, position, len(data), parser)


def probe_frames_within(data: bytes, start: int, end: int) -> AudioHeader | None:
    """Return the header of the frames in a part of a file; None if there are none."""
    found = _frames_in_a_row(data, (start, end), end, _PARSERS, iter(range(_MAX_CANDIDATES)))
    return probe_frames_of(data, found[0], end, found[1]) if found else None


def probe_frames_of(data: bytes, start: int, end: int, parser: _Parser) -> AudioHeader:
    """Return the header of the frames from ``start`` on, the first of which exists."""
    frames = _count(data, start, end, parser)
    return AudioHeader(frames.first.format, frames.first.rate, frames.first.channels, frames.total())


def probe_amr(data: bytes) -> AudioHeader:
    """Return the header of AMR of one channel, narrowband or wideband."""
    magic = data[: data.index(b"\n") + 1] if b"\n" in data[:16] else b""
    if magic not in _AMR_MAGICS:
        raise UnsupportedMedia("the AMR audio has several channels, which isn't supported")
    rate, samples, sizes = _AMR_MAGICS[magic]
    position, count = len(magic), 0
    while position < len(data):
        position += sizes[data[position] >> 3 & 0xF]
        count += position <= len(data)
    return AudioHeader("AMR", rate, 1, count * samples)


def _probe_mpeg(data: bytes, start: int) -> AudioHeader:
    """Return the header of MPEG audio whose first frame is at ``start``. All frames are counted; of the silence that
    the encoder added, what FFmpeg leaves out is left out."""
    frame = mpeg_frame(data, start)
    assert frame is not None, "the caller found it"
    tag = start + 4 + _XING_OFFSETS[frame.samples == 1152, frame.channels]
    is_layer_3 = data[start + 1] >> 1 & 3 == _LAYER_3
    if is_layer_3 and data[tag : tag + 4] in (b"Xing", b"Info"):
        frames = _count(data, start + frame.size, len(data), mpeg_frame, frame)
        total = frames.total() - _mp3_padding(data, start, tag, frames.total(), frame)
    elif is_layer_3 and data[start + 36 : start + 40] == b"VBRI":
        total = _count(data, start + frame.size, len(data), mpeg_frame, frame).total()
    else:
        total = _count(data, start, len(data), mpeg_frame).total()
    return AudioHeader(frame.format, frame.rate, frame.channels, max(0, total))


def _mp3_padding(data: bytes, start: int, tag: int, total: int, frame: AudioFrame) -> int:
    """Return the samples that FFmpeg leaves out because of the encoder's table at ``tag``, out of ``total``. Raises
    TruncatedMedia if there are fewer than the table says."""
    flags: int
    frames: int
    size: int
    flags, frames, size = struct.unpack_from(">LLL", data, tag + 4)
    if not flags & 1:
        frames, size = 0, frames
    if not flags & 2:
        size = 0
    left = len(data) - start - 4
    if size and left - size > size >> 4:
        frames = 0  # something was appended
    last = frames * frame.samples
    if total < last - frame.rate // 10:
        raise TruncatedMedia(f"the MP3 audio ends after {total / frame.rate:.1f} s of {last / frame.rate:.1f} s")
    behind = tag + 8 + 4 * bool(flags & 1) + 4 * bool(flags & 2) + 100 * bool(flags & 4) + 4 * bool(flags & 8)
    if data[behind : behind + 4] not in (b"LAME", b"Lavf", b"Lavc"):
        return 0
    both = int.from_bytes(data[behind + 21 : behind + 24], "big")
    skipped, end = (both >> 12) + _DECODER_DELAY, (both & 0xFFF) - _DECODER_DELAY
    return skipped + (max(0, min(total, last) - (last - max(0, end))) if frames else 0)


def _frames_in_a_row(
    data: bytes, places: tuple[int, int], end: int, parsers: Sequence[_Parser], budget: Iterator[int]
) -> tuple[int, _Parser] | None:
    """Return where the first frame begins, between two places, that another one, a tag or the end follows: random bytes
    may look like one frame, but not like two in a row. ``budget`` bounds the places looked at."""
    for match, _ in zip(_SYNC.finditer(data, *places), budget, strict=False):
        position = match.start()
        for parser in parsers:
            frame = parser(data, position)
            if frame is None:
                continue
            behind = position + frame.size
            if behind == end or data[behind : behind + 3] in (b"TAG", b"ID3", b"APE"):
                return position, parser
            following = parser(data, behind)
            if following is not None and _are_alike(frame, following):
                return position, parser
    return None


def _like(first: AudioFrame, parser: _Parser) -> _Parser:
    """Return a parser that finds only frames that may be of the same stream as ``first``."""

    def parse(data: bytes, position: int) -> AudioFrame | None:
        frame = parser(data, position)
        return frame if frame is not None and _are_alike(first, frame) else None

    return parse


def _are_alike(one: AudioFrame, other: AudioFrame) -> bool:
    """Whether frames may be of one stream. Those that only add channels to another one have no samples."""
    same_samples = one.samples == other.samples or not one.samples * other.samples
    return same_samples and one.rate == other.rate and one.format == other.format


def _count(data: bytes, start: int, end: int, parser: _Parser, first: AudioFrame | None = None) -> _Frames:
    """Count the frames from ``start`` on. What is between them is skipped: tags, and damage. A last frame that the end
    cuts off doesn't count."""
    frames = _Frames(first or parser(data, start) or AudioFrame(0, 0, 1, 1, ""))
    position, budget = start, iter(range(_MAX_CANDIDATES))
    while position < end:
        frame = parser(data, position)
        if frame is not None:
            position += frame.size
            if position <= end:
                frames.samples[frame.rate] += frame.samples
            continue
        behind = behind_tags(data, position)
        if behind > position:
            position = behind
            continue
        found = _frames_in_a_row(data, (position + 1, end), end, (_like(frames.first, parser),), budget)
        if found is None:
            break
        position = found[0]
    return frames


def mpeg_frame(data: bytes, position: int) -> AudioFrame | None:
    """Return the frame of MPEG audio of any layer at a position."""
    if position + 4 > len(data) or data[position] != 0xFF or data[position + 1] < 0xE0:
        return None
    return _mpeg_frame(data[position + 1], data[position + 2], data[position + 3] >> 6 == _MONO)


@lru_cache(maxsize=4096)
def _mpeg_frame(first: int, second: int, is_mono: bool) -> AudioFrame | None:
    version, layer = first >> 3 & 3, 4 - (first >> 1 & 3)
    bitrate, rate_index, padding = second >> 4, second >> 2 & 3, second >> 1 & 1
    if version not in _MPEG_RATES or layer == 4 or rate_index == 3 or bitrate in (0, 15):
        return None
    rate, is_first_version = _MPEG_RATES[version][rate_index], version == 3
    bits = _MPEG_KBITS[is_first_version, layer][bitrate - 1] * 1000
    samples = 384 if layer == 1 else 1152 if layer == 2 or is_first_version else 576
    size = (12 * bits // rate + padding) * 4 if layer == 1 else samples // 8 * bits // rate + padding
    return AudioFrame(size, samples, rate, 1 if is_mono else 2, "MP3")


def adts_frame(data: bytes, position: int) -> AudioFrame | None:
    """Return the ADTS frame at a position (ISO/IEC 14496-3)."""
    if position + 7 > len(data) or data[position] != 0xFF or data[position + 1] & 0xF6 != 0xF0:
        return None
    rate_index = data[position + 2] >> 2 & 0xF
    packed = int.from_bytes(data[position + 2 : position + 7], "big")
    size, blocks, channels = packed >> 13 & 0x1FFF, (packed & 3) + 1, packed >> 30 & 7
    if rate_index >= len(_AAC_RATES) or size < 7:
        return None
    return AudioFrame(size, 1024 * blocks, _AAC_RATES[rate_index], {0: 1, 7: 8}.get(channels, channels), "AAC")


def ac3_frame(data: bytes, position: int) -> AudioFrame | None:
    """Return the AC-3 or E-AC-3 frame at a position (ETSI TS 102 366)."""
    if position + 7 > len(data) or data[position : position + 2] != b"\x0b\x77":
        return None
    kind, code, version = data[position + 2], data[position + 4], data[position + 5] >> 3
    rate_index = code >> 6
    if version <= 10:
        size_index = code & 0x3F
        if rate_index == 3 or size_index >= 2 * len(_AC3_KBITS):
            return None
        rate = _AC3_RATES[rate_index]
        words = _AC3_KBITS[size_index >> 1] * 96_000 // rate + (size_index & 1 if rate == 44_100 else 0)
        return AudioFrame(2 * words, 1536, rate >> max(0, version - 8), _AC3_CHANNELS[data[position + 6] >> 5], "AC-3")
    if version > 16:
        return None
    if rate_index != 3:
        rate, blocks = _AC3_RATES[rate_index], (1, 2, 3, 6)[code >> 4 & 3]
    elif code >> 4 & 3 != 3:
        rate, blocks = _AC3_RATES[code >> 4 & 3] // 2, 6
    else:
        return None
    size = 2 * (((kind & 7) << 8 | data[position + 3]) + 1)
    depends = kind >> 6 == 1 or kind >> 3 & 7  # on the frame before, whose channels it adds to
    return AudioFrame(size, 0 if depends else 256 * blocks, rate, _AC3_CHANNELS[code >> 1 & 7], "E-AC-3")


def dts_frame(data: bytes, position: int) -> AudioFrame | None:
    """Return the DTS core frame at a position (ETSI TS 102 114)."""
    if position + 9 > len(data) or data[position : position + 4] != b"\x7f\xfe\x80\x01":
        return None
    packed = int.from_bytes(data[position + 4 : position + 9], "big")
    blocks, size, rate = (packed >> 26 & 0x7F) + 1, (packed >> 12 & 0x3FFF) + 1, _DTS_RATES.get(packed >> 2 & 0xF)
    return AudioFrame(size, 32 * blocks, rate, 2, "DTS") if rate and size > 95 else None


_PARSERS = (adts_frame, mpeg_frame, ac3_frame, dts_frame)
