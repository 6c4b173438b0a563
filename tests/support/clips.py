"""Small video files, made with PyAV."""

import io
import tempfile
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.sounds import track
from triptych.media import frames as packed_frames

CODECS = {"mp4": "libx264", "webm": "libvpx-vp9", "gif": "gif"}
SOUND_CODECS = {"mp4": "aac", "mov": "pcm_s16le", "webm": "libopus", "matroska": "flac"}


def picture(number: int, width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """A unique frame of shape (height, width, 3)."""
    blocks = np.random.default_rng([seed, number]).integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), np.uint8)
    return np.kron(blocks, np.ones((16, 16, 1), dtype=np.uint8))[:height, :width]


def clip(
    container: str = "mp4",
    *,
    frames: int = 12,
    width: int = 96,
    height: int = 64,
    rate: int | Fraction = 10,
    seed: int = 0,
    codec: str | None = None,
    codec_options: dict[str, str] | None = None,
    options: dict[str, str] | None = None,
    times: list[int] | None = None,
    sound: NDArray[np.float32] | None = None,
    sound_rate: int = 48_000,
    sound_codec: str | None = None,
) -> bytes:
    """Return a video file. ``times`` are the frames' times in milliseconds, if the rate varies. ``sound`` is the audio
    track, of shape (channels, samples)."""
    codec = codec or CODECS[container]
    extra = {"libx264": {"preset": "ultrafast", "bf": "2", "g": "6"}, "libvpx-vp9": {"cpu-used": "8", "g": "6"}}
    # a file, since moving the header to the front reads what was written before
    out = tempfile.NamedTemporaryFile(suffix=f".{container}")  # noqa: SIM115 - read below
    with av.open(out.name, "w", format=container, options=options or {}) as file:
        stream: Any = file.add_stream(codec, rate=rate, options={**extra.get(codec, {}), **(codec_options or {})})
        stream.width, stream.height = width, height
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.thread_count = 1
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        sound_codec = sound_codec or SOUND_CODECS.get(container, "")
        packets = track(file, sound, sound_rate, sound_codec) if sound is not None else ()
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, width, height, seed), format="rgb24")
            frame = frame.reformat(format=stream.pix_fmt)
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        for packet in packets:
            file.mux(packet)
    with out:
        return out.read()


def sound_only() -> bytes:
    """An MP4 file without a video track."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream: Any = file.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def all_frames(data: bytes) -> list[NDArray[np.uint8]]:
    """Return every frame, decoded from the start."""
    with av.open(io.BytesIO(data), "r") as file:
        return [np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in file.decode(video=0)]


def packed(pixels: NDArray[Any]) -> bytes:
    """Return frames of shape (frames, height, width, 3) as an uncompressed list of images, two a second."""
    files = []
    for frame in pixels:
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "PNG", compress_level=0)
        files.append(out.getvalue())
    return packed_frames.pack_frames(packed_frames.PackedFrames(2.0, files))
