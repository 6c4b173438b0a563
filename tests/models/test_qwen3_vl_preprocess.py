import functools
import io
import random
import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.planners import CONFIG
from triptych.errors import CheckpointError, MediaError, PlanMismatch, TruncatedMedia, UnsupportedMedia
from triptych.models.base import EncoderInput
from triptych.models.qwen3_vl.plan import Qwen3VLPlanner
from triptych.models.qwen3_vl.preprocess import Qwen3VLPreprocessor
from triptych.models.shared.images import decode_image
from triptych.prompt.probe import probe_image
from triptych.types import ImageHeader, ItemPlan

SMALL: dict[str, Any] = {"size": {"shortest_edge": 1024, "longest_edge": 16384}, "patch_size": 16}
QWEN3_VL: dict[str, Any] = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
}


@functools.cache
def noise() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (256, 256, 4), dtype=np.uint8)
    return Image.fromarray(values)


def picture(random_source: random.Random, mode: str) -> Image.Image:
    longest = random_source.choice([2, 20, 200])
    width, height = random_source.randint(1, longest), random_source.randint(1, longest)
    image = noise().crop((0, 0, width, height))
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def random_file(random_source: random.Random) -> bytes:
    name = random_source.choice(list(MODES))
    options: dict[str, Any] = {}
    if name in ("JPEG", "PNG", "WEBP"):
        exif = Image.Exif()
        exif[274] = random_source.randint(1, 8)
        options["exif"] = exif.tobytes()
    if name == "WEBP":
        options["lossless"] = random_source.random() < 0.5
    if name == "JPEG":
        options["progressive"] = random_source.random() < 0.3
    return encoded(picture(random_source, random_source.choice(MODES[name])), name, **options)


def encoded(image: Image.Image, name: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


def plan_of(data: bytes, processor: dict[str, Any] = SMALL) -> ItemPlan:
    return Qwen3VLPlanner(CONFIG, processor).plan(probe_image(data))


def preprocessed(data: bytes, processor: dict[str, Any] = SMALL) -> EncoderInput:
    return made(Qwen3VLPreprocessor(CONFIG, processor), data, plan_of(data, processor))


def made(preprocessor: Qwen3VLPreprocessor, data: bytes, plan: ItemPlan) -> EncoderInput:
    """An image's only part."""
    (part,) = preprocessor(data, plan)
    return part


def assert_as_reference(data: bytes, result: EncoderInput, processor: Qwen2VLImageProcessorPil) -> None:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode == "I;16":  # which the reference clips
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    expected = processor(image, return_tensors="np")
    assert result.patches.dtype == np.float32
    np.testing.assert_array_equal(
        result.patches.view(np.uint32), np.ascontiguousarray(expected["pixel_values"]).view(np.uint32)
    )
    assert result.grid == tuple(expected["image_grid_thw"][0])


def test_16_bit_grey_is_scaled_and_not_clipped() -> None:
    """As Pillow does for 16-bit colours; headers and plans don't change."""
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    data = encoded(Image.fromarray(ramp), "PNG")
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.mode == "I;16"
    shown = np.asarray(decode_image(data, "PNG", (64, 64)))
    assert (shown == (ramp >> 8)[..., None]).all()
    eight_bits = encoded(Image.fromarray((ramp >> 8).astype(np.uint8)), "PNG")
    assert plan_of(data) == plan_of(eight_bits)
    np.testing.assert_array_equal(preprocessed(data).patches, preprocessed(eight_bits).patches)
    seen_through = encoded(Image.fromarray(ramp), "PNG", transparency=int(ramp[1, 1]))
    shown = np.asarray(decode_image(seen_through, "PNG", (64, 64)))
    expected = np.where(ramp == ramp[1, 1], 255, ramp >> 8)[..., None]
    assert (shown == expected).all()


@pytest.mark.parametrize("num_files", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_preprocessing_yields_what_was_planned(num_files: int) -> None:
    """Random files: the probe sees what Pillow decodes, the plan is what preprocessing makes, bit for bit."""
    random_source = random.Random(1)
    preprocessor = Qwen3VLPreprocessor(CONFIG, SMALL)
    planner = Qwen3VLPlanner(CONFIG, SMALL)
    reference = Qwen2VLImageProcessorPil(**SMALL)
    for i in range(num_files):
        data = random_file(random_source)
        header = probe_image(data)
        with Image.open(io.BytesIO(data)) as image:
            assert (header.width, header.height) == ImageOps.exif_transpose(image).size
        plan = planner.plan(header)
        result = made(preprocessor, data, plan)
        assert result.grid == plan.grid
        assert result.patches.shape == (plan.rows * 4, 3 * 2 * 16 * 16)
        if i % 4 == 0:
            assert_as_reference(data, result, reference)


@pytest.mark.parametrize(
    "processor",
    [
        QWEN3_VL,
        SMALL | {"resample": 2, "image_std": 0.5},
        SMALL | {"do_normalize": False},
        SMALL | {"do_rescale": False, "image_mean": [127.5] * 3},
        SMALL | {"rescale_factor": 1 / 127},
    ],
)
def test_settings_as_the_reference(processor: dict[str, Any]) -> None:
    data = encoded(noise().convert("RGB").resize((333, 222)), "JPEG")
    keywords = {**processor, "image_std": [0.5] * 3} if processor.get("image_std") == 0.5 else processor
    assert_as_reference(data, preprocessed(data, processor), Qwen2VLImageProcessorPil(**keywords))


@pytest.mark.parametrize("size", [(2000, 2000), (3001, 1999)])
def test_large_pictures_as_the_reference(size: tuple[int, int]) -> None:
    data = encoded(noise().convert("RGB").resize(size), "JPEG")
    assert_as_reference(data, preprocessed(data, QWEN3_VL), Qwen2VLImageProcessorPil(**QWEN3_VL))


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP", "MPO"])
def test_first_frame_of_several(name: str) -> None:
    first, second = noise().convert("RGB").crop((0, 0, 60, 50)), Image.new("RGB", (60, 50), "red")
    options: dict[str, Any] = {"lossless": True} if name == "WEBP" else {}
    data = encoded(first, name, save_all=True, append_images=[second], **options)
    assert_as_reference(data, preprocessed(data), Qwen2VLImageProcessorPil(**SMALL))


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "BMP"])
def test_cut_within_the_pixels(name: str) -> None:
    data = encoded(noise().convert("RGB"), name)
    plan = plan_of(data)
    cut = data[: len(data) // 2]
    with pytest.raises((TruncatedMedia, UnsupportedMedia)) as caught:
        made(Qwen3VLPreprocessor(CONFIG, SMALL), cut, plan)
    assert "0x" not in str(caught.value)
    if name == "WEBP":
        with pytest.raises(TruncatedMedia):
            probe_image(cut)
    else:
        assert isinstance(caught.value, TruncatedMedia)


def test_damaged_pixels() -> None:
    data = bytearray(encoded(noise().convert("RGB"), "PNG"))
    data[60:90] = bytes(30)
    with pytest.raises(UnsupportedMedia, match="PNG image is damaged"):
        preprocessed(bytes(data))


def test_format_outside_the_list() -> None:
    plan = plan_of(encoded(noise(), "PNG"))
    with pytest.raises(UnsupportedMedia):
        made(Qwen3VLPreprocessor(CONFIG, SMALL), encoded(noise().convert("RGB"), "TIFF"), plan)


def test_unreadable_exif_counts_as_upright() -> None:
    data = encoded(noise().convert("RGB").crop((0, 0, 60, 50)), "PNG", exif=b"Exif\0\0not a TIFF block")
    assert probe_image(data).width == 60
    assert preprocessed(data).grid == plan_of(data).grid


def test_other_bytes_than_planned() -> None:
    small, large = (encoded(noise().convert("RGB").resize(size), "PNG") for size in ((64, 64), (96, 64)))
    with pytest.raises(PlanMismatch, match="96 by 64 pixels; its plan says 64 by 64"):
        made(Qwen3VLPreprocessor(CONFIG, SMALL), large, plan_of(small))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resized_width": 32}, "64 by 64 pixels; its plan says 32 by 64"),
        ({"grid": (1, 4, 2)}, "its plan says .1, 4, 2."),
    ],
)
def test_other_plan_than_ours(change: dict[str, Any], message: str) -> None:
    data = encoded(noise().convert("RGB").resize((64, 64)), "PNG")
    with pytest.raises(PlanMismatch, match=message):
        made(Qwen3VLPreprocessor(CONFIG, SMALL), data, msgspec.structs.replace(plan_of(data), **change))


def test_pillows_own_size_limit_is_disabled() -> None:
    """100 megapixels, where Pillow would warn: only the operator's limit applies. No pixel is decoded."""
    header = b"IHDR" + struct.pack(">LLBBBBB", 20_000, 5_000, 8, 2, 0, 0, 0)
    idat = b"IDAT" + zlib.compress(b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">L", len(chunk) - 4) + chunk + struct.pack(">L", zlib.crc32(chunk)) for chunk in (header, idat)
    )
    plan = Qwen3VLPlanner(CONFIG, SMALL).plan(ImageHeader("PNG", 100, 50))
    with pytest.raises(PlanMismatch):
        other = msgspec.structs.replace(plan, header=ImageHeader("PNG", 1, 5_000))
        made(Qwen3VLPreprocessor(CONFIG, SMALL), data, other)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_raise_only_typed_errors(seed: int) -> None:
    random_source = random.Random(seed)
    preprocessor = Qwen3VLPreprocessor(CONFIG, SMALL)
    planner = Qwen3VLPlanner(CONFIG, SMALL)
    for _ in range(400):
        mutated = bytearray(random_file(random_source))
        for _ in range(random_source.randint(1, 4)):
            mutated[random_source.randrange(min(len(mutated), random_source.choice([60, 300, 10**6])))] ^= (
                1 << random_source.randrange(8)
            )
        data = bytes(mutated)
        try:
            plan = planner.plan(probe_image(data))
            assert made(preprocessor, data, plan).grid == plan.grid
        except MediaError:
            continue


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 17}, "resample 17"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": "a"}, "image_std"),
        ({"rescale_factor": "a"}, "rescale_factor"),
    ],
)
def test_unsupported_settings_are_rejected(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Qwen3VLPreprocessor(CONFIG, SMALL | setting)
