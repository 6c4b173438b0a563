"""Reads the size and orientation of the image in an AVIF file (ISO/IEC 23008-12, MIAF and AVIF), as libavif does.

Of a sequence the first frame counts. Cropping (``clap``) isn't applied, as in Pillow.

Untrusted bytes: every loop advances and is bounded. Only MediaError and ``struct.error`` are raised; the latter means
that the file is truncated.
"""

import struct
from collections.abc import Iterator

from triptych.errors import TruncatedMedia, UnsupportedMedia
from triptych.prompt.orientation import xmp_orientation

_BRANDS = frozenset({b"avif", b"avis"})
_CONTAINER_BRANDS = frozenset({b"mif1", b"msf1"})
_MAX_BOXES = 4096
"""Limit on the boxes of one parent, and on the items that have properties."""


def is_avif(data: bytes) -> bool:
    """Whether Pillow takes the file for an AVIF image."""
    if data[4:8] != b"ftyp":
        return False
    length = int.from_bytes(data[:4], "big")
    others = {data[start : start + 4] for start in range(16, min(length, 16 + 4 * _MAX_BOXES), 4)}
    return data[8:12] in _BRANDS or (data[8:12] in _CONTAINER_BRANDS and bool(others & _BRANDS))


def avif_size(data: bytes) -> tuple[int, int]:
    """Return the displayed width and height. Raises UnsupportedMedia, TruncatedMedia or ``struct.error``."""
    places = {kind: (start, end) for kind, start, end in reversed(list(_boxes(data, 0, len(data))))}
    brand = data[8:12]
    if brand == b"avis" or (brand not in _BRANDS and b"moov" in places):
        return _track_size(data, places.get(b"moov"))
    if b"meta" not in places:
        raise TruncatedMedia("the AVIF image ends before its header (no meta box)")
    return _item_size(data, places[b"meta"])


def _item_size(data: bytes, meta: tuple[int, int]) -> tuple[int, int]:
    found = {kind: (start, end) for kind, start, end in reversed(list(_boxes(data, meta[0] + 4, meta[1])))}
    if b"pitm" not in found or b"iprp" not in found:
        raise UnsupportedMedia("the AVIF image has no primary item")
    at = found[b"pitm"][0]
    (primary,) = struct.unpack_from(">L" if data[at] else ">H", data, at + 4)
    properties: list[tuple[bytes, int, int]] = []
    numbers: list[int] = []
    for kind, start, end in _boxes(data, *found[b"iprp"]):
        if kind == b"ipco":
            properties = list(_boxes(data, start, end))
        elif kind == b"ipma" and not numbers:
            numbers = _properties_of(data, start, primary)
    size: tuple[int, int] | None = None
    turned = swapped = False
    for number in numbers:
        if not 1 <= number <= len(properties):
            continue
        kind, start, _ = properties[number - 1]
        if kind == b"ispe" and size is None:
            size = struct.unpack_from(">LL", data, start + 4)
        elif kind == b"irot":
            turned, swapped = turned or bool(data[start] & 3), bool(data[start] & 1)
        elif kind == b"imir":
            turned = True
    if size is None:
        raise UnsupportedMedia("the AVIF image has no size")
    if not turned and not _has_exif(data, found.get(b"iinf")):
        # Pillow falls back to the orientation in XMP, which is stored as text
        orientation = xmp_orientation(data)
        swapped = orientation is not None and 5 <= orientation <= 8
    return size[::-1] if swapped else size


def _has_exif(data: bytes, infos: tuple[int, int] | None) -> bool:
    return infos is not None and data.find(b"Exif\x00", *infos) >= 0


def _properties_of(data: bytes, start: int, item: int) -> list[int]:
    """Return the numbers of an item's properties from an ``ipma`` box."""
    version, flags, entries = struct.unpack_from(">B2xBL", data, start)
    position = start + 8
    for _ in range(min(entries, _MAX_BOXES)):
        number, count = struct.unpack_from(">LB" if version else ">HB", data, position)
        position += 5 if version else 3
        if number == item:
            if flags & 1:
                return [value & 0x7FFF for value in struct.unpack_from(f">{count}H", data, position)]
            return [value & 0x7F for value in struct.unpack_from(f">{count}B", data, position)]
        position += count * (2 if flags & 1 else 1)
    return []


def _track_size(data: bytes, movie: tuple[int, int] | None) -> tuple[int, int]:
    for kind, start, end in _boxes(data, *(movie or (0, 0))):
        if kind == b"trak":
            for inner, place, _ in _boxes(data, start, end):
                if inner == b"tkhd":
                    width, height = struct.unpack_from(">LL", data, place + (88 if data[place] == 1 else 76))
                    return width >> 16, height >> 16
    raise TruncatedMedia("the AVIF image ends before its header (no track)")


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of each box's content, cut at ``end``."""
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        length, kind = struct.unpack_from(">L4s", data, start)
        content = start + 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", data, content)
            content += 8
        box_end = start + length if length else end
        if box_end < content:
            raise UnsupportedMedia("the AVIF image has a box of impossible size")
        yield kind, content, min(box_end, end)
        start = box_end
    raise UnsupportedMedia(f"the AVIF image has more than {_MAX_BOXES} boxes")
