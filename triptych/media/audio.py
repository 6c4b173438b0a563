"""Decodes audio to mono at the sample rate of a model. Pure: bytes in, samples out."""

import io
import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any, TypeAlias

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.fifo import AudioFifo
from av.container import InputContainer
from numpy.typing import NDArray

from triptych.errors import MediaMismatch, TruncatedMedia, UnsupportedMedia
from triptych.media.sound_bounds import MAX_TRACK_SAMPLES, check_sound
from triptych.media.sound_tags import behind_tags
from triptych.types import AudioHeader

Samples: TypeAlias = NDArray[np.float32]
"""One channel, between -1 and 1."""

# Explicit demuxers, because some of those that FFmpeg might guess open other files.
_DEMUXERS = {
    "WAV": "wav",
    "W64": "w64",
    "AIFF": "aiff",
    "AU": "au",
    "CAF": "caf",
    "FLAC": "flac",
    "OGG": "ogg",
    "MP3": "mp3",
    "AAC": "aac",
    "AC-3": "ac3",
    "E-AC-3": "eac3",
    "DTS": "dts",
    "AMR": "amr",
    "MP4": "mp4",
    "WebM": "matroska",
}
_CODECS = frozenset(
    {
        *(
            "aac",
            "alac",
            "flac",
            "mp1",
            "mp1float",
            "mp2",
            "mp2float",
            "mp3",
            "mp3float",
            "vorbis",
            "opus",
            "libopus",
            "speex",
        ),
        *("ac3", "eac3", "dca", "amrnb", "amrwb", "libopencore_amrnb", "libopencore_amrwb", "gsm", "gsm_ms"),
        *("adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt", "adpcm_yamaha", "g722", "g726"),
    }
)
_DECODING_ERRORS = (av.error.FFmpegError, ValueError, EOFError)

_OPTIONS = {"WAV": {"max_size": str(3 << 12), "max_probe_packets": "1"}}
"""FFmpeg searches each packet of uncompressed WAV for other codecs until it has seen many, which takes longer than
to decode them. One packet of several frames is enough to find them."""

_BLOCK = 1 << 15
"""Samples of each channel that are averaged and resampled at a time."""
_MANY_PLANES = 8

_LOUDEST = 2.0**31
"""Some files have samples of 32 bits as floating-point numbers. Features of much larger ones would be infinite."""

TOLERANCE = 0.1
"""Seconds by which the decoded length may differ from the header's, because encoders add silence and don't always
declare it. The samples are cut or padded with silence to the planned length."""
TRACK_TOLERANCE = 0.3
"""The same for sound in containers of video. It is larger because WebM doesn't declare the length of the last block."""
_TRACKS = frozenset({"MP4", "WebM"})


def decode_audio(data: bytes, header: AudioHeader, rate: int) -> Samples:
    """Decode an audio file, or a video's audio track, to the mean of its channels: ``header.resampled(rate)`` samples.

    Raises TruncatedMedia for a file that ends too early, MediaMismatch for one that contradicts its header, and
    UnsupportedMedia for one that can't be decoded.
    """
    try:
        return _decode(data, header, rate)
    except _DECODING_ERRORS as error:
        raise UnsupportedMedia(f"{_named(header)} is damaged and can't be decoded") from error


def _decode(data: bytes, header: AudioHeader, rate: int) -> Samples:
    planned = header.resampled(rate)
    tolerance = (TRACK_TOLERANCE if header.format in _TRACKS else TOLERANCE) * rate
    made = np.zeros(planned, dtype=np.float32)
    num_samples = 0
    errors: list[Exception] = []
    for piece in _resampled(_decoded(data, header, errors), rate, header):
        kept = piece[: planned - num_samples] if num_samples < planned else piece[:0]
        made[num_samples : num_samples + len(kept)] = kept
        num_samples += len(piece)
        if num_samples > planned + tolerance:
            raise MediaMismatch(f"{_named(header)} is longer than the {header.seconds:.1f} s of its header")
    if num_samples < planned - tolerance:
        if errors:
            raise UnsupportedMedia(f"{_named(header)} is damaged and can't be decoded") from errors[0]
        raise TruncatedMedia(f"{_named(header)} ends after {num_samples / rate:.1f} s of {header.seconds:.1f} s")
    if not np.abs(made).max(initial=0) <= _LOUDEST:
        raise UnsupportedMedia(f"{_named(header)} has samples that aren't numbers or are far too large")
    return made


def _named(header: AudioHeader) -> str:
    return f"the {header.format} video's sound" if header.in_video else f"the {header.format} audio"


def _resampled(frames: Iterator[av.AudioFrame], rate: int, header: AudioHeader) -> Iterator[Samples]:
    """Yield resampled mono samples."""
    for rate_of_file, blocks in itertools.groupby(_averaged(frames, header), lambda block: block[1]):
        if rate_of_file == rate:
            yield from (samples for samples, _ in blocks)
            continue
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
        for samples, _ in blocks:
            frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
            frame.sample_rate = rate_of_file
            for made in resampler.resample(frame):
                yield made.to_ndarray()[0]
        for made in resampler.resample(None):
            yield made.to_ndarray()[0]


def _averaged(frames: Iterator[av.AudioFrame], header: AudioHeader) -> Iterator[tuple[Samples, int]]:
    """Yield the channels' mean in blocks, with their sample rate. FFmpeg's downmix would weight the channels. Their
    number and the rate may change between frames."""
    for (_, channels, rate), run in itertools.groupby(frames, _shape):
        check_sound(rate, channels)
        if header.seconds * rate * channels > MAX_TRACK_SAMPLES:
            raise UnsupportedMedia(f"{_named(header)} has more than {MAX_TRACK_SAMPLES} samples")
        joined = AudioFifo()
        for frame in _readable(run, channels):
            frame.pts = None  # samples follow one another, whatever their times are
            joined.write(frame)
            if joined.samples >= _BLOCK and (block := joined.read()):
                yield _mean(block), rate
        if block := joined.read():
            yield _mean(block), rate


def _shape(frame: av.AudioFrame) -> tuple[str, int, int]:
    """Return what frames must have in common to be joined."""
    return frame.format.name, frame.layout.nb_channels, frame.sample_rate


def _readable(frames: Iterator[av.AudioFrame], channels: int) -> Iterator[av.AudioFrame]:
    """Return frames whose planes PyAV can read: it looks for the pointer behind the last, and would crash at eight."""
    return frames if channels < _MANY_PLANES else (packed for frame in frames for packed in _packed(frame))


def _packed(frame: av.AudioFrame) -> list[av.AudioFrame]:
    """Return a frame in one plane."""
    return av.AudioResampler(frame.format.packed.name).resample(frame) if frame.format.is_planar else [frame]


@np.errstate(over="ignore", invalid="ignore")
def _mean(frame: av.AudioFrame) -> Samples:
    """Return the mean of a frame's channels."""
    channels, samples = frame.layout.nb_channels, frame.to_ndarray()
    columns = samples.reshape(-1, channels).T if frame.format.is_packed else samples
    total = _floats(columns[0])
    for column in columns[1:]:
        total += _floats(column)
    if channels > 1:
        total /= np.float32(channels)
    return total


def _floats(values: NDArray[Any]) -> Samples:
    """Return new samples between -1 and 1, converted as FFmpeg does."""
    if values.dtype.kind == "f":
        return np.array(values, np.float32)
    floats: Samples = np.multiply(
        values, np.float32(2.0 ** (1 - 8 * values.dtype.itemsize)), dtype=np.float32, casting="unsafe"
    )
    if values.dtype.kind == "u":
        floats -= np.float32(1)
    return floats


def _decoded(data: bytes, header: AudioHeader, errors: list[Exception]) -> Iterator[av.AudioFrame]:
    """Yield the decoded frames. Packets that can't be decoded are left out, and the errors are added to ``errors``:
    the length decides whether enough is left."""
    name = _named(header)
    try:
        container = av.open(
            io.BytesIO(data[behind_tags(data) :]),
            "r",
            format=_DEMUXERS[header.format],
            options=_OPTIONS.get(header.format, {}),
            metadata_errors="ignore",
        )
    except _DECODING_ERRORS as error:
        raise UnsupportedMedia(f"{name} is damaged and can't be opened") from error
    with closing(container):
        if not container.streams.audio:
            raise UnsupportedMedia(f"the {header.format} file has no audio stream")
        stream = container.streams.audio[0]
        codec: AudioCodecContext | None = stream.codec_context
        if codec is None:
            raise UnsupportedMedia(f"{name} is encoded in an unknown way, which isn't supported")
        if codec.name not in _CODECS and not codec.name.startswith("pcm_"):
            raise UnsupportedMedia(f"{name} is encoded as {codec.name!r}, which isn't supported")
        codec.thread_count = 1
        # PyAV frees a layout of a file's own order as often as it is read; only the number of channels matters
        if channels := codec.channels:
            codec.layout = f"{channels} channels"
        yield from _frames(container, stream, errors)


def _frames(container: InputContainer, stream: av.AudioStream, errors: list[Exception]) -> Iterator[av.AudioFrame]:
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
            if packet is None:
                return
        except _DECODING_ERRORS as error:
            errors.append(error)
            return
        try:
            yield from packet.decode()
        except _DECODING_ERRORS as error:
            errors.append(error)
