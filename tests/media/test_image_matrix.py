"""Images of Pillow and of other programs (``tests/support/writers.py``): as PyAV decodes them, or refused by name."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.support.image_cases import picture
from tests.support.image_files import exif_block
from tests.support.writers import ffmpeg
from triptych.errors import UnsupportedMedia
from triptych.models.shared.images import decode_image
from triptych.prompt.probe import probe_image

WIDTH, HEIGHT = 75, 51
EXACT, BY_ONE, ROUGH = 0.0, 1.0, 12.0
"""The mean difference in levels: of lossless files, of those whose values are rounded, and of those whose colours are
stored at half the size, which decoders enlarge differently."""
PILLOW: dict[str, tuple[str, str, dict[str, Any], float]] = {
    **{f"PNG, {mode}": ("PNG", mode, {}, EXACT) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "PNG, 16 bits": ("PNG", "I;16", {}, BY_ONE),
    "PNG, small": ("PNG", "P", {"bits": 2}, EXACT),
    "PNG, animated": ("PNG", "RGB", {"save_all": True, "append_images": [picture(WIDTH, HEIGHT, 9)]}, EXACT),
    **{f"JPEG, {mode}": ("JPEG", mode, {"quality": 95}, ROUGH) for mode in ("L", "RGB")},
    **{f"JPEG, {kind}": ("JPEG", "RGB", {"subsampling": kind}, ROUGH) for kind in ("4:4:4", "4:2:2", "4:2:0")},
    "JPEG, progressive": ("JPEG", "RGB", {"progressive": True, "quality": 100}, ROUGH),
    "JPEG, restarts": ("JPEG", "RGB", {"restart_marker_blocks": 2}, ROUGH),
    "JPEG, coarse": ("JPEG", "RGB", {"quality": 5}, ROUGH),
    "WebP": ("WEBP", "RGB", {}, ROUGH),
    "WebP, lossless": ("WEBP", "RGB", {"lossless": True}, EXACT),
    "WebP, transparent": ("WEBP", "RGBA", {"lossless": True, "exact": True}, EXACT),
    **{f"GIF, {mode}": ("GIF", mode, {}, EXACT) for mode in ("1", "L", "P")},
    "GIF, in one pass": ("GIF", "P", {"interlace": 0}, EXACT),
    "GIF, animated": ("GIF", "P", {"save_all": True, "append_images": [picture(WIDTH, HEIGHT, 9)]}, EXACT),
    **{f"BMP, {mode}": ("BMP", mode, {}, EXACT) for mode in ("1", "L", "P", "RGB")},
    **{f"AVIF, {mode}": ("AVIF", mode, {"quality": 95}, ROUGH) for mode in ("L", "RGB")},
    **{f"AVIF, {kind}": ("AVIF", "RGB", {"subsampling": kind}, ROUGH) for kind in ("4:4:4", "4:2:2", "4:2:0")},
}
FFMPEG = {
    "png": "rgb24 rgba rgb48be rgba64be pal8 gray ya8 gray16be ya16be monob",
    "apng": "rgb24 rgba gray pal8",
    "jpg": "yuvj420p yuvj422p yuvj444p",
    "bmp": "bgr24 bgra rgb565le rgb555le rgb8 bgr8 gray pal8 monob",
    "webp": "yuv420p yuva420p bgra",
    "gif": "pal8 gray rgb8 bgr8",
}
LOSSY = ("jpg", "webp")
WIDE = ("rgb48be", "rgba64be", "gray16be", "ya16be", "rgb565le", "rgb555le")
UNREADABLE = {"bmp": "rgb444le", "jpg": "gray -c:v ljpeg"}
"""Kinds of these formats that Pillow can't read."""
REFUSED_BY_PILLOW = {
    "TIFF": "TIFF",
    "PPM": "PNM",
    "JPEG2000": "JPEG 2000",
    "ICO": "an icon",
    "PCX": "PCX",
    "DDS": "DDS",
    **dict.fromkeys(("TGA", "SGI", "XBM", "PDF", "EPS", "DIB", "ICNS"), "not a JPEG"),
}
REFUSED_OF_FFMPEG = {
    "tiff": "TIFF",
    "ppm": "PNM",
    "pgm": "PNM",
    "pam": "PNM",
    "pcx": "PCX",
    "exr": "OpenEXR",
    **dict.fromkeys(("tga", "sgi", "qoi", "dpx", "xwd", "xbm", "sun", "fits"), "not a JPEG"),
}


def expected(data: bytes) -> NDArray[np.float64]:
    """The first picture as PyAV decodes it, on white."""
    with av.open(io.BytesIO(data), "r") as file:
        rgba = next(file.decode(video=0)).to_ndarray(format="rgba").astype(float)
    share = rgba[..., 3:] / 255
    return rgba[..., :3] * share + 255 * (1 - share)


def made(data: bytes) -> NDArray[np.float64]:
    header = probe_image(data)
    return np.asarray(decode_image(data, header.format, (header.width, header.height)), float)


def assert_same(data: bytes, most: float) -> None:
    own, whole = made(data), expected(data)
    assert own.shape == whole.shape
    # what blending rounds is half a level
    assert np.abs(own - whole).mean() <= most + 0.5
    if most == EXACT:
        assert np.abs(own - whole).max() <= 1


def drawn(mode: str) -> Image.Image:
    whole = picture(WIDTH, HEIGHT, 1)
    if mode == "I;16":
        return Image.fromarray(np.asarray(whole.convert("L")).astype(np.uint16) * 257)
    if mode in ("LA", "RGBA"):
        whole.putalpha(Image.linear_gradient("L").resize(whole.size))
    return whole.convert(mode)


def saved(name: str, mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    drawn(mode).save(out, name, **options)
    return out.getvalue()


@pytest.mark.parametrize("case", PILLOW)
def test_images_of_pillow(case: str) -> None:
    name, mode, options, most = PILLOW[case]
    assert_same(saved(name, mode, **options), most)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_turned_images(name: str, orientation: int) -> None:
    """PyAV gives the matrix of some formats only, so the turns are counted here."""
    data = saved(name, exif=exif_block(orientation))
    upright = made(saved(name))
    turned = np.rot90(upright, {3: 2, 4: 2, 5: 3, 6: 3, 7: 1, 8: 1}.get(orientation, 0))
    if orientation in (2, 4, 5, 7):
        turned = turned[:, ::-1]
    np.testing.assert_array_equal(made(data), turned)


@pytest.mark.parametrize("name", REFUSED_BY_PILLOW)
def test_other_formats_of_pillow_are_named(name: str) -> None:
    with pytest.raises(UnsupportedMedia, match=REFUSED_BY_PILLOW[name]):
        probe_image(saved(name, {"XBM": "1"}.get(name, "RGB")))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pixels"), [(name, one) for name in FFMPEG for one in FFMPEG[name].split()])
def test_images_of_ffmpeg(tmp_path: Path, name: str, pixels: str) -> None:
    source = ["-f", "lavfi", "-i", f"testsrc2=s={WIDTH}x{HEIGHT}", "-frames:v", "1", "-pix_fmt", pixels]
    data = ffmpeg(tmp_path / f"made.{name}", *source)
    assert_same(data, ROUGH if name in LOSSY else BY_ONE if pixels in WIDE else EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREADABLE)
def test_kinds_that_pillow_cannot_read(tmp_path: Path, name: str) -> None:
    source = ["-f", "lavfi", "-i", "testsrc2=s=64x48", "-frames:v", "1", "-pix_fmt", *UNREADABLE[name].split()]
    data = ffmpeg(tmp_path / f"made.{name}", *source)
    with pytest.raises(UnsupportedMedia, match="of a kind that isn't supported"):
        made(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_OF_FFMPEG)
def test_other_formats_of_ffmpeg_are_named(tmp_path: Path, name: str) -> None:
    data = ffmpeg(tmp_path / f"made.{name}", "-f", "lavfi", "-i", "testsrc2=s=64x48", "-frames:v", "1")
    with pytest.raises(UnsupportedMedia, match=REFUSED_OF_FFMPEG[name]):
        probe_image(data)
