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
    container: str = "wav", samples: NDArray[np.float32] | None = None, rate: int = 16_000, codec: str = ""
) -> bytes:
    """Return an audio file of samples of shape (channels, samples)."""
    samples = tone(1.0, rate) if samples is None else samples
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        for packet in track(file, samples, rate, codec or CODECS[container]):
            file.mux(packet)
    return out.getvalue()


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
