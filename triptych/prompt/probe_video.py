"""Reads a video's size, frame count and frame rate, and its audio track's length, from its container, without decoding
anything.

Runs in the frontend on untrusted bytes, so it parses only the few fields that it needs, and raises only MediaError.
False information in a header is detected when the file is decoded.
"""

import math
import struct

from triptych.errors import BadMediaSize, TruncatedMedia, UnsupportedMedia
from triptych.media import frames
from triptych.prompt.containers.gif import probe_gif
from triptych.prompt.containers.known import described
from triptych.prompt.containers.mp4 import probe_mp4, probe_mp4_audio_track
from triptych.prompt.containers.webm import probe_webm, probe_webm_audio_track
from triptych.prompt.probe import probe_image
from triptych.types import AudioHeader, VideoHeader

_MAX_RATE = 1000.0

_EBML_MAGIC = b"\x1a\x45\xdf\xa3"
_MP4_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp"})


def probe_video(data: bytes) -> VideoHeader:
    """Return the header of an MP4 (QuickTime), WebM (Matroska) or animated GIF file, or of packed frames.

    Raises UnsupportedMedia for anything else, TruncatedMedia for a header that ends early, and BadMediaSize for sides
    without pixels. No bytes raise any other exception.
    """
    try:
        header = _probe(data)
    except (struct.error, IndexError):
        raise TruncatedMedia("the video ends within its header") from None
    if header.width < 1 or header.height < 1:
        raise BadMediaSize(f"the {header.format} video is {header.width} by {header.height} pixels")
    if not math.isfinite(header.rate) or not 0 < header.rate <= _MAX_RATE:
        raise UnsupportedMedia(f"the {header.format} video says that it has {header.rate:g} frames per second")
    return header


def is_video(data: bytes) -> bool:
    """Whether the container is one that video and sound may be in."""
    return data[4:8] in _MP4_BOXES or data.startswith(_EBML_MAGIC)


def probe_audio_track(data: bytes) -> AudioHeader:
    """Return the header of a video file's first audio track.

    Raises UnsupportedMedia if there is none, and otherwise as ``probe_video`` does.
    """
    try:
        if data[4:8] in _MP4_BOXES:
            return probe_mp4_audio_track(data)
        if data.startswith(_EBML_MAGIC):
            return probe_webm_audio_track(data)
    except (struct.error, IndexError):
        raise TruncatedMedia("the video ends within its header") from None
    raise UnsupportedMedia("the video has no audio track: GIFs and lists of frames have none")


def _probe(data: bytes) -> VideoHeader:
    if data[4:8] in _MP4_BOXES:
        return probe_mp4(data)
    if data.startswith(_EBML_MAGIC):
        return probe_webm(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return probe_gif(data)
    if frames.is_packed(data):
        return _probe_frames(frames.unpack_frames(data))
    if not data:
        raise TruncatedMedia("the video is empty")
    raise UnsupportedMedia(f"not an MP4, WebM or animated GIF video{described(data)}")


def _probe_frames(packed: frames.PackedFrames) -> VideoHeader:
    if not packed.frames:
        raise TruncatedMedia("the video has no frames")
    sizes = {(header.width, header.height) for header in map(probe_image, packed.frames)}
    if len(sizes) > 1:
        raise BadMediaSize("a video's frames must all have the same size")
    [(width, height)] = sizes
    return VideoHeader(frames.FORMAT, width, height, len(packed.frames), packed.rate, presampled=True)
