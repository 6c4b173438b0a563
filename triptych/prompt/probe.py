"""Reads an image's format and displayed size from its header bytes.

Runs in the frontend on untrusted bytes, before anything is decoded, so it parses only the few fields that it needs.
Every loop advances and is bounded, and only MediaError is raised. If Pillow accepts the file, the size equals that of
``ImageOps.exif_transpose(Image.open(...))``, because the decoded image is checked against it.
"""

import re
import struct
import zlib
from collections.abc import Iterator

from triptych.errors import BadMediaSize, TruncatedMedia, UnsupportedMedia
from triptych.prompt.containers.avif import avif_size, is_avif
from triptych.prompt.containers.known import described
from triptych.prompt.orientation import swaps_sides
from triptych.types import ImageHeader

# A 50-megapixel PNG of incompressible 8 KiB chunks has some 20,000.
_MAX_CHUNKS = 65_536
_MAX_JPEG_JUNK = 65_536
# Pillow refuses text chunks that decompress to more.
_MAX_TEXT = 1 << 20

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_PNG_EXIF_KEYWORD = b"Raw profile type exif"
_PNG_XMP_KEYWORD = b"XML:com.adobe.xmp"

_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff])")
_JPEG_START_OF_SCAN = 0xDA
# T.81, table B.1: frame headers (with DHP), and the markers that no segment follows.
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC})
_JPEG_STANDALONE = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
# In coded pixels, 0xff is followed by 0 or is a restart marker.
_JPEG_MARKER_AMONG_PIXELS = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_END = 0xD9
_MAX_SCANS = 32
"""Limit on a JPEG's scans, each of which is decoded over all pixels. Progressive files have about ten."""
_JPEG_XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\x00"

_WEBP_EXIF_FLAG = 0x08
_WEBP_XMP_FLAG = 0x04

_GIF_EXTENSION = 0x21
_GIF_FRAME = 0x2C
_GIF_TRAILER = 0x3B

_BMP_CORE_HEADER = 12
_BMP_INFO_HEADERS = frozenset({40, 52, 56, 64, 108, 124})

_U32_TEXT = struct.Struct(">L4s")
_RIFF_CHUNK = struct.Struct("<4sL")


def probe_image(data: bytes) -> ImageHeader:
    """Return the format and displayed size of a JPEG, PNG, WebP, GIF, BMP or AVIF file, without copying it.

    Raises UnsupportedMedia for anything else, TruncatedMedia for a header that ends early, and BadMediaSize for a zero
    or negative side. No bytes raise any other exception.
    """
    try:
        name, width, height = _probe(data)
    except (struct.error, IndexError):
        raise TruncatedMedia("the image ends within its header") from None
    if width <= 0 or height <= 0:
        raise BadMediaSize(f"the {name} image is {width} by {height} pixels; both sides must be at least 1")
    return ImageHeader(format=name, width=width, height=height)


def _probe(data: bytes) -> tuple[str, int, int]:
    if data.startswith(b"\xff\xd8\xff"):
        return ("JPEG", *_jpeg_size(data))
    if data.startswith(_PNG_SIGNATURE):
        return ("PNG", *_png_size(data))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ("WEBP", *_webp_size(data))
    if data.startswith((b"GIF87a", b"GIF89a")):
        return ("GIF", *_gif_size(data))
    if data.startswith(b"BM"):
        return ("BMP", *_bmp_size(data))
    if not data:
        raise TruncatedMedia("the image is empty")
    if is_avif(data):
        return ("AVIF", *avif_size(data))
    raise UnsupportedMedia(f"not a JPEG, PNG, WebP, GIF, BMP or AVIF image{described(data)}")


def _displayed(width: int, height: int, exif: bytes | None, xmp: bytes | None) -> tuple[int, int]:
    return (height, width) if swaps_sides(exif, xmp) else (width, height)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of each segment's payload up to that of the first scan, skipping padding and junk."""
    position = 2
    for _ in range(_MAX_CHUNKS):
        match = _JPEG_MARKER.search(data, position, position + _MAX_JPEG_JUNK)
        if match is None:
            if position + _MAX_JPEG_JUNK >= len(data):
                raise TruncatedMedia("the JPEG image ends before its pixels")
            break
        marker, position = data[match.end() - 1], match.end()
        if marker < 0xC0:
            raise UnsupportedMedia("the JPEG image has an unknown marker")
        if marker in _JPEG_STANDALONE:
            continue
        (length,) = struct.unpack_from(">H", data, position)
        end = position + max(length, 2)
        if end > len(data):
            raise TruncatedMedia("the JPEG image ends within its header")
        yield marker, position + 2, end
        if marker == _JPEG_START_OF_SCAN:
            return
        position = end
    raise UnsupportedMedia("the JPEG image has no pixels within reach of its header")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    size: tuple[int, int] | None = None
    exif: list[bytes] = []
    xmp: bytes | None = None
    components = 0
    for marker, start, end in _jpeg_segments(data):
        if marker == _JPEG_START_OF_SCAN:
            # several scans, if the first one lacks components or is of a progressive file
            if end - start < 4 or data[start] < components or data[end - 3 : end] != b"\x00\x3f\x00":
                _check_scans(data, end)
        elif marker in _JPEG_FRAMES:
            if end - start < 6:
                raise UnsupportedMedia("the JPEG image has a frame header that is too short")
            height, width = struct.unpack_from(">HH", data, start + 1)
            size = width, height
            components = data[start + 5]
        elif marker == 0xE1 and data.startswith(b"Exif\x00\x00", start, end):
            # EXIF longer than a segment continues in the next one, after the same prefix.
            exif.append(data[start + 6 : end])
        elif marker == 0xE1 and data.startswith(_JPEG_XMP_PREFIX, start, end):
            xmp = data[start + len(_JPEG_XMP_PREFIX) : end]
    if size is None:
        raise UnsupportedMedia("the JPEG image has no frame header")
    return _displayed(*size, b"".join(exif) if exif else None, xmp)


def _check_scans(data: bytes, position: int) -> None:
    """Raise UnsupportedMedia if more than ``_MAX_SCANS`` follow the first one, whose pixels begin at ``position``."""
    scans = 1
    for _ in range(_MAX_CHUNKS):
        match = _JPEG_MARKER_AMONG_PIXELS.search(data, position)
        if match is None or (marker := data[match.end() - 1]) == _JPEG_END:
            return
        scans += marker == _JPEG_START_OF_SCAN
        if scans > _MAX_SCANS:
            raise UnsupportedMedia(f"the JPEG image has more than {_MAX_SCANS} scans")
        position = match.end()
        if marker not in _JPEG_STANDALONE and position + 2 <= len(data):
            position += max(int.from_bytes(data[position : position + 2], "big"), 2)
    raise UnsupportedMedia(f"the JPEG image has more than {_MAX_CHUNKS} segments")


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start, end) of each chunk after the first, until the end of the file or of what Pillow reads."""
    position, animated, pixels_seen = 33, False, False
    for _ in range(_MAX_CHUNKS):
        if position + _U32_TEXT.size > len(data):
            return
        length, kind = _U32_TEXT.unpack_from(data, position)
        start = position + _U32_TEXT.size
        # Pillow decodes one frame and stops at the next frame's control chunk.
        if kind == b"IEND" or (animated and pixels_seen and kind == b"fcTL"):
            return
        animated = animated or kind == b"acTL"
        pixels_seen = pixels_seen or kind in (b"IDAT", b"fdAT")
        yield kind, start, min(start + length, len(data))
        position = start + length + 4
    raise UnsupportedMedia(f"the PNG image has more than {_MAX_CHUNKS} chunks")


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] not in (b"IHDR", b""):
        raise UnsupportedMedia("the PNG image doesn't begin with its header chunk")
    width, height = struct.unpack_from(">LL", data, 16)
    if len(data) < 33:
        raise TruncatedMedia("the PNG image ends within its header")
    exif: bytes | None = None
    # Only the last text of each keyword counts; the others aren't decompressed.
    profile: tuple[bytes, bytes] | None = None
    xmp: tuple[bytes, bytes] | None = None
    for kind, start, end in _png_chunks(data):
        if kind == b"IHDR":
            raise UnsupportedMedia("the PNG image has two header chunks")
        if kind == b"eXIf":
            exif = data[start:end]
        elif kind in _PNG_TEXTS:
            if data.startswith(_PNG_EXIF_KEYWORD + b"\x00", start, end):
                profile = kind, data[start:end]
            elif data.startswith(_PNG_XMP_KEYWORD + b"\x00", start, end):
                xmp = kind, data[start:end]
    if exif is None and profile is not None:
        exif = _raw_profile(_png_text(*profile))
    return _displayed(width, height, exif, _png_text(*xmp) if xmp else None)


def _png_text(kind: bytes, chunk: bytes) -> bytes:
    """Return the text of a tEXt, zTXt or iTXt chunk; empty if it can't be read."""
    text = chunk.partition(b"\x00")[2]
    compressed = kind == b"zTXt" or text[:1] not in (b"\x00", b"")
    if kind == b"zTXt":
        text = text[1:]
    elif kind == b"iTXt":
        # compression flag and method, then language and translated keyword
        text = text[2:].partition(b"\x00")[2].partition(b"\x00")[2]
    else:
        compressed = False
    if not compressed:
        return text
    try:
        return zlib.decompressobj().decompress(text, _MAX_TEXT)
    except zlib.error:
        return b""


def _raw_profile(text: bytes) -> bytes:
    """Decode EXIF in a text chunk, as ImageMagick writes it: a blank line, a name, a length, then hexadecimal."""
    try:
        return bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return b""


def _webp_size(data: bytes) -> tuple[int, int]:
    kind, length = _RIFF_CHUNK.unpack_from(data, 12)
    if kind == b"VP8X":
        return _webp_extended_size(data)
    if kind not in (b"VP8 ", b"VP8L"):
        raise UnsupportedMedia("the WebP image begins with an unknown chunk")
    if 20 + length > len(data):
        raise TruncatedMedia("the WebP image ends within its pixels")
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BL", data, 20)
        if signature != 0x2F:
            raise UnsupportedMedia("the WebP image has a damaged header")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    start_code, width, height = struct.unpack_from("<3sHH", data, 23)
    if start_code != b"\x9d\x01\x2a":
        raise UnsupportedMedia("the WebP image has a damaged header")
    # The upper two bits ask the viewer to scale.
    return width & 0x3FFF, height & 0x3FFF


def _webp_extended_size(data: bytes) -> tuple[int, int]:
    flags, width, height = struct.unpack_from("<B3x3s3s", data, 20)
    (riff_length,) = struct.unpack_from("<L", data, 4)
    riff_end = 8 + riff_length
    if riff_end > len(data):
        raise TruncatedMedia("the WebP image ends within its pixels")
    wanted = {b"EXIF": flags & _WEBP_EXIF_FLAG, b"XMP ": flags & _WEBP_XMP_FLAG}
    metadata: dict[bytes, bytes] = {}
    if any(wanted.values()):
        for kind, start, end in _webp_chunks(data, riff_end):
            if wanted.get(kind):
                metadata.setdefault(kind, data[start:end])
    canvas = int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
    return _displayed(*canvas, metadata.get(b"EXIF"), metadata.get(b"XMP "))


def _webp_chunks(data: bytes, riff_end: int) -> Iterator[tuple[bytes, int, int]]:
    position = 12
    for _ in range(_MAX_CHUNKS):
        if position + _RIFF_CHUNK.size > riff_end:
            return
        kind, length = _RIFF_CHUNK.unpack_from(data, position)
        start = position + _RIFF_CHUNK.size
        yield kind, start, min(start + length, riff_end)
        position = start + length + (length & 1)
    raise UnsupportedMedia(f"the WebP image has more than {_MAX_CHUNKS} chunks")


def _gif_size(data: bytes) -> tuple[int, int]:
    """Return the size of the logical screen, enlarged if the first frame exceeds it, as in Pillow."""
    width, height, flags = struct.unpack_from("<HHB2x", data, 6)
    position = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    in_extension = False
    for _ in range(_MAX_CHUNKS):
        (byte,) = struct.unpack_from("B", data, position)
        if in_extension:
            position += 1 + byte
            in_extension = byte != 0
        elif byte == _GIF_FRAME:
            left, top, frame_width, frame_height = struct.unpack_from("<HHHHx", data, position + 1)
            return max(width, left + frame_width), max(height, top + frame_height)
        elif byte == _GIF_TRAILER:
            raise TruncatedMedia("the GIF image ends before its first frame")
        else:
            in_extension = byte == _GIF_EXTENSION
            position += 2 if in_extension else 1
    raise UnsupportedMedia("the GIF image has no frame within reach of its header")


def _bmp_size(data: bytes) -> tuple[int, int]:
    (header_bytes,) = struct.unpack_from("<L", data, 14)
    if header_bytes == _BMP_CORE_HEADER:
        width, height = struct.unpack_from("<HH", data, 18)
        return width, height
    if header_bytes not in _BMP_INFO_HEADERS:
        raise UnsupportedMedia(f"the BMP image has a header of unknown length {header_bytes}")
    width, height = struct.unpack_from("<ll", data, 18)
    # A negative height means that rows go from top to bottom.
    return width, abs(height)
