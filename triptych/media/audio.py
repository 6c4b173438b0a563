"""Decodes audio to one channel at the rate that a model wants. Pure: bytes in, samples out."""

import io
from collections.abc import Iterator
from contextlib import closing
from typing import TypeAlias

import av
import numpy as np
from numpy.typing import NDArray

from triptych.errors import MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.media.sound_bounds import MAX_TRACK_SAMPLES, check_sound
from triptych.media.video import DEMUXERS, OPTIONS
from triptych.types import AudioHeader

Samples: TypeAlias = NDArray[np.float32]
"""One channel, between -1 and 1."""

# Named, so that FFmpeg doesn't guess: some of its demuxers open other files.
_DEMUXERS = DEMUXERS | {"WAV": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg"}
_CODECS = frozenset({"aac", "flac", "mp3", "mp3float", "vorbis", "libvorbis", "opus", "libopus"})
_DECODING_ERRORS = (av.error.FFmpegError, ValueError, EOFError)

TOLERANCE = 0.1
"""Seconds by which what is decoded may differ from the header: encoders add silence at both ends, and not all say how
much. A difference within it is cut off or filled with silence, so that there are as many samples as were planned."""
TRACK_TOLERANCE = 0.3
"""The same of a video's audio track. WebM doesn't say how long the last block is: 0.288 s in FLAC, at 16 kHz."""


def decode_audio(data: bytes, header: AudioHeader, rate: int) -> Samples:
    """All of a file, or of a video's audio track, its channels' mean, ``header.resampled(rate)`` samples.

    Raises TruncatedMedia for a file that ends too early, MediaMismatch for one that isn't what its header says, and
    UnsupportedMedia for one that can't be decoded.
    """
    wanted = header.resampled(rate)
    tolerance = (TRACK_TOLERANCE if header.in_video else TOLERANCE) * rate
    made = np.zeros(wanted, dtype=np.float32)
    num_samples = 0
    for piece in _resampled(data, header, rate):
        kept = piece[: wanted - num_samples] if num_samples < wanted else piece[:0]
        made[num_samples : num_samples + len(kept)] = kept
        num_samples += len(piece)
        if num_samples > wanted + tolerance:
            raise MediaMismatch(f"{_named(header)} is longer than the {header.seconds:.1f} s of its header")
    if num_samples < wanted - tolerance:
        raise TruncatedMedia(f"{_named(header)} ends after {num_samples / rate:.1f} s of {header.seconds:.1f} s")
    return made


def _named(header: AudioHeader) -> str:
    return f"the {header.format} video's sound" if header.in_video else f"the {header.format} audio"


def _resampled(data: bytes, header: AudioHeader, rate: int) -> Iterator[Samples]:
    """The mean is taken before resampling: FFmpeg would weight channels, by their places in a room."""
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    for samples, rate_of_file in _decoded(data, header):
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate_of_file
        for made in resampler.resample(frame):
            yield _as_floats(made)[0]
    for made in resampler.resample(None):
        yield _as_floats(made)[0]


def _decoded(data: bytes, header: AudioHeader) -> Iterator[tuple[Samples, int]]:
    """The channels' mean, and how many samples there are a second."""
    name = _named(header)
    try:
        container = av.open(
            io.BytesIO(data),
            "r",
            format=_DEMUXERS[header.format],
            options=OPTIONS.get(header.format, {}),
            metadata_errors="ignore",
        )
    except _DECODING_ERRORS as error:
        raise UnsupportedMedia(f"{name} is damaged and can't be opened") from error
    with closing(container):
        try:
            if not container.streams.audio:
                raise UnsupportedMedia(f"the {header.format} file has no audio stream")
            stream = container.streams.audio[0]
            codec = stream.codec_context
            if codec.name not in _CODECS and not codec.name.startswith("pcm_"):
                raise UnsupportedMedia(f"{name} is encoded as {codec.name!r}, which isn't supported")
            codec.thread_count = 1
            said = None if header.in_video else (header.rate, header.channels)
            in_floats: av.AudioResampler | None = None
            for frame in container.decode(stream):
                if said is None and header.seconds * frame.sample_rate * len(frame.layout.channels) > MAX_TRACK_SAMPLES:
                    raise UnsupportedMedia(f"{name} has more than {MAX_TRACK_SAMPLES} samples")
                said = _checked(frame, said, name)
                in_floats = in_floats or av.AudioResampler("fltp", frame.layout, frame.sample_rate)
                for made in in_floats.resample(frame):
                    yield np.ascontiguousarray(_as_floats(made).mean(axis=0)), frame.sample_rate
        except _DECODING_ERRORS as error:
            raise UnsupportedMedia(f"{name} is damaged and can't be decoded") from error


def _checked(frame: av.AudioFrame, said: tuple[int, int] | None, name: str) -> tuple[int, int]:
    """How many samples a second, and channels, a frame has: as was said, if anything was."""
    rate, channels = frame.sample_rate, len(frame.layout.channels)
    if said is None:
        check_sound(rate, channels)
        return rate, channels
    if rate != said[0]:
        raise MediaMismatch(f"{name} has {rate} samples per second; its header says {said[0]}")
    if channels != said[1]:
        raise MediaMismatch(f"{name} has {channels} channels; its header says {said[1]}")
    return said


def _as_floats(frame: av.AudioFrame) -> NDArray[np.float32]:
    """float32 (channels, samples)."""
    return np.asarray(frame.to_ndarray(), dtype=np.float32)
