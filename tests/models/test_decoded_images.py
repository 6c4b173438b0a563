"""AVIF images come out as Pillow decodes them, and damaged ones raise typed errors only."""

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.image_cases import picture
from tests.support.image_files import XMP, encoded, exif_block
from triptych.errors import MediaError, UnsupportedMedia
from triptych.models.shared.images import decode_image
from triptych.prompt.probe import probe_image

PICTURE = picture(75, 51, 1)
TRANSPARENT = PICTURE.convert("RGBA")
TRANSPARENT.putalpha(Image.linear_gradient("L").resize(PICTURE.size))

FILES = {
    "plain": encoded(PICTURE, "AVIF"),
    "full colours": encoded(PICTURE, "AVIF", subsampling="4:4:4", quality=100),
    "grey": encoded(PICTURE.convert("L"), "AVIF"),
    "transparent": encoded(TRANSPARENT, "AVIF"),
    **{f"orientation {value}": encoded(PICTURE, "AVIF", exif=exif_block(value)) for value in range(2, 9)},
    "orientation in XMP": encoded(PICTURE, "AVIF", xmp=XMP),
    "sequence": encoded(PICTURE, "AVIF", save_all=True, append_images=[PICTURE.rotate(180)]),
}


def decoded(data: bytes) -> Image.Image:
    header = probe_image(data)
    return decode_image(data, header.format, (header.width, header.height))


@pytest.mark.parametrize("name", FILES)
def test_avif(name: str) -> None:
    with Image.open(io.BytesIO(FILES[name])) as opened:
        upright = ImageOps.exif_transpose(opened)
    if upright.mode == "RGBA":
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    np.testing.assert_array_equal(decoded(FILES[name]), upright.convert("RGB"))


@pytest.mark.parametrize("name", ["transparent", "orientation 6", "sequence"])
def test_mutated_avif_raises_only_typed_errors(name: str) -> None:
    source = random.Random(name)
    for _ in range(150):
        mutated = bytearray(FILES[name])
        for _ in range(source.randint(1, 4)):
            mutated[source.randrange(min(source.choice([64, 400, len(mutated)]), len(mutated)))] = source.randrange(256)
        try:
            header = probe_image(bytes(mutated))
            if header.width * header.height < 10**5:
                decode_image(bytes(mutated), header.format, (header.width, header.height))
        except MediaError:
            continue


def test_kinds_that_are_not_supported_are_not_called_damaged_alone() -> None:
    """A JPEG of the lossless kind."""
    data = encoded(PICTURE, "JPEG").replace(b"\xff\xc0", b"\xff\xc3")
    with pytest.raises(UnsupportedMedia, match="the JPEG image is damaged, or of a kind that isn't supported"):
        decoded(data)
