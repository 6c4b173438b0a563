"""Decodes images, as planned. Runs in encode workers; Pillow and numpy only."""

import io
import struct
import warnings

import numpy as np
from PIL import AvifImagePlugin, Image, ImageOps

from triptych.errors import PlanMismatch, TruncatedMedia, UnsupportedMedia

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")

# All that Pillow's readers of these formats raise for damaged files; OSError includes Pillow's own errors.
_PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    struct.error,
)

# The plan bounds the number of pixels (``MAX_SOURCE_PIXELS``), and the file's size is checked against the plan before
# decoding. Pillow's own limit could only contradict the operator's.
Image.MAX_IMAGE_PIXELS = None
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # instances control the number of threads


def decode_image(data: bytes, name: str, planned: tuple[int, int]) -> Image.Image:
    """Return the image, or its first frame, upright and as RGB.

    ``planned`` is (width, height); ``name`` is the format's name for errors. Raises UnsupportedMedia or TruncatedMedia
    if the bytes can't be decoded, and PlanMismatch for another size.
    """
    with warnings.catch_warnings():
        # Pillow warns about odd metadata, which doesn't affect the pixels. Filters are global to the process: at
        # worst, two threads leave this one in place.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        except _PILLOW_ERRORS as error:
            raise UnsupportedMedia(f"the {name} image is damaged, or of a kind that isn't supported") from error
        # The sides may still be swapped: Pillow applies the orientation only to decoded pixels.
        if sorted(image.size) != sorted(planned):
            raise _size_mismatch(image.size, planned)
        try:
            image.load()
            _turn_upright(image)
            image = _as_rgb(image)
        except _PILLOW_ERRORS as error:
            if "truncated" in str(error):
                raise TruncatedMedia(f"the {name} image ends within its pixels") from error
            raise UnsupportedMedia(f"the {name} image is damaged, or of a kind that isn't supported") from error
    if image.size != planned:
        raise _size_mismatch(image.size, planned)
    return image


def _turn_upright(image: Image.Image) -> None:
    if image.format == "AVIF" and "exif" in image.info:
        image.info.pop("xmp", None)  # counts only if the container has no orientation and no EXIF, as in the probe
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except _PILLOW_ERRORS:
        # An image with unreadable metadata counts as upright, as in the probe.
        return


def _as_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB. Transparent areas become white, as in the reference; 16-bit grey isn't clipped, unlike there."""
    if image.mode.startswith("I;16"):
        image = _of_16_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _of_16_bits(image: Image.Image) -> Image.Image:
    """Keep the higher byte of each value, as Pillow's reader does for 16-bit colours.

    Pillow's conversion of 16-bit grey clips instead: all but the darkest 1/256 of an X-ray would be white.
    """
    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _size_mismatch(decoded: tuple[int, int], planned: tuple[int, int]) -> PlanMismatch:
    return PlanMismatch(f"an image has {decoded[0]} by {decoded[1]} pixels; its plan says {planned[0]} by {planned[1]}")
