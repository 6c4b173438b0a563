"""Reads the headers of WAV, FLAC, MP3 and Ogg files, chunk by chunk.

Untrusted bytes: every loop advances and is bounded. Only MediaError, ``struct.error`` and IndexError are raised; the
latter two mean that the file is truncated.
"""

import struct

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.types import AudioHeader

_MAX_CHUNKS = 65_536
_MAX_MP3_FRAMES = 1 << 19
_MAX_MP3_JUNK = 65_536

# PCM, IEEE float, A-law, µ-law, and "the real format is in the extension", which has the same fields.
_WAV_FORMATS = frozenset({1, 3, 6, 7, 0xFFFE})
_WAV_UNKNOWN_SIZES = frozenset({0, 0xFFFFFFFF})

_OPUS_RATE = 48_000

# ISO/IEC 11172-3 and 13818-3, by the version's two bits: 2.5, reserved, 2, 1.
_MP3_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_MP3_KBITS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_KBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_MONO = 3


def probe_wav(data: bytes) -> AudioHeader:
    """Return the header of a RIFF file of kind WAVE."""
    position, layout = 12, None
    for _ in range(_MAX_CHUNKS):
        kind, size = struct.unpack_from("<4sL", data, position)
        position += 8
        if kind == b"fmt ":
            layout = struct.unpack_from("<HHLLH", data, position)
        elif kind == b"data":
            if layout is None:
                raise UnsupportedMedia("the WAV audio has its samples before their format")
            code, channels, rate, _, block = layout
            if code not in _WAV_FORMATS or not block:
                raise UnsupportedMedia(f"the WAV audio has the format {code}, which isn't supported")
            if size in _WAV_UNKNOWN_SIZES:
                size = len(data) - position
            if position + size > len(data):
                raise TruncatedMedia("the WAV audio ends within its samples")
            return AudioHeader("WAV", rate, channels, size // block)
        position += size + (size & 1)
    raise UnsupportedMedia(f"the WAV audio has more than {_MAX_CHUNKS} chunks")


def probe_flac(data: bytes) -> AudioHeader:
    """Return the header of a native FLAC stream, from its first block (RFC 9639)."""
    if data[4] & 0x7F:
        raise UnsupportedMedia("the FLAC audio doesn't begin with its stream's description")
    (packed,) = struct.unpack_from(">Q", data, 18)
    rate, channels, samples = packed >> 44, (packed >> 41 & 7) + 1, packed & ((1 << 36) - 1)
    if not samples:
        raise UnsupportedMedia("the FLAC audio doesn't say how long it is")
    return AudioHeader("FLAC", rate, channels, samples)


def probe_ogg(data: bytes) -> AudioHeader:
    """Return the header of an Ogg file with Vorbis or Opus; its last page has the number of samples (RFC 3533)."""
    (serial,) = struct.unpack_from("<L", data, 14)
    first = 27 + data[26]
    if data[first : first + 7] == b"\x01vorbis":
        channels, rate = struct.unpack_from("<BL", data, first + 11)
        skipped = 0
    elif data[first : first + 8] == b"OpusHead":
        channels, skipped = struct.unpack_from("<BH", data, first + 9)
        rate = _OPUS_RATE
    else:
        raise UnsupportedMedia("the Ogg file holds neither Vorbis nor Opus")
    position = len(data)
    for _ in range(_MAX_CHUNKS):
        position = data.rfind(b"OggS", 0, position)
        if position < 0:
            break
        granule, of = struct.unpack_from("<qL", data, position + 6)
        table = position + 27
        if table + data[table - 1] + sum(data[table : table + data[table - 1]]) > len(data):
            raise TruncatedMedia("the Ogg audio ends within a page")
        if of == serial and granule > 0:
            return AudioHeader("OGG", rate, channels, max(0, granule - skipped))
    raise TruncatedMedia("the Ogg audio ends before its samples")


def probe_mp3(data: bytes, start: int) -> AudioHeader:
    """Return the header of an MP3 file whose ID3 tag ends at ``start``. The length is the encoder's own count of frames
    and padding, if it left one; otherwise the frames are counted."""
    for position in range(start, min(start + _MAX_MP3_JUNK, len(data) - 4)):
        # random bytes may look like one header, but not like two in a row
        if (frame := _mp3_frame(data, position)) and _mp3_frame(data, position + frame[0], frame):
            break
    else:
        raise UnsupportedMedia("not a WAV, FLAC, MP3 or Ogg audio file")
    size, samples, rate, channels = frame
    is_first_version = samples == 1152
    side = (17 if channels == 1 else 32) if is_first_version else (9 if channels == 1 else 17)
    tag = position + 4 + side
    if data[tag : tag + 4] in (b"Xing", b"Info"):
        flags, frames = struct.unpack_from(">LL", data, tag + 4)
        if flags & 1 and frames:
            return AudioHeader("MP3", rate, channels, max(0, frames * samples - _mp3_padding(data, tag, flags)))
        position += size
    count = 0
    while count < _MAX_MP3_FRAMES and (next_frame := _mp3_frame(data, position, frame)):
        position += next_frame[0]
        count += 1
    return AudioHeader("MP3", rate, channels, count * samples)


def _mp3_padding(data: bytes, tag: int, flags: int) -> int:
    """Return the samples that the encoder added, as LAME and FFmpeg write them after the table at ``tag``."""
    behind = tag + 8 + 4 * bool(flags & 1) + 4 * bool(flags & 2) + 100 * bool(flags & 4) + 4 * bool(flags & 8)
    if data[behind : behind + 4] not in (b"LAME", b"Lavf", b"Lavc"):
        return 0
    both = int.from_bytes(data[behind + 21 : behind + 24], "big")
    return (both >> 12) + (both & 0xFFF)


def _mp3_frame(
    data: bytes, position: int, like: tuple[int, int, int, int] | None = None
) -> tuple[int, int, int, int] | None:
    """Return (bytes, samples, rate, channels) of the layer 3 frame at a position; None if there is none, or if it
    differs from ``like`` in samples or rate."""
    if position + 4 > len(data) or data[position] != 0xFF or data[position + 1] & 0xE6 != 0xE2:
        return None
    version, packed, mode = data[position + 1] >> 3 & 3, data[position + 2], data[position + 3]
    bitrate, rate_index, padding = packed >> 4, packed >> 2 & 3, packed >> 1 & 1
    if version not in _MP3_RATES or rate_index == 3 or bitrate in (0, 15):
        return None
    rate = _MP3_RATES[version][rate_index]
    is_first_version = version == 3
    kbits = (_MP3_KBITS_1 if is_first_version else _MP3_KBITS_2)[bitrate]
    size = (144 if is_first_version else 72) * kbits * 1000 // rate + padding
    frame = size, 1152 if is_first_version else 576, rate, 1 if mode >> 6 == _MONO else 2
    return frame if like is None or frame[1:3] == like[1:3] else None
