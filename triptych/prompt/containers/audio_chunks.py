"""Reads the headers of audio files that hold their samples in one chunk: WAV (RIFF, RIFX, RF64, BW64), Sony Wave64,
AIFF, AU and CAF.

Untrusted bytes: every loop advances and is bounded. Only MediaError, ``struct.error`` and IndexError are raised; the
latter two mean that the file is truncated.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.prompt.containers.audio_frames import probe_frames_within
from triptych.prompt.containers.flac import frame_place
from triptych.types import AudioHeader

_MAX_CHUNKS = 65_536
_STREAMED = 0x7F000000
"""Sizes from here on are no sizes if the file is shorter: it was written to where its end was unknown."""

# Tags of formats (RFC 2361), with what each byte or block becomes.
_WAV_PLAIN = frozenset({1, 3, 6, 7})
_WAV_MS_ADPCM, _WAV_IMA_ADPCM, _WAV_GSM, _WAV_EXTENSIBLE = 0x2, 0x11, 0x31, 0xFFFE
_WAV_EVEN = frozenset({0x20, 0x45, 0x65, 0x28F})
"""Yamaha's ADPCM, G.726 and G.722: as many bits for each sample."""
_WAV_FRAMES = frozenset({0x50, 0x55, 0x92, 0x2000, 0x2001})
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")

_W64_RIFF = bytes.fromhex("726966662e91cf11a5d628db04c10000")
_W64_TAIL = bytes.fromhex("f3acd3118cd100c04f8edb8a")

# Bytes of a value in AIFF-C, AU and CAF, where the number of bits doesn't say it.
_AIFF_CODES = {b"NONE": 0, b"twos": 0, b"sowt": 0, b"raw ": 0, b"in24": 3, b"in32": 4, b"fl32": 4, b"fl64": 8}
_AIFF_CODES |= {b"FL32": 4, b"FL64": 8, b"ulaw": 1, b"ULAW": 1, b"alaw": 1, b"ALAW": 1}
_AU_CODES = {1: 1, 2: 1, 3: 2, 4: 3, 5: 4, 6: 4, 7: 8, 27: 1}
_CAF_FRAMES = frozenset({b".mp1", b".mp2", b".mp3"})
"""Codecs of which FFmpeg's muxer declares wrong lengths of packets."""
_MAX_NUMBER_BYTES = 10
_HEADERS = 512
"""Bytes that a size may have too many."""
_IMA_BYTES, _IMA_SAMPLES = 34, 64
"""Bytes and samples of a channel's packet in Apple's IMA ADPCM."""


@dataclass(frozen=True)
class _Layout:
    """What a WAV's ``fmt `` chunk says."""

    code: int
    channels: int
    rate: int
    block: int
    """Bytes of a block, which of plain formats is one sample of each channel."""
    bits: int


def is_chunked(data: bytes) -> bool:
    """Whether the file begins as one that ``probe_chunked`` reads."""
    return (
        (data[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64") and data[8:12] == b"WAVE")
        or (data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"))
        or data[:16] == _W64_RIFF
        or data[:4] in (b".snd", b"caff")
    )


def probe_chunked(data: bytes) -> AudioHeader:
    """Return the header of a file of which ``is_chunked`` is true."""
    if data[:4] == b"FORM":
        return _probe_aiff(data)
    if data[:4] == b".snd":
        return _probe_au(data)
    if data[:4] == b"caff":
        return _probe_caf(data)
    return _probe_wav(data)


def _probe_wav(data: bytes) -> AudioHeader:
    name, endian = ("W64" if data[:16] == _W64_RIFF else "WAV"), (">" if data[:4] == b"RIFX" else "<")
    layout: _Layout | None = None
    long_size = 0
    for kind, position, size in _w64_chunks(data) if name == "W64" else _chunks(data, endian):
        if kind == b"ds64":
            (long_size,) = struct.unpack_from("<Q", data, position + 8)
        elif kind == b"fmt ":
            layout = _wav_layout(data, position, size, endian)
        elif kind == b"data":
            if layout is None:
                raise UnsupportedMedia(f"the {name} audio has its samples before their format")
            real_size = long_size if size == 0xFFFFFFFF and long_size else size
            return _wav_header(data, name, layout, position, _end(data, name, position, real_size))
    raise UnsupportedMedia(f"the {name} audio has more than {_MAX_CHUNKS} chunks")


def _chunks(data: bytes, endian: str, start: int = 12) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, size) of each chunk's content."""
    for _ in range(_MAX_CHUNKS):
        kind, size = struct.unpack_from(f"{endian}4sL", data, start)
        yield kind, start + 8, size
        start += 8 + size + (size & 1)


def _w64_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    start = 40
    for _ in range(_MAX_CHUNKS):
        kind, tail, size = struct.unpack_from("<4s12sQ", data, start)
        yield (kind if tail == _W64_TAIL else b""), start + 24, max(0, size - 24)
        start += max(24, size + 7 & ~7)


def _end(data: bytes, name: str, start: int, size: int) -> int:
    """Return where samples end that have a size; 0 and huge ones are of files that were written to where their end was
    unknown. Some writers count their headers, too. Raises TruncatedMedia if the file ends before them."""
    if not size:
        return len(data)
    if start + size > len(data) + _HEADERS and size < _STREAMED:
        raise TruncatedMedia(f"the {name} audio ends within its samples")
    return min(start + size, len(data))


def _wav_layout(data: bytes, position: int, size: int, endian: str) -> _Layout:
    code, channels, rate, _, block = struct.unpack_from(f"{endian}HHLLH", data, position)
    bits = struct.unpack_from(f"{endian}H", data, position + 14)[0] if size >= 16 else 8
    if code == _WAV_EXTENSIBLE and size >= 40:
        (code,) = struct.unpack_from(f"{endian}H", data, position + 24)
        if data[position + 26 : position + 40] != _GUID_TAIL:
            raise UnsupportedMedia("the WAV audio has a format of its maker, which isn't supported")
    elif code == _WAV_EXTENSIBLE:
        code = 1
    return _Layout(code, channels, rate, block, bits)


def _wav_header(data: bytes, name: str, layout: _Layout, start: int, end: int) -> AudioHeader:
    code, channels, block, size = layout.code, layout.channels, layout.block, end - start
    if code in _WAV_FRAMES:
        header = probe_frames_within(data, start, end)
        if header is None:
            raise UnsupportedMedia(f"the {name} audio has the format {code}, but none of its frames")
        return AudioHeader(name, header.rate, header.channels, header.samples)
    if not channels or not block:
        samples: int | None = None
    elif code in _WAV_PLAIN:
        samples = size // block
    elif code == _WAV_MS_ADPCM:
        samples = _blocks(size, block, lambda length: 2 * (length - 6 * channels) // channels)
    elif code == _WAV_IMA_ADPCM and layout.bits == 4:
        samples = _blocks(size, block, lambda length: (length - 4 * channels) // (4 * channels) * 8 + 1)
    elif code == _WAV_GSM:
        samples = size // 65 * 320
    elif code in _WAV_EVEN and layout.bits:
        samples = 8 * size // (layout.bits * channels)
    else:
        samples = None
    if samples is None:
        raise UnsupportedMedia(f"the {name} audio has the format {code}, which isn't supported")
    return AudioHeader(name, layout.rate, channels, samples)


def _blocks(size: int, block: int, samples: Callable[[int], int]) -> int:
    """Return the samples of whole blocks and of a shorter last one."""
    return size // block * max(0, samples(block)) + max(0, samples(size % block))


def _probe_aiff(data: bytes) -> AudioHeader:
    layout: tuple[int, int, int, bytes] | None = None
    place: tuple[int, int] | None = None
    for kind, position, size in _chunks(data, ">"):
        if kind == b"COMM":
            channels, _, bits, exponent, mantissa = struct.unpack_from(">HLHHQ", data, position)
            rate = mantissa >> 16_446 - exponent if 16_383 <= exponent <= 16_446 else 0
            code = data[position + 18 : position + 22] if data[8:12] == b"AIFC" else b"NONE"
            layout = channels, bits, rate, code
        elif kind == b"SSND":
            (offset,) = struct.unpack_from(">L", data, position)
            # without a size, its own eight bytes are missing as well
            place = position + 8 + offset, max(0, size - 8 - offset)
        if layout and place:
            break
    if layout is None or place is None:
        raise UnsupportedMedia(f"the AIFF audio has more than {_MAX_CHUNKS} chunks")
    channels, bits, rate, code = layout
    if code == b"ima4":
        return _EvenPackets("AIFF", rate, channels, _IMA_BYTES * channels, _IMA_SAMPLES).header(data, *place)
    value = _AIFF_CODES.get(code, -1)
    return _EvenPackets("AIFF", rate, channels, (value or -(-bits // 8)) * channels, code=code).header(data, *place)


def _probe_au(data: bytes) -> AudioHeader:
    start, size, code, rate, channels = struct.unpack_from(">LLLLL", data, 4)
    return _EvenPackets("AU", rate, channels, _AU_CODES.get(code, -1) * channels, code=code).header(data, start, size)


def _probe_caf(data: bytes) -> AudioHeader:
    position, packets, samples, remainder = 8, 0, 0, 0
    layout: tuple[float, bytes, int, int, int, int, int] | None = None
    place: tuple[int, int] | None = None
    last_size = 0
    for _ in range(_MAX_CHUNKS):
        if position + 12 > len(data) and layout and place:
            break
        kind, size = struct.unpack_from(">4sq", data, position)
        position += 12
        if kind == b"desc":
            layout = struct.unpack_from(">d4sLLLLL", data, position)
        elif kind == b"pakt":
            packets, samples, _, remainder = struct.unpack_from(">qqLL", data, position)
            last_size = _last_number(data, position + 24, position + size)
        elif kind == b"data":
            place = position + 4, 0 if size < 0 else max(0, size - 4)
        position = len(data) if size < 0 else position + size
    if layout is None or place is None:
        raise UnsupportedMedia(f"the CAF audio has more than {_MAX_CHUNKS} chunks")
    rate, code, _, size, of_packet, channels, _ = layout
    rate = int(rate) if 0 < rate < 2**31 else 0
    if size:
        return _EvenPackets("CAF", rate, channels, size, of_packet, code).header(data, *place)
    end = _end(data, "CAF", *place)
    if code in _CAF_FRAMES and (header := probe_frames_within(data, place[0], end)) is not None:
        return AudioHeader("CAF", header.rate, header.channels, header.samples)
    if samples < 1:
        raise UnsupportedMedia(f"the CAF audio is encoded as {_named(code)} and doesn't say how long it is")
    # FFmpeg leaves the last packet's padding out, even from packets of ALAC, which have none
    cut = remainder if code == b"alac" and 2 * remainder <= of_packet else 0
    if code == b"flac" and (first := frame_place(data, place[0], 0)):
        samples = sum(frame_place(data, end - last_size, first[1]) or (samples,))
    elif code == b"alac" and samples == packets * of_packet:
        cut += max(0, of_packet - alac_samples(data, end - last_size, of_packet))
    return AudioHeader("CAF", rate, channels, max(0, samples - cut))


def _last_number(data: bytes, start: int, end: int) -> int:
    """Return the last number above 0 in a table where the upper bit of a byte says that the number goes on."""
    last = value = 0
    for byte in data[max(start, end - 2 * _MAX_NUMBER_BYTES) : end]:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            last, value = value or last, 0
    return last


def alac_samples(data: bytes, position: int, whole: int) -> int:
    """Return the samples of each channel in a packet of ALAC; ``whole`` if it doesn't say so."""
    head = int.from_bytes(data[position : position + 7], "big")
    return head >> 1 & 0xFFFFFFFF if head >> 36 & 1 else whole


@dataclass(frozen=True)
class _EvenPackets:
    """Samples in equal packets."""

    name: str
    rate: int
    channels: int
    size: int
    """Bytes of a packet; negative for codes that aren't supported."""
    samples: int = 1
    """Samples of each channel in a packet."""
    code: bytes | int = 0

    def header(self, data: bytes, start: int, size: int) -> AudioHeader:
        """Return the header, given where the samples start and their size."""
        if self.size < 0 or not self.channels:
            raise UnsupportedMedia(f"the {self.name} audio is encoded as {_named(self.code)}, which isn't supported")
        if not self.size:
            raise UnsupportedMedia(f"the {self.name} audio has samples without bits")
        length = max(0, _end(data, self.name, start, size) - start)
        return AudioHeader(self.name, self.rate, self.channels, length // self.size * self.samples)


def _named(code: bytes | int) -> str:
    return repr(code.decode("latin-1")) if isinstance(code, bytes) else f"format {code}"
