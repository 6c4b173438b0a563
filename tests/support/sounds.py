"""Small audio files, made with PyAV."""

import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

CODECS = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "ogg": "libopus"}

LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 6: "5.1", 7: "6.1", 8: "7.1", 16: "hexadecagonal"}


def tone(seconds: float, rate: int, channels: int = 1, hertz: float = 440.0) -> NDArray[np.float32]:
    """Return a tone of changing loudness, different in each channel, of shape (channels, samples)."""
    time = np.arange(round(seconds * rate)) / rate
    loudness = 0.3 + 0.2 * np.sin(2 * np.pi * 3 * time)
    waves = [loudness * np.sin(2 * np.pi * hertz * time) / (1 + channel) for channel in range(channels)]
    return np.stack(waves).astype(np.float32)


def sound(
    container: str = "wav",
    samples: NDArray[np.float32] | None = None,
    rate: int = 16_000,
    codec: str = "",
    options: dict[str, str] | None = None,
) -> bytes:
    """Return an audio file of samples of shape (channels, samples). ``options`` are the container's."""
    samples = tone(1.0, rate) if samples is None else samples
    out = io.BytesIO()
    with av.open(out, "w", format=container, options=options or {}) as file:
        for packet in track(file, samples, rate, codec or CODECS[container]):
            file.mux(packet)
    return out.getvalue()


def decoded(data: bytes, container: str | None = None) -> tuple[NDArray[np.float32], int]:
    """Return the channels' mean of the whole file, as PyAV decodes it, and its sample rate. Packets that can't be
    decoded are left out."""
    pieces = []
    with av.open(io.BytesIO(data), "r", format=container) as file:
        stream = file.streams.audio[0]
        if channels := stream.codec_context.channels:
            stream.codec_context.layout = f"{channels} channels"  # PyAV frees a file's own layout twice
        for packet in file.demux(stream):
            try:
                frames = packet.decode()
            except av.error.FFmpegError:
                continue
            pieces += [
                one.to_ndarray().reshape(-1, one.layout.nb_channels).mean(axis=1)
                for frame in frames
                for one in av.AudioResampler("flt").resample(frame)
            ]
        return np.concatenate(pieces), stream.codec_context.sample_rate


def track(file: Any, samples: NDArray[np.float32], rate: int, codec: str) -> Iterator[Any]:
    """Add an audio track to an open file and return its packets."""
    layout = LAYOUTS[len(samples)]
    stream: Any = file.add_stream(codec, rate=rate, options={"strict": "-2"})
    stream.layout = layout
    stream.codec_context.open()
    size = stream.codec_context.frame_size or 4096
    resampler = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate, frame_size=size)
    # packed, because PyAV reads beyond the planes of eight channels
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T).reshape(1, -1), format="flt", layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    made = [*resampler.resample(frame), *resampler.resample(None), None]
    return (packet for one in made for packet in stream.encode(one))
