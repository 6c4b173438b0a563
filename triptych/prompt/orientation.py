"""Orientation of an image from its metadata: values 1 to 8 of the EXIF tag; 1 is upright.

Mirrors Pillow's ``Image.getexif``, quirks included, because Pillow rotates the decoded image, whose size must be the
planned one. Metadata that Pillow can't read counts as upright.
"""

import re
import struct

UPRIGHT = 1

_ORIENTATION_TAG = 274
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
# Some writers swap the two bytes of the TIFF version (42); "MM\0+" is BigTIFF, which Pillow reads as TIFF.
_BYTE_ORDERS = {
    b"MM\x00\x2a": ">",
    b"MM\x2a\x00": ">",
    b"MM\x00\x2b": ">",
    b"II\x2a\x00": "<",
    b"II\x00\x2a": "<",
}
_ENTRY_BYTES = 12
_INLINE_BYTES = 4
# Bytes per value of each TIFF type; entries of other types are skipped.
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
# SHORT, LONG, SBYTE, SSHORT, SLONG, IFD, LONG8. Floats and fractions could also equal an orientation to Pillow, but
# nothing writes them.
_INTEGER_CODES = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 13: "L", 16: "Q"}


def swaps_sides(exif: bytes | None, xmp: bytes | None) -> bool:
    """Return whether the image is displayed with width and height swapped. XMP counts if EXIF has no orientation."""
    orientation = exif_orientation(exif) if exif is not None else None
    if orientation is None and xmp:
        orientation = xmp_orientation(xmp)
    return orientation is not None and 5 <= orientation <= 8


def xmp_orientation(xmp: bytes) -> int | None:
    """Return the ``tiff:Orientation`` of an XMP packet; None if there is none."""
    match = _XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match else None


def exif_orientation(exif: bytes) -> int | None:
    """Return the orientation tag of an EXIF block, with or without its ``Exif\\0\\0`` prefix; None if there is none."""
    tiff = exif.removeprefix(b"Exif\x00\x00").removeprefix(b"Exif\x00\x00")
    if not tiff:
        return None
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return UPRIGHT
    (directory,) = struct.unpack_from(order + "L", tiff, 4)
    if directory + 2 > len(tiff):
        return None
    return _directory_orientation(tiff, directory, order)


def _directory_orientation(tiff: bytes, directory: int, order: str) -> int | None:
    """Read the directory as Pillow does: a value outside the block ends it, too large a one is skipped."""
    (entries,) = struct.unpack_from(order + "H", tiff, directory)
    first = directory + 2
    last = min(first + entries * _ENTRY_BYTES, len(tiff) - _ENTRY_BYTES + 1)
    entry = struct.Struct(order + "HHLL")
    seen: set[int] = set()
    outside_bytes = 0
    for position in range(first, last, _ENTRY_BYTES):
        tag, kind, count, offset = entry.unpack_from(tiff, position)
        size = count * _TYPE_BYTES.get(kind, 0)
        if size == 0 or tag in seen:
            continue
        if size <= _INLINE_BYTES:
            offset = position + _ENTRY_BYTES - _INLINE_BYTES
        else:
            outside_bytes += size
            if outside_bytes > len(tiff):
                continue
            if offset + size > len(tiff):
                return None
        if tag == _ORIENTATION_TAG:
            code = _INTEGER_CODES.get(kind)
            return int(struct.unpack_from(order + code, tiff, offset)[0]) if code else UPRIGHT
        seen.add(tag)
    return None
