"""Decodes selected frames of a video, and as few others as possible. Pure: bytes in, frames out.

First all packets are read, which is cheap compared with decoding. They give the frames' order, and the keyframes at
which decoding can start. Then only the runs of packets that lead to a selected frame are decoded. Within these, frames
that are neither selected nor referenced by others are skipped.
"""

import bisect
import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream
from numpy.typing import NDArray

from triptych.errors import MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.media.hidden import hidden_packets
from triptych.types import VideoHeader

Frame = NDArray[np.uint8]
"""RGB of shape (height, width, 3), as displayed."""

_Packet: TypeAlias = "av.Packet[Any]"

# Explicit demuxers, because some of those that FFmpeg might guess open other files.
DEMUXERS = {"MP4": "mp4", "WebM": "matroska", "GIF": "gif"}
_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9", "gif"})

_MAX_LOOKED_AT = 64
"""Keyframes looked at for the one to start from."""

_DECODING_ERRORS = (av.error.FFmpegError, ValueError, EOFError)


@dataclass(frozen=True)
class _Packets:
    """The packets of a video stream. A packet's ``pts`` is its rank: its place among all packets in display order."""

    packets: list[_Packet]
    """In decoding order."""
    shown: list[int]
    """Ranks of those that show a frame, sorted."""
    indexes: list[int]
    """The packet's index by rank."""

    keyframes: list[int]
    """Indexes of keyframes, sorted."""

    def start(self, rank: int) -> int:
        """Return the index of the last keyframe from which a packet can be decoded; 0 if there is none. A packet that
        is shown before the keyframe may depend on what is before it."""
        number = bisect.bisect_right(self.keyframes, self.indexes[rank])
        for index in reversed(self.keyframes[max(0, number - _MAX_LOOKED_AT) : number]):
            if _rank(self.packets[index]) <= rank:
                return index
        return 0


def decode_frames(data: bytes, header: VideoHeader, numbers: Sequence[int]) -> Iterator[Frame]:
    """Yield the frames with these numbers, which are sorted and may repeat, as in ``sampled_frames``.

    Raises TruncatedMedia for a file that ends too early, MediaMismatch for one that contradicts its header, and
    UnsupportedMedia for one that can't be decoded.
    """
    name = header.format
    try:
        container = av.open(io.BytesIO(data), "r", format=DEMUXERS[name], metadata_errors="ignore")
    except _DECODING_ERRORS as error:
        raise UnsupportedMedia(f"the {name} video is damaged and can't be opened") from error
    with closing(container):
        try:
            stream, packets = _read_packets(container, header)
            decoder = stream.codec_context
            # frames larger than in the header are rejected; the margin is for decoders, which round up to whole blocks
            decoder.options = {"max_pixels": str((header.width + 128) * (header.height + 128))}
            yield from FrameDecoder(decoder, packets, header).frames(numbers)
        except _DECODING_ERRORS as error:
            raise UnsupportedMedia(f"the {name} video is damaged and can't be decoded") from error


def _read_packets(container: InputContainer, header: VideoHeader) -> tuple[VideoStream, _Packets]:
    """Return the first video stream that has packets, with them. Raises as ``decode_frames`` does."""
    name = header.format
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not streams:
        raise UnsupportedMedia(f"the {name} file has no video stream")
    of_stream: dict[int, list[_Packet]] = {stream.index: [] for stream in streams}
    for packet in container.demux(streams):
        if packet.size:
            of_stream[packet.stream.index].append(packet)
    stream = next((stream for stream in streams if of_stream[stream.index]), streams[0])
    codec, packets = stream.codec_context, of_stream[stream.index]
    if codec.name not in _CODECS:
        raise UnsupportedMedia(f"the {name} video is encoded as {codec.name!r}, which isn't supported")
    codec.thread_count = 1  # instances control the number of threads; frame threads also add latency
    if not packets:
        raise TruncatedMedia(f"the {name} video has no frames")
    if packets[-1].is_corrupt:
        raise TruncatedMedia(f"the {name} video ends within a frame")
    views = (memoryview(packet) for packet in packets)
    # of other containers the packets are counted in tables
    hidden = hidden_packets(codec.codec.canonical_name, views) if name == "WebM" else frozenset()
    ranked = _ranked(packets, hidden)
    if len(ranked.shown) < header.frames:
        raise TruncatedMedia(f"the {name} video has {len(ranked.shown)} of the {header.frames} frames it promises")
    if len(ranked.shown) > header.frames:
        raise MediaMismatch(f"the {name} video has {len(ranked.shown)} frames; its header says {header.frames}")
    return stream, ranked


def _ranked(packets: list[_Packet], hidden: frozenset[int]) -> _Packets:
    """Number the packets. ``hidden`` are the indexes of those that show nothing."""
    places: list[tuple[int, int]] = []
    run = time = position = 0
    for packet in packets:
        # an edit list may show parts of a file in any order, each from the keyframe before it
        if (packet.pos is not None and packet.pos < position) or (packet.is_discard and packet.is_keyframe):
            run += 1
        position = packet.pos or 0
        time = packet.pts if packet.pts is not None else time  # of several in a block, only the first may have one
        places.append((run, time))
    indexes = sorted(range(len(packets)), key=places.__getitem__)
    shown = []
    for rank, index in enumerate(indexes):
        packets[index].pts = rank
        if index not in hidden and not packets[index].is_discard:
            shown.append(rank)
    keyframes = [index for index, packet in enumerate(packets) if packet.is_keyframe]
    return _Packets(packets, shown, indexes, keyframes)


def _rank(made: "_Packet | av.VideoFrame") -> int:
    """Return the rank of a packet, or of the packet that a frame is from."""
    assert made.pts is not None
    return made.pts


class FrameDecoder:
    """A decoder and its position in the stream."""

    def __init__(self, decoder: VideoCodecContext, packets: _Packets, header: VideoHeader) -> None:
        self._decoder = decoder
        self._packets = packets
        self._header = header
        self._selected: frozenset[int] = frozenset()
        self._may_skip = decoder.name != "libdav1d"  # which reads the option only once
        self._may_seek = True
        self._next = -1  # index of the next packet to decode; -1 before the first one
        self._coming: Iterator[av.VideoFrame] = iter(())
        self._last: av.VideoFrame | None = None  # that was taken
        self._following: av.VideoFrame | None = None  # not taken yet

    def frames(self, numbers: Sequence[int]) -> Iterator[Frame]:
        """Yield the frames with these numbers, which are sorted."""
        self._selected = frozenset(self._packets.shown[number] for number in numbers)
        for number, same in itertools.groupby(numbers):
            frame = self._displayed(self._frame(self._packets.shown[number]))
            for _ in same:
                yield frame

    def _frame(self, rank: int) -> av.VideoFrame:
        """Return the frame of a packet, or of the last one before it that the decoder shows. Second fields, and what
        depends on frames before the file's beginning, aren't shown."""
        self._seek(self._packets.start(rank) if self._may_seek else 0)
        self._advance(rank)
        frame = self._last or self._following
        if frame is None:
            raise UnsupportedMedia(f"the {self._header.format} video is damaged: a frame can't be decoded")
        return frame

    def _seek(self, start: int) -> None:
        """Go on with the packet at an index, unless the decoder is already beyond it."""
        if start <= self._next:
            return
        self._restart(start)
        self._following = next(self._coming, None)
        packet = self._packets.packets[start]
        is_complete = self._following is not None and _rank(self._following) <= _rank(packet)
        if start and not packet.is_discard and not is_complete:
            # pictures are refreshed in parts, over several frames after each keyframe
            self._may_seek = False
            self._restart(0)

    def _restart(self, index: int) -> None:
        if self._next >= 0:
            self._decoder.flush_buffers()
        self._next = index
        self._coming = self._decoded()
        self._last = self._following = None

    def _advance(self, rank: int) -> None:
        """Take frames up to that of a packet."""
        while self._last is None or _rank(self._last) < rank:
            frame = self._following or next(self._coming, None)
            if frame is None:
                return
            if _rank(frame) > rank:
                self._following = frame
                return
            self._last, self._following = frame, None

    def _decoded(self) -> Iterator[av.VideoFrame]:
        packets = self._packets.packets
        while self._next <= len(packets):
            packet = packets[self._next] if self._next < len(packets) else None
            self._next += 1
            may_skip = self._may_skip and packet is not None and packet.pts not in self._selected
            self._decoder.skip_frame = "NONREF" if may_skip else "DEFAULT"
            yield from self._decoder.decode(packet)

    def _displayed(self, frame: av.VideoFrame) -> Frame:
        """Return a frame's pixels as displayed. Raises MediaMismatch if its size contradicts the header."""
        header = self._header
        swapped = header.rotation in (90, 270)
        size = (header.height, header.width) if swapped else (header.width, header.height)
        if (frame.width, frame.height) != size:
            raise MediaMismatch(
                f"the {header.format} video has a frame of {frame.width} by {frame.height} pixels; its header says "
                f"{size[0]} by {size[1]}"
            )
        if frame.is_corrupt:
            raise UnsupportedMedia(f"the {header.format} video is damaged: a frame can't be decoded")
        pixels: Frame = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
        turned = np.rot90(pixels, -header.rotation // 90) if header.rotation else pixels
        return np.ascontiguousarray(turned[:, ::-1] if header.mirrored else turned)
