"""Decodes selected frames of a video, and as few others as possible. Pure: bytes in, frames out.

First all packets are read, which is cheap compared with decoding. They give each frame's presentation time, and the
keyframes at which decoding can start. Then only the runs of packets that lead to a selected frame are decoded. Within
these, frames that are neither selected nor referenced by others are skipped.
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
"""RGB of shape (height, width, 3), as displayed."""

_Packet: TypeAlias = "av.Packet[VideoStream]"

# Explicit demuxers, because some of those that FFmpeg might guess open other files.
DEMUXERS = {"MP4": "mp4", "WebM": "matroska", "GIF": "gif"}
OPTIONS = {"MP4": {"ignore_editlist": "1"}}  # stored frames count, as in the header
_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9", "gif"})

_DECODING_ERRORS = (av.error.FFmpegError, ValueError, EOFError)


@dataclass(frozen=True)
class _Packets:
    """The packets of a video stream. Times are in ticks."""

    packets: list[_Packet]
    """In decoding order."""
    times: list[int]
    """Presentation times of the frames, sorted."""
    keyframes: list[tuple[int, int]]
    """Presentation time and packet index of each keyframe, sorted."""
    seconds_per_tick: float
    last_duration: int


def decode_frames(data: bytes, header: VideoHeader, numbers: Sequence[int]) -> Iterator[Frame]:
    """Yield the frames with these numbers, which are sorted and may repeat, as in ``sampled_frames``.

    Raises TruncatedMedia for a file that ends too early, MediaMismatch for one that contradicts its header, and
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
            # frames larger than in the header are rejected; the margin is for decoders, which round up to whole blocks
            decoder.options = {"max_pixels": str((header.width + 128) * (header.height + 128))}
            yield from FrameDecoder(decoder, packets, header).frames(_times_of(packets, header, numbers))
        except _DECODING_ERRORS as error:
            raise UnsupportedMedia(f"the {name} video is damaged and can't be decoded") from error


def _read_packets(container: InputContainer, name: str) -> _Packets:
    if not container.streams.video:
        raise UnsupportedMedia(f"the {name} file has no video stream")
    stream = container.streams.video[0]
    codec = stream.codec_context
    if codec.name not in _CODECS:
        raise UnsupportedMedia(f"the {name} video is encoded as {codec.name!r}, which isn't supported")
    codec.thread_count = 1  # instances control the number of threads; frame threads also add latency
    packets = [packet for packet in container.demux(stream) if packet.size and packet.pts is not None]
    if not packets or stream.time_base is None:
        raise TruncatedMedia(f"the {name} video has no frames")
    if packets[-1].is_corrupt:
        raise TruncatedMedia(f"the {name} video ends within a frame")
    return _Packets(
        packets=packets,
        times=sorted(_time(packet) for packet in packets),
        keyframes=sorted((_time(packet), index) for index, packet in enumerate(packets) if packet.is_keyframe),
        seconds_per_tick=float(stream.time_base),
        last_duration=max(packets, key=_time).duration or 0,
    )


def _time(packet: _Packet) -> int:
    assert packet.pts is not None
    return packet.pts


def _times_of(packets: _Packets, header: VideoHeader, numbers: Sequence[int]) -> list[int]:
    """Return the presentation times of the frames with these numbers."""
    shown = packets.times
    if header.counted:
        if len(shown) < header.frames:
            raise TruncatedMedia(
                f"the {header.format} video has {len(shown)} of the {header.frames} frames it promises"
            )
        if len(shown) > header.frames:
            raise MediaMismatch(f"the {header.format} video has {len(shown)} frames; its header says {header.frames}")
        return [shown[number] for number in numbers]
    # Without frame counts, a number means the frame that is on display at that number's time at a constant rate.
    ticks_per_frame = 1 / (header.rate * packets.seconds_per_tick)
    times = [shown[0] + number * ticks_per_frame for number in numbers]
    if times[-1] > shown[-1] + max(1.5 * ticks_per_frame, packets.last_duration):
        raise TruncatedMedia(
            f"the {header.format} video ends after {(shown[-1] - shown[0]) * packets.seconds_per_tick:.1f} s; "
            f"its header says {header.seconds:.1f} s"
        )
    return [shown[max(0, bisect.bisect_right(shown, time + ticks_per_frame / 2) - 1)] for time in times]


class FrameDecoder:
    """A decoder and its position in the stream."""

    def __init__(self, decoder: VideoCodecContext, packets: _Packets, header: VideoHeader) -> None:
        self._decoder = decoder
        self._packets = packets
        self._header = header
        self._next = 0  # index of the next packet to decode
        self._began = False
        self._ready: Iterator[av.VideoFrame] = iter(())

    def frames(self, times: Sequence[int]) -> Iterator[Frame]:
        """Yield the frames with these presentation times, which are sorted."""
        selected = frozenset(times)
        for time, same in itertools.groupby(times):
            frame = self._frame(time, selected)
            for _ in same:
                yield frame

    def _frame(self, time: int, selected: frozenset[int]) -> Frame:
        self._seek(time)
        for frame in self._ready:
            if frame.pts == time:
                return self._displayed(frame)
        for frame in self._decode(selected):
            if frame.pts == time:
                return self._displayed(frame)
        raise UnsupportedMedia(f"the {self._header.format} video is damaged: a frame can't be decoded")

    def _seek(self, time: int) -> None:
        """Skip to the last keyframe before a time, unless the decoder is already beyond it."""
        keyframes = self._packets.keyframes
        index = bisect.bisect_right(keyframes, time, key=lambda keyframe: keyframe[0]) - 1
        first = keyframes[index][1] if index >= 0 else 0
        if not self._began or first > self._next:
            if self._began:
                self._decoder.flush_buffers()
            self._began = True
            self._next = first
            self._ready = iter(())

    def _decode(self, selected: frozenset[int]) -> Iterator[av.VideoFrame]:
        """Decode further packets. Frames that the consumer doesn't take stay in ``_ready`` for the next call."""
        packets = self._packets.packets
        while self._next <= len(packets):
            packet = packets[self._next] if self._next < len(packets) else None
            self._next += 1
            is_selected = packet is None or packet.pts in selected
            self._decoder.skip_frame = "DEFAULT" if is_selected else "NONREF"
            self._ready = iter(self._decoder.decode(packet))
            yield from self._ready

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
        return np.ascontiguousarray(np.rot90(pixels, -header.rotation // 90)) if header.rotation else pixels
