"""Decodes audio to one channel at the rate that a model wants. Pure: bytes in, samples out."""

import io
from collections.abc import Iterator
from contextlib import closing
from typing import TypeAlias

import av
import numpy as np
from numpy.typing import NDArray

from triptych.errors import MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.types import AudioHeader

Samples: TypeAlias = NDArray[np.float32]
"""One channel, between -1 and 1."""

# Named, so that FFmpeg doesn't guess: some of its demuxers open other files.
_DEMUXERS = {"WAV": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg"}
_CODECS = frozenset({"flac", "mp3", "mp3float", "vorbis", "libvorbis", "opus", "libopus"})
_DECODING_ERRORS = (av.error.FFmpegError, ValueError, EOFError)

TOLERANCE = 0.1
"""Seconds by which what is decoded may differ from the header: encoders add silence at both ends, and not all say how
much. A difference within it is cut off or filled with silence, so that there are as many samples as were planned."""


def decode_audio(data: bytes, header: AudioHeader, rate: int) -> Samples:
    """All of a file, its channels' mean, ``header.resampled(rate)`` samples.

    Raises TruncatedMedia for a file that ends too early, MediaMismatch for one that isn't what its header says, and
    UnsupportedMedia for one that can't be decoded.
    """
    wanted = header.resampled(rate)
    made = np.zeros(wanted, dtype=np.float32)
    num_samples = 0
    for piece in _resampled(data, header, rate):
        kept = piece[: wanted - num_samples] if num_samples < wanted else piece[:0]
        made[num_samples : num_samples + len(kept)] = kept
        num_samples += len(piece)
        if num_samples > wanted + TOLERANCE * rate:
            raise MediaMismatch(f"the {header.format} audio is longer than the {header.seconds:.1f} s of its header")
    if num_samples < wanted - TOLERANCE * rate:
        raise TruncatedMedia(
            f"the {header.format} audio ends after {num_samples / rate:.1f} s of {header.seconds:.1f} s"
        )
    return made


def _resampled(data: bytes, header: AudioHeader, rate: int) -> Iterator[Samples]:
    """The mean is taken before resampling: FFmpeg would weight channels, by their places in a room."""
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    for samples in _decoded(data, header):
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = header.rate
        for made in resampler.resample(frame):
            yield _as_floats(made)[0]
    for made in resampler.resample(None):
        yield _as_floats(made)[0]


def _decoded(data: bytes, header: AudioHeader) -> Iterator[Samples]:
    name = header.format
    try:
        container = av.open(io.BytesIO(data), "r", format=_DEMUXERS[name], metadata_errors="ignore")
    except _DECODING_ERRORS as error:
        raise UnsupportedMedia(f"the {name} audio is damaged and can't be opened") from error
    with closing(container):
        try:
            if not container.streams.audio:
                raise UnsupportedMedia(f"the {name} file has no audio stream")
            stream = container.streams.audio[0]
            codec = stream.codec_context
            if codec.name not in _CODECS and not codec.name.startswith("pcm_"):
                raise UnsupportedMedia(f"the {name} audio is encoded as {codec.name!r}, which isn't supported")
            codec.thread_count = 1
            in_floats: av.AudioResampler | None = None
            for frame in container.decode(stream):
                if frame.sample_rate != header.rate:
                    raise MediaMismatch(
                        f"the {name} audio has {frame.sample_rate} samples per second; its header says {header.rate}"
                    )
                if len(frame.layout.channels) != header.channels:
                    raise MediaMismatch(
                        f"the {name} audio has {len(frame.layout.channels)} channels; its header says {header.channels}"
                    )
                in_floats = in_floats or av.AudioResampler("fltp", frame.layout, header.rate)
                for made in in_floats.resample(frame):
                    yield np.ascontiguousarray(_as_floats(made).mean(axis=0))
        except _DECODING_ERRORS as error:
            raise UnsupportedMedia(f"the {name} audio is damaged and can't be decoded") from error


def _as_floats(frame: av.AudioFrame) -> NDArray[np.float32]:
    """float32 (channels, samples)."""
    return np.asarray(frame.to_ndarray(), dtype=np.float32)
