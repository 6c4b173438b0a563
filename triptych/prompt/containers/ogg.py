"""Reads the length of sound in Ogg files (RFC 3533) from their pages: Vorbis, Opus, FLAC and Speex.

A page says at which sample its last packet ends. A recording may begin in the middle of a broadcast, and several
streams may follow each other. Untrusted bytes: every loop advances and is bounded. Only MediaError, ``struct.error``
and IndexError are raised; the latter two mean that the file is truncated.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.prompt.containers.flac import frame_place, stream_info
from triptych.types import AudioHeader

_MAX_PAGES = 1 << 19
_CONTINUED, _FIRST, _LAST = 1, 2, 4
_FLAC_SYNC = b"\xff"
OPUS_RATE = 48_000
_OPUS_SAMPLES = (*(480, 960, 1920, 2880) * 3, *(480, 960) * 2, *(120, 240, 480, 960) * 4)
"""Samples of a frame at 48 kHz, by the upper five bits of a packet (RFC 6716)."""


class _Page(NamedTuple):
    """A page's header."""

    flags: int
    end: int
    """The sample at which its last packet ends; -1 if no packet ends on it."""
    serial: int
    packets: list[int]
    """Where packets begin."""
    packet_ends: int
    """Packets that end on it."""
    body: int
    """Where its content begins."""
    length: int


@dataclass
class _Link:
    """A stream of sound, which others may follow."""

    serial: int
    codec: str
    rate: int
    channels: int
    skipped: int = 0
    """Samples that the decoder needs first and doesn't return."""
    headers: int = 0
    """Packets before those of sound."""
    block_samples: int = 0
    """Samples of a whole frame of FLAC, or of a packet of Speex."""
    start: int | None = None
    """The sample at which it begins; None if that isn't known yet."""
    end: int = 0

    def add(self, data: bytes, page: _Page) -> None:
        """Note what a page says about the stream's start and end."""
        if self.codec == "flac":  # not all writers count its headers right
            packets = [packet for packet in page.packets if data[packet : packet + 1] == _FLAC_SYNC]
        else:
            packets = page.packets[self.headers :]
            self.headers = max(0, self.headers - len(page.packets))
        if self.codec == "speex":  # of which FFmpeg decodes every packet whole
            self.start, self.end = 0, self.end + len(packets) * self.block_samples
            return
        if page.end < 0 or (not packets and self.start is None):
            return
        if self.start is None:
            self.start = self._start(data, page, packets)
        self.end = max(self.end, page.end)

    def _start(self, data: bytes, page: _Page, packets: list[int]) -> int:
        """Return the sample at which the first page with sound begins."""
        if self.codec == "flac" and (place := frame_place(data, packets[0], self.block_samples)):
            return place[0]
        if self.codec == "opus":
            start = page.end - sum(opus_samples(data, packet) for packet in packets[: page.packet_ends])
            # of a last page the rest is left out; FFmpeg's cuts begin before 0
            return max(0, start) if page.flags & _LAST else start
        return 0

    @property
    def samples(self) -> int:
        return max(0, self.end - (self.start or 0) - self.skipped)


def probe_ogg(data: bytes) -> AudioHeader:
    """Return the header of an Ogg file: of its first stream of sound, and of those that follow it."""
    links: list[_Link] = []
    had_sound = False
    for page in _pages(data):
        if page.flags & _FIRST:
            link = _link(data, page) if had_sound or not links else None
            if link is not None and all(link.serial != other.serial for other in links):
                links.append(link)
                had_sound = False
        elif links and page.serial == links[-1].serial:
            links[-1].add(data, page)
            had_sound = True
    if not links:
        raise UnsupportedMedia("the Ogg file holds neither Vorbis nor Opus, FLAC or Speex")
    first = links[0]
    samples = sum(link.samples * first.rate // link.rate for link in links)
    if not any(link.end for link in links):
        raise TruncatedMedia("the Ogg audio ends before its samples")
    return AudioHeader("OGG", first.rate, first.channels, samples)


def _pages(data: bytes) -> Iterator[_Page]:
    """Yield the pages. What is between them is skipped."""
    position = 0
    for _ in range(_MAX_PAGES):
        position = data.find(b"OggS", position)
        if position < 0:
            return
        flags, end, serial = struct.unpack_from("<BqL", data, position + 5)
        body = position + 27 + data[position + 26]
        sizes = data[position + 27 : body]
        position = body + sum(sizes)
        if position > len(data):
            raise TruncatedMedia("the Ogg audio ends within a page")
        packets, at, begins = [], body, not flags & _CONTINUED
        for size in sizes:
            if begins:
                packets.append(at)
            at += size
            begins = size < 255
        yield _Page(flags, end, serial, packets, sum(size < 255 for size in sizes), body, position - body)
    raise UnsupportedMedia(f"the Ogg audio has more than {_MAX_PAGES} pages")


def _link(data: bytes, page: _Page) -> _Link | None:
    """Return the stream of sound that a page begins; None if it is another one."""
    body = page.body
    if data.startswith(b"\x01vorbis", body):
        channels, rate = struct.unpack_from("<BL", data, body + 11)
        link = _Link(page.serial, "vorbis", rate, channels, headers=2)
    elif data.startswith(b"OpusHead", body):
        channels, skipped = struct.unpack_from("<BH", data, body + 9)
        link = _Link(page.serial, "opus", OPUS_RATE, channels, skipped, headers=1)
    elif data.startswith(b"\x7fFLAC", body):
        rate, channels, _ = stream_info(data, body + 13)
        (block_samples,) = struct.unpack_from(">H", data, body + 19)
        link = _Link(page.serial, "flac", rate, channels, block_samples=block_samples)
    elif data.startswith(b"Speex   ", body):
        rate, _, _, channels = struct.unpack_from("<LLLL", data, body + 36)
        samples, _, frames = struct.unpack_from("<LLL", data, body + 56)
        link = _Link(page.serial, "speex", rate, channels, headers=1, block_samples=samples * max(1, frames))
    else:
        return None
    return link if link.rate else None


def opus_samples(data: bytes, packet: int) -> int:
    """Return the samples of an Opus packet at 48 kHz."""
    first = data[packet]
    frames = (1, 2, 2, data[packet + 1] & 0x3F if packet + 1 < len(data) else 1)[first & 3]
    return frames * _OPUS_SAMPLES[first >> 3]
