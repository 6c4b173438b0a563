"""Image files with orientations, as Pillow writes them."""

import io

from PIL import Image

XMP = b'<x:xmpmeta tiff:Orientation="6"/>'


def exif_block(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[270] = "a longer value, kept outside the entry"
    exif[274] = orientation
    return exif.tobytes()


def encoded(image: Image.Image, name: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, name, **options)
    return out.getvalue()
