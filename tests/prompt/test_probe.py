import contextlib
import io
import struct
import time
import warnings
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin

from tests.support.image_files import XMP, encoded, exif_block
from tests.support.timing import cpu_seconds
from triptych.errors import BadMediaSize, MediaError, TruncatedMedia, UnsupportedMedia
from triptych.prompt.orientation import exif_orientation
from triptych.prompt.probe import probe_image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")


def png_with(key: str, text: str, compressed: bool) -> bytes:
    info = PngImagePlugin.PngInfo()
    if key.startswith("XML"):
        info.add_itxt(key, text, zip=compressed)
    else:
        info.add_text(key, text, zip=compressed)
    return encoded(PICTURE, "PNG", pnginfo=info)


def png_with_late_exif() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add(b"eXIf", exif_block(6).removeprefix(b"Exif\0\0"), after_idat=True)
    return encoded(PICTURE, "PNG", pnginfo=info)


PICTURE = Image.linear_gradient("L").resize((37, 23)).convert("RGB")
TURNED = PICTURE.rotate(90)


def usual_files() -> Iterator[bytes]:
    for name in ("JPEG", "PNG", "WEBP", "AVIF"):
        yield encoded(PICTURE, name)
        for orientation in range(1, 9):
            yield encoded(PICTURE, name, exif=exif_block(orientation))
    yield encoded(PICTURE, "JPEG", progressive=True)
    yield encoded(PICTURE, "WEBP", lossless=True)
    for mode in ("1", "L", "P", "RGB"):
        yield encoded(PICTURE.convert(mode), "GIF", comment=b"a comment")
        yield encoded(PICTURE.convert(mode), "BMP")


def odd_files() -> Iterator[bytes]:
    profile = exif_block(8)
    for compressed in (False, True):
        yield png_with("XML:com.adobe.xmp", XMP.decode(), compressed)
        yield png_with("Raw profile type exif", f"\nexif\n{len(profile):8}\n{profile.hex()}\n", compressed)
    yield png_with_late_exif()
    yield encoded(PICTURE, "JPEG", xmp=XMP)
    yield encoded(PICTURE, "WEBP", xmp=XMP)
    yield encoded(PICTURE, "AVIF", xmp=XMP)
    yield encoded(PICTURE.convert("L"), "AVIF")
    yield encoded(PICTURE.convert("RGBA"), "AVIF", subsampling="4:4:4")
    for name in ("GIF", "PNG", "WEBP", "AVIF"):
        yield encoded(PICTURE, name, save_all=True, append_images=[TURNED])
    yield encoded(PICTURE, "MPO", save_all=True, append_images=[TURNED], exif=exif_block(6))
    # Pads and a restart marker between segments.
    plain = encoded(PICTURE, "JPEG")
    yield plain[:2] + b"\xff\xff\xff\xd0\xff\xff" + plain[2:]
    yield bmp(40, struct.pack("<llHHLLLLLL", 3, -2, 1, 24, 0, 0, 0, 0, 0, 0)) + bytes(24)
    yield bmp(12, struct.pack("<HHHH", 3, 2, 1, 24)) + bytes(24)
    yield gif_with_frame_beyond_its_screen()


def bmp(header_bytes: int, header: bytes) -> bytes:
    return b"BM" + struct.pack("<LHHLL", 0, 0, 0, 14 + header_bytes, header_bytes) + header


def gif_with_frame_beyond_its_screen() -> bytes:
    data = bytearray(encoded(PICTURE.convert("L"), "GIF"))
    data[6:10] = struct.pack("<HH", 5, 5)
    return bytes(data)


FILES = [*usual_files(), *odd_files()]


def pillow_size(data: bytes) -> tuple[int, int] | None:
    """None where Pillow doesn't take the file, or it is too large to decode in a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > 10**6:
                return None
            return ImageOps.exif_transpose(image).size
        except Exception:  # noqa: BLE001 - whatever it is, Pillow refuses the file
            return None


@pytest.mark.parametrize("data", FILES, ids=range(len(FILES)))
def test_size_is_that_of_the_upright_picture(data: bytes) -> None:
    header = probe_image(data)
    assert (header.width, header.height) == pillow_size(data)
    magic = {"PNG": b"\x89P", "JPEG": b"\xff\xd8", "WEBP": b"RI", "GIF": b"GI", "BMP": b"BM", "AVIF": b"\0\0\0"}
    assert data.startswith(magic[header.format])


@settings(max_examples=400)
@given(st.data())
def test_mutated_files_never_surprise(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from(FILES))
    mutated = bytearray(original)
    reach = data.draw(st.sampled_from([40, 200, len(original)]))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(reach, len(mutated)) - 1))
        piece = data.draw(st.binary(max_size=3))
        mutated[place : place + data.draw(st.integers(0, 3))] = piece
    try:
        header = probe_image(bytes(mutated))
    except MediaError:
        return
    assert pillow_size(bytes(mutated)) in (None, (header.width, header.height))


@settings(max_examples=300)
@given(
    st.sampled_from(
        [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"RIFF\0\0\0\0WEBPVP8X", b"GIF89a", b"BM"]
    ),
    st.binary(max_size=200),
)
def test_random_bytes_raise_only_media_errors(start: bytes, rest: bytes) -> None:
    try:
        header = probe_image(start + rest)
    except MediaError:
        return
    assert header.width > 0 and header.height > 0


@pytest.mark.parametrize("data", FILES, ids=range(len(FILES)))
def test_no_prefix_of_a_file_surprises(data: bytes) -> None:
    for end in range(min(len(data), 600)):
        try:
            probe_image(data[:end])
        except MediaError:
            continue


@given(st.binary(max_size=80))
def test_exif_reader_takes_any_bytes(data: bytes) -> None:
    for start in (b"", b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08", b"Exif\0\0II*\0"):
        exif_orientation(start + data)


def test_not_an_image() -> None:
    with pytest.raises(UnsupportedMedia, match=r"JPEG, PNG, WebP, GIF, BMP or AVIF image$"):
        probe_image(b"something else")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG image"),
        (b"<?xml version='1.0'?>\n<svg/>", "an SVG image"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"%PDF-1.7", "a PDF document"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a HEIC image"),
        (b"\0\0\0\x14ftypisom\0\0\0\0mp41", "an MP4 file"),
        *(
            (name, described)
            for name, described in {
                "TIFF": "a TIFF image",
                "JPEG2000": "a JPEG 2000 image",
                "ICO": "an icon",
                "PPM": "a PNM image",
                "PCX": "a PCX image",
                "DDS": "a DDS image",
            }.items()
        ),
    ],
)
def test_other_formats_are_named(data: bytes | str, name: str) -> None:
    with pytest.raises(UnsupportedMedia, match=f"BMP or AVIF image: it is {name}"):
        probe_image(encoded(PICTURE, data) if isinstance(data, str) else data)


@pytest.mark.parametrize("first", ["progressive", "sequential"])
def test_scans_of_a_jpeg_are_bounded(first: str) -> None:
    data = encoded(PICTURE, "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    if first == "sequential":
        data = data.replace(b"\xff\xc2", b"\xff\xc0")
    assert probe_image(data[:-2] + last * 20 + data[-2:]).width == 37
    with pytest.raises(UnsupportedMedia, match="more than 32 scans"):
        probe_image(data[:-2] + last * 40 + data[-2:])


def test_what_follows_a_jpeg_is_not_scanned() -> None:
    """Such as the video of a phone's moving picture."""
    assert probe_image(encoded(PICTURE, "JPEG", progressive=True) + b"\xff\xda" * 1000).width == 37


@pytest.mark.parametrize("name", FORMATS)
def test_cut_within_the_header(name: str) -> None:
    with pytest.raises(TruncatedMedia):
        probe_image(encoded(PICTURE, name)[:16])


def test_empty() -> None:
    with pytest.raises(TruncatedMedia):
        probe_image(b"")


def png_header(width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + chunk + struct.pack(">L", zlib.crc32(chunk))


def test_header_of_a_huge_picture_is_read() -> None:
    header = probe_image(png_header(50_000, 50_000))
    assert (header.width, header.height) == (50_000, 50_000)


@pytest.mark.parametrize(
    "data",
    [
        png_header(0, 5),
        png_header(5, 0),
        bmp(40, struct.pack("<ll", -3, 2) + bytes(28)),
        b"GIF89a" + bytes(7) + b"," + bytes(9),
    ],
)
def test_zero_and_negative_sides(data: bytes) -> None:
    with pytest.raises(BadMediaSize):
        probe_image(data)


@pytest.mark.parametrize(
    "data",
    [
        png_header(4, 4) + struct.pack(">L4sL", 0, b"tEXt", 0) * 1_000_000,
        png_header(4, 4)
        + (
            struct.pack(">L4s", 900, b"zTXt")
            + b"Raw profile type exif\0\0"
            + zlib.compress(bytes(1 << 20))[:876]
            + bytes(4)
        )
        * 5000,
        b"\xff\xd8\xff" + b"\xe1\xff\xff" + (b"Exif\0\0" + bytes(65527) + b"\xff\xe1\xff\xff") * 300,
        b"\xff\xd8\xff" + b"\xff" * 20_000_000,
        b"\xff\xd8\xff" + b"\xff\xe0\x00\x00" * 2_000_000,
        b"\xff\xd8\xff" + bytes(20_000_000),
        b"GIF89a" + bytes(7) + b"!\xfe" + b"\x01\x01" * 5_000_000,
        b"RIFF\xff\xff\x00\x01WEBPVP8X" + struct.pack("<L", 10) + b"\x08" + bytes(9) + b"ICCP\0\0\0\0" * 2_100_000,
    ],
    ids=[
        "PNG chunks",
        "PNG texts",
        "EXIF parts",
        "JPEG pads",
        "JPEG segments",
        "JPEG junk",
        "GIF blocks",
        "WebP chunks",
    ],
)
def test_hostile_headers_take_bounded_time(data: bytes) -> None:
    start = time.process_time()
    with contextlib.suppress(MediaError):
        probe_image(data)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("name", FORMATS)
def test_usual_files_take_microseconds(name: str) -> None:
    data = encoded(PICTURE.resize((1024, 768)), name)
    assert min(cpu_seconds(lambda: probe_image(data)) for _ in range(50)) < 1e-4
