"""Thin and huge images, requests' options, and media that can't be used, with every family that takes images."""

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from tests.support.chat import the_error
from tests.support.clips import clip
from tests.support.equal_embeddings import check_equal
from tests.support.families import EDGE_MEDIA, RELEASED_EDGES
from tests.support.family_parts import (
    bits,
    make_checkpoint,
    reference_bits,
    reference_rows,
    released_parts,
    rows_of,
    served_parts,
    tiny_of,
)
from tests.support.image_cases import HUGE, picture, png, thin_sizes
from tests.support.reference import image_processor
from tests.support.released import RELEASED
from tests.support.serving import image_part, served, text_part
from tests.support.sounds import sound, tone
from tests.support.tiny import HEARING, write_settings
from triptych.api.media_parts import MediaSettings
from triptych.api.schemas import ImagePart, ImageURL
from triptych.errors import (
    BadMediaSize,
    InvalidRequest,
    MediaError,
    MediaMismatch,
    MediaTooLarge,
    PlanMismatch,
    UnsupportedMedia,
)
from triptych.models.base import FRAME_OPTIONS, Planner, Preprocessor
from triptych.models.registry import FAMILIES, resolve
from triptych.prompt.caps import MediaCaps
from triptych.prompt.probe import probe_image
from triptych.prompt.probe_audio import probe_audio
from triptych.prompt.probe_video import probe_video
from triptych.types import (
    AudioHeader,
    ImageHeader,
    ItemContext,
    ItemPlan,
    MediaHeader,
    PixelBounds,
    VideoHeader,
)


@torch.inference_mode()
@pytest.mark.parametrize("family", EDGE_MEDIA)
def test_thin_images(tmp_path: Path, family: str) -> None:
    """Of the largest ratio that is taken. Plan, pixels and tower together make the reference's embeddings."""
    folder = make_checkpoint(tmp_path / "model", family)
    for size in thin_sizes(family):
        image = picture(*size, seed=1200)
        plan, rows = rows_of(folder, family, image)
        check_equal(rows, plan, reference_rows(folder, family, image))


@pytest.mark.parametrize("family", EDGE_MEDIA)
@pytest.mark.parametrize("size", [(900, 3), (3, 900), (201, 1), (10**7, 5)])
def test_thinner_images_are_refused(family: str, size: tuple[int, int]) -> None:
    with pytest.raises(BadMediaSize, match="its sides may differ at most 200-fold"):
        served_parts(family)[0].plan(ImageHeader("PNG", *size))


@pytest.mark.parametrize("family", RELEASED_EDGES)
def test_plans_of_huge_images(family: str) -> None:
    """Within the default limits and the area that the planner says; larger ones are refused."""
    planner, _ = released_parts(family)
    plan = planner.plan(ImageHeader("PNG", *HUGE))
    assert plan.is_whole
    assert plan.rows <= MediaCaps().tokens
    assert plan.resized_width * plan.resized_height <= planner.max_image_pixels
    for size in ((10_000, 5001), (2**31, 2**31)):
        with pytest.raises(MediaTooLarge, match="at most 50000000 are taken"):
            planner.plan(ImageHeader("PNG", *size))


@pytest.fixture(scope="module")
def huge() -> tuple[Image.Image, bytes]:
    image = picture(*HUGE, seed=1201)
    return image, png(image)


@pytest.mark.slow
@pytest.mark.parametrize("family", RELEASED_EDGES)
def test_pixels_of_huge_images(tmp_path: Path, huge: tuple[Image.Image, bytes], family: str) -> None:
    """With the settings of a released checkpoint, which both sides resize to as many pixels."""
    image, data = huge
    write_settings(tmp_path, RELEASED[family].tiny(family))
    planner, preprocess = released_parts(family)
    found = sum(bits(part.patches) for part in preprocess(data, planner.plan(probe_image(data))))
    seen = 378 if family in ("llava_onevision", "smolvlm") else None  # 27 patches of 14 pixels, of 384
    assert found == reference_bits(image_processor(tmp_path), image, seen)


VALUES: dict[str, tuple[Any, ...]] = {
    "min_pixels": (1, 10**4, 10**6, 10**8),
    "max_pixels": (1, 100, 10**4, 10**8),
    "size": (
        *({"shortest_edge": least, "longest_edge": most} for least, most in ((1, 1), (10**6, 100), (3136, 10**5))),
        *({"longest_edge": most} for most in (1, 100, 2**31)),
    ),
    "fps": (0.001, 1.0, 240.0),
    "num_frames": (1, 2, 2**16),
    "max_patches": (1, 2, 2**16),
    "min_dynamic_patch": (1, 4, 256),
    "max_dynamic_patch": (1, 4, 256),
    "base_size": (1, 32, 64, 2**16),
    "image_size": (1, 32, 64, 2**16),
    "pan_and_scan_min_crop_size": (1, 64, 2**16),
    "pan_and_scan_max_num_crops": (1, 4, 64),
    "pan_and_scan_min_ratio_to_activate": (0.0, 1.0, 1000.0),
    "max_slice_nums": (1, 2, 64),
    "downsample_mode": ("4x", "16x"),
    "dynamic_hd": (1, 4, 36),
    "max_soft_tokens": (1, 140, 2**16),
    **dict.fromkeys(
        ("resize_to_max_canvas", "dynamic_image_size", "use_thumbnail", "crop_mode", "do_pan_and_scan"), (True, False)
    ),
}
"""Values that the API takes of each option, extremes among them. Families refuse some by themselves."""
WRONG: list[Any] = ["many", [], {}, -1, 1e300, 10**12]
SIZES = ((200, 150), (900, 10), (1, 1), (600, 3), (3, 600), (700, 500))
NEEDED = {
    **{name: {"do_pan_and_scan": True} for name in VALUES if name.startswith("pan_and_scan")},
    "image_size": {"crop_mode": False},
}
"""What other options an option has an effect with."""
CLIP = VideoHeader("MP4", 96, 64, 120, 10.0)


def context_of(planner: Planner, **options: Any) -> ItemContext:
    settings = MediaSettings.from_options(planner.options, options)
    return ItemContext(
        settings.bounds,
        settings.sampling,
        options=settings.options,
        modalities=frozenset({"image"}),
        size=settings.size,
    )


def outcome(planner: Planner, header: MediaHeader, context: ItemContext) -> ItemPlan | str:
    """The plan but for the options themselves, or the message of the refusal."""
    try:
        plan = planner.plan(header, context)
    except MediaError as error:
        return str(error)
    return ItemPlan(
        **{name: getattr(plan, name) for name in plan.__struct_fields__ if name not in ("bounds", "sampling")}
    )


@cache
def image_of(size: tuple[int, int]) -> bytes:
    return png(picture(*size, seed=1202))


@pytest.mark.parametrize("family", EDGE_MEDIA)
def test_options(family: str) -> None:
    """Whatever the API takes is refused by name or makes a plan that the preprocessor can follow; and each option that
    is taken has an effect."""
    planner, preprocess = served_parts(family)
    assert planner.options.keys() <= VALUES.keys(), "options without values here"
    for name, values in VALUES.items():
        if name not in planner.options:
            with pytest.raises(InvalidRequest, match=f"the model doesn't take {name}; it takes ") as refused:
                context_of(planner, **{name: values[0]})
            assert refused.value.param == f"mm_processor_kwargs.{name}"
            continue
        for wrong in WRONG:
            with pytest.raises(InvalidRequest, match=f"mm_processor_kwargs.{name}: ") as refused:
                context_of(planner, **{name: wrong})
            assert refused.value.param == f"mm_processor_kwargs.{name}"
        others, effects = NEEDED.get(name, {}), 0
        for context in (context_of(planner, **others, **{name: value}) for value in values):
            headers = [CLIP] if name in FRAME_OPTIONS else [ImageHeader("PNG", *size) for size in SIZES]
            for header in headers:
                found = outcome(planner, header, context)
                effects += found != outcome(planner, header, context_of(planner, **others))
                if isinstance(header, ImageHeader) and isinstance(found, ItemPlan):
                    check_made(preprocess, planner, header, context)
        assert effects, f"{name} has no effect"


LONGER_SIDES = ("idefics3", "smolvlm", "llava+pixtral", "mistral3")
"""Families whose ``size`` has the length of an image's longer side, by that of the tiny checkpoint."""
EDGES = {True: ({"longest_edge": 80}, {"longest_edge": 100}, {"longest_edge": 139})} | {
    False: tuple({"shortest_edge": least, "longest_edge": most} for least, most in ((3136, 10**4), (9000, 33_333)))
}


@pytest.mark.parametrize("family", EDGE_MEDIA)
def test_size(tmp_path: Path, family: str) -> None:
    """An image becomes what the reference's processor makes of it with that ``size``. It is refused by name where that
    processor has another kind of size, and a shortest side where it has none. ``detail: low`` adds nothing to it."""
    planner, preprocess = served_parts(family)
    sides = family in LONGER_SIDES
    if "size" not in planner.options:
        with pytest.raises(InvalidRequest, match="the model doesn't take size"):
            context_of(planner, size={"longest_edge": 100})
        return
    write_settings(tmp_path, tiny_of(family))
    reference = image_processor(tmp_path)
    seen = 84 if family in ("idefics3", "smolvlm") else None  # six patches of 14 pixels, of 88
    header = ImageHeader("PNG", 200, 150)
    for size in EDGES[sides]:
        context, made = context_of(planner, size=size), set()
        for width, height in ((200, 150), (64, 48), (90, 300)):
            data = image_of((width, height))
            plan = planner.plan(probe_image(data), context)
            found = sum(bits(part.patches) for part in preprocess(data, plan))
            assert found == reference_bits(reference, picture(width, height, seed=1202), seen, size=size)
            made.add(plan.rows == planner.plan(probe_image(data)).rows)
        assert made != {True}, "the size has no effect"
        low = msgspec.structs.replace(context, bounds=PixelBounds(max_pixels=5000))
        assert planner.plan(header, low) == planner.plan(header, context), "`detail: low` changes the image"
    if sides:
        with pytest.raises(BadMediaSize, match="longest_edge 10000 exceeds the model's own"):
            planner.plan(header, context_of(planner, size={"longest_edge": 10_000}))
        with pytest.raises(BadMediaSize, match="shortest_edge: the model has a longest_edge alone"):
            planner.plan(header, context_of(planner, size={"shortest_edge": 10, "longest_edge": 100}))
    else:
        most = context_of(planner, size={"longest_edge": 10**4})
        assert planner.plan(header, most).rows == planner.plan(header, context_of(planner, size=EDGES[False][0])).rows


SIZED_VIDEOS = [
    name
    for name in EDGE_MEDIA
    if "video" in FAMILIES[name].modalities and "size" in resolve(FAMILIES[name].planner).options
]


@pytest.mark.parametrize("family", SIZED_VIDEOS)
def test_size_of_videos(family: str) -> None:
    """Its edges are ``min_pixels`` and ``max_pixels`` of a video; a side's length is refused."""
    planner, _ = served_parts(family)
    if family in LONGER_SIDES:
        with pytest.raises(UnsupportedMedia, match="a video takes no size"):
            planner.plan(CLIP, context_of(planner, size=EDGES[True][0]))
        return
    for size in EDGES[False]:
        plan = planner.plan(CLIP, context_of(planner, size=size))
        bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        assert plan == planner.plan(CLIP, context_of(planner, **bounds))
        assert plan.grid != planner.plan(CLIP).grid, "the size has no effect"


def check_made(preprocess: Preprocessor, planner: Planner, header: ImageHeader, context: ItemContext) -> None:
    plan = planner.plan(header, context)
    assert plan.is_whole
    if plan.patches <= 2500:
        parts = list(preprocess(image_of((header.width, header.height)), plan))
        assert [len(part.patches) for part in parts] == [part.patches for part in plan.parts]


@pytest.mark.parametrize("family", RELEASED_EDGES)
def test_low_detail(family: str) -> None:
    """It is never refused, and no image becomes more embeddings than without it."""
    planner, _ = released_parts(family)
    part = ImagePart(type="image_url", image_url=ImageURL(url="data:,", detail="low"))
    low = ItemContext(MediaSettings().bounds_of(part, planner.max_image_pixels))
    for size in ((1920, 1080), (300, 200), (1000, 40), (40, 1000), HUGE):
        header = ImageHeader("PNG", *size)
        assert planner.plan(header, low).rows <= planner.plan(header).rows


def file_of(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def taller_png(data: bytes, rows: int) -> bytes:
    """A PNG file whose header says another height, with a right checksum."""
    header = data[12:20] + struct.pack(">L", rows) + data[24:29]
    return data[:12] + header + struct.pack(">L", zlib.crc32(header)) + data[33:]


def taller_jpeg(data: bytes, rows: int) -> bytes:
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">H", rows) + data[place + 2 :]


DAMAGED: dict[str, Callable[[Image.Image], bytes]] = {
    "cut JPEG": lambda image: file_of(image, "JPEG")[:-700],
    "cut PNG": lambda image: file_of(image, "PNG")[:-700],
    "PNG without pixels": lambda image: file_of(image, "PNG")[:33],
    "zeros for pixels": lambda image: file_of(image, "PNG")[:60] + bytes(5000),
    "text": lambda _: b"no image at all",
    "nothing": lambda _: b"",
}
LYING: dict[str, Callable[[Image.Image], bytes]] = {
    "PNG of too many rows": lambda image: taller_png(file_of(image, "PNG"), 900),
    "PNG of too few rows": lambda image: taller_png(file_of(image, "PNG"), 60),
    "JPEG of too many rows": lambda image: taller_jpeg(file_of(image, "JPEG"), 900),
    "JPEG of too few rows": lambda image: taller_jpeg(file_of(image, "JPEG"), 60),
}
"""Files whose headers say other heights than their pixels have."""


@pytest.fixture
def names(family: str) -> Iterator[Callable[[bytes, MediaHeader], list[str]]]:
    """Preprocesses a file by the plan of a header, and returns the digests of its parts. After the test, the same
    preprocessor makes another image as before."""
    planner, preprocess = served_parts(family)

    def made_of(data: bytes, header: MediaHeader) -> list[str]:
        return [part.name for part in preprocess(data, planner.plan(header))]

    good = file_of(picture(160, 120, seed=1203), "PNG")
    before = made_of(good, probe_image(good))
    yield made_of
    assert made_of(good, probe_image(good)) == before


@pytest.mark.parametrize("family", EDGE_MEDIA)
def test_files_that_cannot_be_used(family: str, names: Callable[[bytes, MediaHeader], list[str]]) -> None:
    """Also by the plan of a good file, which another process made."""
    image = picture(160, 120, seed=1203)
    for damaged in DAMAGED.values():
        data = damaged(image)
        with pytest.raises(MediaError):
            names(data, probe_image(data))
        with pytest.raises(MediaError):
            names(data, ImageHeader("PNG", 160, 120))


@pytest.mark.parametrize("family", EDGE_MEDIA)
def test_headers_that_lie(family: str, names: Callable[[bytes, MediaHeader], list[str]]) -> None:
    """They are what Pillow reads, which leaves the rows empty that a file lacks: so transformers' processors see them.
    Planned by their real size, they are refused."""
    image = picture(160, 120, seed=1203)
    for lying in LYING.values():
        data = lying(image)
        read = file_of(Image.open(io.BytesIO(data)).convert("RGB"), "PNG")
        assert names(data, probe_image(data)) == names(read, probe_image(read))
        with pytest.raises(PlanMismatch, match="its plan says 160 by 120"):
            names(data, ImageHeader("PNG", 160, 120))


def sized_mp4(data: bytes, width: int, height: int) -> bytes:
    """A file of H.264 whose header says another size of its frames."""
    place = data.index(b"avc1", data.index(b"stsd")) + 28
    return data[:place] + struct.pack(">HH", width, height) + data[place + 4 :]


@pytest.fixture(scope="module")
def video() -> bytes:
    return clip(frames=12, width=96, height=64, seed=1204)


@pytest.mark.parametrize("family", [name for name in EDGE_MEDIA if "video" in FAMILIES[name].modalities])
def test_videos_that_cannot_be_used(
    family: str, video: bytes, names: Callable[[bytes, MediaHeader], list[str]]
) -> None:
    assert names(video, probe_video(video))
    sizeless = sized_mp4(video, 0, 0)
    assert names(sizeless, probe_video(sizeless)) == names(video, probe_video(video)), "the track's header has it, too"
    for width, height in ((48, 64), (960, 640)):
        lying = sized_mp4(video, width, height)
        with pytest.raises(MediaMismatch, match=f"its header says {width} by {height}"):
            names(lying, probe_video(lying))
    for cut in (video[: len(video) * 2 // 3], b"no video at all", b""):
        with pytest.raises(MediaError):
            names(cut, probe_video(cut))


SOUND = AudioHeader("WAV", 16_000, 1, 16_000)


@pytest.mark.parametrize("family", [*EDGE_MEDIA, *HEARING])
def test_media_that_the_family_lacks_or_that_are_empty(family: str) -> None:
    planner, modalities = served_parts(family)[0], FAMILIES[family].modalities
    for modality, header in (("image", ImageHeader("PNG", 64, 64)), ("audio", SOUND), ("video", CLIP)):
        if modality in modalities:
            assert planner.plan(header).is_whole
        else:
            with pytest.raises(UnsupportedMedia, match=f"the model takes no {modality}"):
                planner.plan(header)
    for size in ((0, 0), (64, 0), (0, 64)):
        for empty in (ImageHeader("PNG", *size), VideoHeader("MP4", *size, 10, 25.0)):
            with pytest.raises(MediaError, match=r"both sides must be at least 1|takes no videos"):
                planner.plan(empty)


@pytest.mark.slow
@pytest.mark.parametrize("family", EDGE_MEDIA)
def test_a_service_lives_on(tmp_path: Path, family: str) -> None:
    """Each file is refused with a status of the client's, and names its field; the next request is answered as
    before. No item, page or block is left."""
    image = picture(160, 120, seed=1203)
    good = [image_part(file_of(image, "PNG")), text_part("What is it?")]
    field = "messages[0].content[0]"
    with served(make_checkpoint(tmp_path / "model", family)) as service:
        before = service.text(good)
        refused = [service.post([image_part(damaged(image))]) for damaged in DAMAGED.values()]
        refused += [service.post([image_part(png(Image.new("RGB", (900, 3))))])]
        for response in refused:
            assert the_error(response, 400, f"{field}.image_url.url")
        too_large = taller_png(file_of(Image.new("RGB", (60_000, 1)), "PNG"), 50_000)
        assert "50000000" in the_error(service.post([image_part(too_large)]), 413, f"{field}.image_url.url")
        for options in ({"no_such_option": 1}, {"max_pixels": "many"}, {"fps": -1}):
            name = f"mm_processor_kwargs.{next(iter(options))}"
            assert the_error(service.post(good, mm_processor_kwargs=options), 400, name)
        for kind, url in (("audio_url", "data:audio/wav;base64,UklGRg=="), ("video_url", "data:video/mp4;base64,AAAA")):
            part = {"type": kind, kind: {"url": url}}
            assert the_error(service.post([part]), 400, f"{field}.{kind}.url")
        assert service.text(good) == before
        service.settle()


@pytest.mark.parametrize("family", EDGE_MEDIA)
def test_some_parts_are_those_of_all(family: str) -> None:
    planner, preprocess = served_parts(family)
    modalities, source = FAMILIES[family].modalities, random.Random(7)
    media: list[tuple[bytes, MediaHeader, AudioHeader | None]] = []
    for size in ((640, 410), (90, 300)):
        data = png(picture(*size, seed=1400))
        media.append((data, probe_image(data), None))
    if "video" in modalities:
        data = clip(frames=20, width=96, height=64, seed=1401)
        media.append((data, probe_video(data), None))
    if "audio" in modalities:
        data = sound("wav", tone(1.3, 16_000))
        media.append((data, probe_audio(data), None))
    if planner.audio_in_video:
        data = clip(frames=30, width=64, height=64, sound=tone(3, 48_000))
        media.append((data, probe_video(data), probe_audio(data)))
    for data, header, heard in media:
        plan = planner.plan(header, ItemContext(sound=heard))
        names = [part.name for part in preprocess(data, plan)]
        assert len(names) == plan.num_parts
        for count in {1, plan.num_parts // 2, plan.num_parts} - {0}:
            some = sorted(source.sample(range(plan.num_parts), count))
            assert [part.name for part in preprocess(data, plan, some)] == [names[number] for number in some]
