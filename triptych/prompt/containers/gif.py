"""Reads the number of frames of an animated GIF and their durations.

A GIF has no frame table, and its pixels come in blocks of at most 255 bytes, so walking through a large file is slow.
Instead, this searches for the graphic control extension before each frame. Its fixed bytes make accidental matches
in pixel data practically impossible; deliberate ones are detected when the frames are decoded.
"""

import re
import struct

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.types import VideoHeader

# Introducer, label and size; flags, delay (hundredths of a second) and transparent colour; end; then an image, or
# another extension, before the image.
_CONTROL = re.compile(rb"\x21\xf9\x04[\x00-\x1f](..).\x00[\x2c\x21]", re.DOTALL)
_END, _END_WITHIN = b"\x00\x3b", 256
"""The last frame's end and the trailer; some programs write a few bytes after it."""
_MIN_DELAY, _DEFAULT_DELAY = 2, 10
"""Shorter delays count as the default one, as in browsers and FFmpeg (``libavformat/gifdec.c``)."""


def probe_gif(data: bytes) -> VideoHeader:
    """Return the animation's header. Raises UnsupportedMedia for a still image, TruncatedMedia or ``struct.error``."""
    width, height = struct.unpack_from("<HH", data, 6)
    delays = [int.from_bytes(match[1], "little") for match in _CONTROL.finditer(data)]
    if not delays:
        raise UnsupportedMedia("the GIF isn't animated; send it as an image")
    if _END not in data[-_END_WITHIN:]:
        raise TruncatedMedia("the GIF ends within its pixels")
    ticks = sum(delay if delay >= _MIN_DELAY else _DEFAULT_DELAY for delay in delays)
    return VideoHeader("GIF", width, height, frames=len(delays), rate=100 * len(delays) / ticks)
