"""Decodes the frames of a video that are wanted, and as few of the others as can be. Pure: bytes in, frames out.

The packets are read first, all of them, which costs little beside decoding: they say when each frame is shown and from
which ones on decoding can begin. Then only the runs of packets that lead to a wanted frame are decoded, and of these
the frames that neither are wanted nor needed by others are left out.
"""

import bisect
import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream
from numpy.typing import NDArray

from triptych.errors import MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.types import VideoHeader

Frame = NDArray[np.uint8]
"""RGB, of shape (height, width, 3), as displayed."""

_Packet: TypeAlias = "av.Packet[VideoStream]"

# Named, so that FFmpeg doesn't guess: some of its demuxers open other files.
DEMUXERS = {"MP4": "mp4", "WebM": "matroska", "GIF": "gif"}
OPTIONS = {"MP4": {"ignore_editlist": "1"}}  # what is stored counts, as in the header
_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9", "gif"})

_DECODING_ERRORS = (av.error.FFmpegError, ValueError, EOFError)


@dataclass(frozen=True)
class _Packets:
    """A stream's packets in the order of decoding. ``shown`` are the times at which frames are shown, in order and in
    ticks, and ``keys`` those of the packets (with their index) that decoding can begin with."""

    packets: list[_Packet]
    shown: list[int]
    keys: list[tuple[int, int]]
    seconds_per_tick: float
    last_duration: int


def decode_frames(data: bytes, header: VideoHeader, numbers: Sequence[int]) -> Iterator[Frame]:
    """The frames of these numbers (as in ``ItemPlan.frames``: in order, perhaps with repetitions), one by one.

    Raises TruncatedMedia for a file that ends too early, MediaMismatch for one that isn't what its header says, and
    UnsupportedMedia for one that can't be decoded.
    """
    name = header.format
    try:
        container = av.open(
            io.BytesIO(data), "r", format=DEMUXERS[name], options=OPTIONS.get(name, {}), metadata_errors="ignore"
        )
    except _DECODING_ERRORS as error:
        raise UnsupportedMedia(f"the {name} video is damaged and can't be opened") from error
    with closing(container):
        try:
            packets = _read_packets(container, name)
            decoder = container.streams.video[0].codec_context
            # those that are larger than the header says are refused; decoders round up to whole blocks
            decoder.options = {"max_pixels": str((header.width + 128) * (header.height + 128))}
            yield from _Decoding(decoder, packets, header).frames(_wanted(packets, header, numbers))
        except _DECODING_ERRORS as error:
            raise UnsupportedMedia(f"the {name} video is damaged and can't be decoded") from error


def _read_packets(container: InputContainer, name: str) -> _Packets:
    if not container.streams.video:
        raise UnsupportedMedia(f"the {name} file has no video stream")
    stream = container.streams.video[0]
    codec = stream.codec_context
    if codec.name not in _CODECS:
        raise UnsupportedMedia(f"the {name} video is encoded as {codec.name!r}, which isn't supported")
    codec.thread_count = 1  # instances say how many threads there are; decoding in frame threads delays, too
    packets = [packet for packet in container.demux(stream) if packet.size and packet.pts is not None]
    if not packets or stream.time_base is None:
        raise TruncatedMedia(f"the {name} video has no frames")
    if packets[-1].is_corrupt:
        raise TruncatedMedia(f"the {name} video ends within a frame")
    return _Packets(
        packets=packets,
        shown=sorted(_time(packet) for packet in packets),
        keys=sorted((_time(packet), index) for index, packet in enumerate(packets) if packet.is_keyframe),
        seconds_per_tick=float(stream.time_base),
        last_duration=max(packets, key=_time).duration or 0,
    )


def _time(packet: _Packet) -> int:
    assert packet.pts is not None
    return packet.pts


def _wanted(packets: _Packets, header: VideoHeader, numbers: Sequence[int]) -> list[int]:
    """When the frames of these numbers are shown, in ticks."""
    shown = packets.shown
    if header.counted:
        if len(shown) < header.frames:
            raise TruncatedMedia(
                f"the {header.format} video has {len(shown)} of the {header.frames} frames it promises"
            )
        if len(shown) > header.frames:
            raise MediaMismatch(f"the {header.format} video has {len(shown)} frames; its header says {header.frames}")
        return [shown[number] for number in numbers]
    # Where frames have times only, what counts is which is shown when frame so-and-so would be at an even rate.
    ticks_per_frame = 1 / (header.rate * packets.seconds_per_tick)
    times = [shown[0] + number * ticks_per_frame for number in numbers]
    if times[-1] > shown[-1] + max(1.5 * ticks_per_frame, packets.last_duration):
        raise TruncatedMedia(
            f"the {header.format} video ends after {(shown[-1] - shown[0]) * packets.seconds_per_tick:.1f} s; "
            f"its header says {header.seconds:.1f} s"
        )
    return [shown[max(0, bisect.bisect_right(shown, time + ticks_per_frame / 2) - 1)] for time in times]


class _Decoding:
    """A decoder and where it stands: the next packet it gets."""

    def __init__(self, decoder: VideoCodecContext, packets: _Packets, header: VideoHeader) -> None:
        self._decoder = decoder
        self._packets = packets
        self._header = header
        self._next = 0
        self._began = False
        self._ready: Iterator[av.VideoFrame] = iter(())

    def frames(self, wanted: Sequence[int]) -> Iterator[Frame]:
        """The frames that are shown at these times, which are in order."""
        times = frozenset(wanted)
        for time, same in itertools.groupby(wanted):
            frame = self._frame(time, times)
            for _ in same:
                yield frame

    def _frame(self, time: int, wanted: frozenset[int]) -> Frame:
        self._go_to(time)
        for frame in self._ready:
            if frame.pts == time:
                return self._displayed(frame)
        for frame in self._decode(wanted):
            if frame.pts == time:
                return self._displayed(frame)
        raise UnsupportedMedia(f"the {self._header.format} video is damaged: a frame can't be decoded")

    def _go_to(self, time: int) -> None:
        """Skips to the last packet from which the frame can be decoded, if the decoder isn't beyond it."""
        keys = self._packets.keys
        place = bisect.bisect_right(keys, time, key=lambda key: key[0]) - 1
        first = keys[place][1] if place >= 0 else 0
        if not self._began or first > self._next:
            if self._began:
                self._decoder.flush_buffers()
            self._began = True
            self._next = first
            self._ready = iter(())

    def _decode(self, wanted: frozenset[int]) -> Iterator[av.VideoFrame]:
        """Goes on decoding; what a packet yields beyond the frame that was waited for is kept."""
        packets = self._packets.packets
        while self._next <= len(packets):
            packet = packets[self._next] if self._next < len(packets) else None
            self._next += 1
            is_wanted = packet is None or packet.pts in wanted
            self._decoder.skip_frame = "DEFAULT" if is_wanted else "NONREF"
            self._ready = iter(self._decoder.decode(packet))
            yield from self._ready

    def _displayed(self, frame: av.VideoFrame) -> Frame:
        header = self._header
        turned = header.rotation in (90, 270)
        size = (header.height, header.width) if turned else (header.width, header.height)
        if (frame.width, frame.height) != size:
            raise MediaMismatch(
                f"the {header.format} video has a frame of {frame.width} by {frame.height} pixels; its header says "
                f"{size[0]} by {size[1]}"
            )
        if frame.is_corrupt:
            raise UnsupportedMedia(f"the {header.format} video is damaged: a frame can't be decoded")
        pixels: Frame = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
        return np.ascontiguousarray(np.rot90(pixels, -header.rotation // 90)) if header.rotation else pixels
