"""MiniCPM-V 4.6: plans, text, pixels, rows and frames as transformers has them, options, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.video_utils import VideoMetadata

from tests.models.golden.make_minicpm_videos import FILE, settings_of
from tests.models.golden.make_videos import digest, video
from tests.support.checkpoints import load_reference
from tests.support.clips import packed
from tests.support.family_parts import config_of, inputs_of, tower_of
from tests.support.forward import assert_close, assert_rows
from tests.support.image_cases import picture, png
from tests.support.tiny import MINICPMV4_6, SLICE_IDS, SLICES, make_tiny
from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.media import frames
from triptych.models.base import ModelConfig
from triptych.models.minicpmv.encoder import shares
from triptych.models.minicpmv.navit import places
from triptych.models.minicpmv.plan import MiniCPMV46Planner
from triptych.models.minicpmv.preprocess import MiniCPMV46Preprocessor
from triptych.models.minicpmv.sampling import SecondsSampling, sliced_frames
from triptych.prompt.probe import probe_image
from triptych.prompt.prompt import PromptBuilder
from triptych.types import MODEL_SAMPLING, FrameSampling, ImageHeader, ItemContext, ItemPlan, PixelBounds, VideoHeader

FAMILY = "minicpmv4_6"
CONFIG: ModelConfig = MINICPMV4_6.config
RELEASED = {"scale_resolution": 448, "max_slice_nums": 9}
DIVISORS = {"16x": 16, "4x": 4}
VIDEO_CASES: list[dict[str, Any]] = json.loads(FILE.read_text())


def reference_of(settings: dict[str, Any]) -> Any:
    return MiniCPMV4_6ImageProcessorPil(**{name: it for name, it in settings.items() if name != "image_processor_type"})


def processor_of(images: Any) -> Any:
    """The reference's processor without a tokenizer; a placeholder is ``#``."""
    made = cast(Any, MiniCPMV4_6Processor.__new__(MiniCPMV4_6Processor))
    made.slice_mode, made.image_token = images.slice_mode, "#"
    made.image_start_token, made.image_end_token = "<image>", "</image>"
    made.slice_start_token, made.slice_end_token = "<slice>", "</slice>"
    made.image_id_start_token, made.image_id_end_token = "<image_id>", "</image_id>"
    return made


def text_of(planner: MiniCPMV46Planner, plan: ItemPlan) -> str:
    """Our text, with all placeholders of each run."""
    pieces = planner.placeholder(plan, lambda _: "#").split("#")
    runs = ["#" * count for count in planner.runs(plan)]
    return "".join(one for pair in zip(pieces, [*runs, ""], strict=True) for one in pair)


def sizes_of(images: Any, width: int, height: int) -> dict[str, Any]:
    """What the reference's image processor says of an image, by its own steps and without the pixels."""
    mode, scale, patch = images.downsample_mode, images.scale_resolution, images.patch_size
    grid = images.get_sliced_grid((height, width), images.max_slice_nums, scale) if images.slice_mode else None
    whole = images.find_best_resize((height, width), scale, patch, mode, allow_upscale=grid is None)
    sizes = [[side // patch for side in whole]]
    if grid is not None:
        refined = images.get_refine_size((height, width), grid, scale, patch, mode, allow_upscale=True)
        sizes += [[refined[axis] // grid[axis] // patch for axis in (0, 1)]] * (grid[0] * grid[1])
    return {"grids": [grid or [0, 0]], "num_patches_per_image": [len(sizes)], "target_sizes": np.array(sizes)}


def check_plan(planner: MiniCPMV46Planner, images: Any, width: int, height: int, **options: Any) -> None:
    plan = planner.plan(ImageHeader("PNG", width, height), ItemContext(options=options))
    expected = sizes_of(images, width, height)
    divisor = DIVISORS[images.downsample_mode]
    counts = expected["target_sizes"].prod(-1)
    assert [(part.patches, part.rows) for part in plan.parts] == [(count, count // divisor) for count in counts]
    assert plan.is_whole
    text = processor_of(images).replace_image_token(expected, 0, image_token_divisor=divisor)
    assert text_of(planner, plan) == text


def plans_are_the_processors(count: int) -> None:
    """Of released sizes, with random options."""
    source = random.Random(1)
    config = config_of(FAMILY, vision_config={"patch_size": 14, "image_size": 980})
    planner = MiniCPMV46Planner(config, RELEASED)
    for number in range(count):
        longest = source.choice((300, 1000, 4000))
        width, height = source.randint(longest // 40, longest), source.randint(longest // 40, longest)
        options: dict[str, Any] = {}
        if number % 2:
            options = {"max_slice_nums": source.randint(1, 36), "downsample_mode": source.choice(("4x", "16x"))}
        check_plan(planner, reference_of(RELEASED | options), width, height, **options)


def test_plans_are_the_processors() -> None:
    plans_are_the_processors(400)
    for settings in ({"slice_mode": False}, {"max_slice_nums": 1}, {"downsample_mode": "4x"}):
        check_plan(MiniCPMV46Planner(CONFIG, SLICES | settings), reference_of(SLICES | settings), 300, 200)
    whole = {"slice_mode": False}
    asked = reference_of(SLICES | whole | {"max_slice_nums": 9})
    check_plan(MiniCPMV46Planner(CONFIG, SLICES | whole), asked, 300, 200, max_slice_nums=9)


@pytest.mark.slow
def test_many_plans_are_the_processors() -> None:
    plans_are_the_processors(3000)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(("number", "case"), list(enumerate(VIDEO_CASES)))
def test_videos_are_the_processors(number: int, case: dict[str, Any], asked: bool) -> None:
    """Whether the file or a request bounds the slices."""
    settings = settings_of(case)
    options = {"max_slice_nums": settings.pop("max_slice_nums")} if asked else {}
    planner, preprocess = MiniCPMV46Planner(CONFIG, SLICES, settings), MiniCPMV46Preprocessor(CONFIG, SLICES, settings)
    size, count = (case["width"], case["height"]), case["frames"]
    plan = planner.plan(VideoHeader(frames.FORMAT, *size, count, case["rate"]), ItemContext(options=options))
    assert sliced_frames(plan)[0] == tuple(case["indices"])
    assert plan.is_whole
    assert text_of(planner, plan) == case["text"]
    parts = list(preprocess(packed(video(number, count, *size[::-1])), plan))
    assert [list(part.grid[1:]) for part in parts] == case["sizes"]
    assert digest(np.concatenate([part.patches for part in parts])) == case["digest"]


def test_a_request_may_have_fewer_rows_of_a_frame() -> None:
    planner, header = MiniCPMV46Planner(CONFIG, SLICES, SLICES), VideoHeader("MP4", 160, 90, 40, 10.0)
    own, fewer, none = (
        planner.plan(header, ItemContext(options={"max_slice_nums": most} if most else {})) for most in (0, 2, 1)
    )
    assert [plan.num_parts for plan in (own, fewer, none)] == [20, 12, 4]
    assert own.rows > fewer.rows > none.rows


def test_frames_are_the_processors() -> None:
    source, reference = random.Random(4), MiniCPMV4_6VideoProcessor()
    for _ in range(100):
        most, rate = source.choice((1, 5, 128)), source.choice((1.0, 10.0, 24.0, 29.97002997002997, 60.0))
        count = source.randint(1, 9000)
        sampling = SecondsSampling.from_config({"max_num_frames": most}, 1).for_request(MODEL_SAMPLING)
        found = sampling.frames(VideoHeader("MP4", 64, 64, count, rate))
        metadata = VideoMetadata(total_num_frames=count, fps=rate, duration=count / rate)
        assert list(found) == reference.sample_frames(metadata, max_num_frames=most)


def test_frames_that_a_request_asks_for() -> None:
    planner = MiniCPMV46Planner(CONFIG, SLICES, SLICES)

    def seen(header: VideoHeader, **asked: Any) -> tuple[int, ...]:
        return sliced_frames(planner.plan(header, ItemContext(sampling=FrameSampling(**asked))))[0]

    header = VideoHeader("MP4", 64, 64, 40, 10.0)
    assert seen(header) == (0, 10, 20, 30)
    assert seen(header, fps=2.0) == (0, 5, 10, 15, 20, 25, 30, 35)
    assert seen(header, num_frames=3) == (0, 19, 39)
    assert seen(header, num_frames=100) == tuple(range(40))
    assert seen(VideoHeader("MP4", 64, 64, 3, 10.0, presampled=True)) == (0, 1, 2)
    assert len(seen(VideoHeader("MP4", 64, 64, 10**9, 0.001))) == 128
    dense = SecondsSampling.from_config({"max_num_frames": 4}, 1).for_request(FrameSampling(fps=240.0))
    assert dense.frames(VideoHeader("MP4", 64, 64, 3, 60.0)) == (0, 0, 0, 0)  # shorter than a tenth of a second
    for asked in ({"num_frames": 129}, {"num_frames": 3, "fps": 1.0}):
        with pytest.raises(UnsupportedMedia):
            seen(header, **asked)


IMAGES = [picture(200, 150, 1), picture(31, 90, 2), picture(300, 9, 4), picture(5, 9, 5)]


@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_rows(tmp_path: Path, mode: str) -> None:
    folder = make_tiny(tmp_path, FAMILY)
    model = cast(Any, load_reference(folder, torch.float32))
    processed = reference_of(SLICES | {"downsample_mode": mode})([IMAGES], return_tensors="pt")
    with torch.inference_mode():
        expected = torch.cat(
            model.get_image_features(processed["pixel_values"], processed["target_sizes"], mode).pooler_output
        )
    rows = torch.cat(
        tower_of(folder).encode(inputs_of(FAMILY, *IMAGES, context=ItemContext(options={"downsample_mode": mode})))
    )
    assert_rows(rows, expected)


def test_rows_of_both_modes_together(tmp_path: Path) -> None:
    tower = tower_of(make_tiny(tmp_path, FAMILY))
    context = ItemContext(options={"downsample_mode": "4x"})
    coarse, fine = inputs_of(FAMILY, IMAGES[0]), inputs_of(FAMILY, IMAGES[0], context=context)
    mixed = [part for pair in zip(coarse, fine, strict=True) for part in pair]
    found, alone = tower.encode(mixed), [*tower.encode(coarse), *tower.encode(fine)]
    assert_close(torch.cat([*found[0::2], *found[1::2]]), torch.cat(alone), 1e-6)
    assert len({part.name for part in mixed}) == len(mixed)


def test_places_of_released_sizes() -> None:
    from transformers.vision_utils import get_vision_nearest_position_ids

    for rows, columns in [(32, 32), (4, 444), (28, 36), *((size, 100 - size) for size in range(1, 100))]:
        expected = get_vision_nearest_position_ids(torch.tensor([[rows, columns]]), 70)
        assert torch.equal(places(rows, columns, 70, shares), expected)


def test_an_input_that_isnt_planned(tmp_path: Path) -> None:
    data, preprocess = png(picture(300, 200, 1)), MiniCPMV46Preprocessor(CONFIG, SLICES, SLICES)
    plan = MiniCPMV46Planner(CONFIG, SLICES).plan(probe_image(data))
    first = plan.parts[0]
    for wrong in (
        replace(plan, parts=plan.parts[:-1]),
        replace(plan, parts=(replace(first, payload=()), *plan.parts[1:])),
        replace(plan, parts=(replace(first, payload=(10**6, 10**6)), *plan.parts[1:])),
        replace(plan, parts=(replace(first, payload=(1, 5)), *plan.parts[1:])),
        replace(plan, parts=(replace(first, runs=((0, 5),)), *plan.parts[1:])),
    ):
        with pytest.raises(PlanMismatch):
            next(preprocess(data, wrong))
    moving = MiniCPMV46Planner(CONFIG, SLICES, SLICES).plan(VideoHeader(frames.FORMAT, 90, 60, 4, 2.0))
    with pytest.raises(PlanMismatch):
        next(preprocess(packed(video(1, 4, 60, 90)), replace(moving, parts=moving.parts[1:])))
    first = moving.parts[0]
    for payload in ((), (0,), (0, 10**6, 10**6), (0, 5, 1)):
        with pytest.raises(PlanMismatch):
            wrong = replace(moving, parts=(replace(first, payload=payload), *moving.parts[1:]))
            next(preprocess(packed(video(1, 4, 60, 90)), wrong))
    alike = tuple(replace(part, payload=part.payload and (part.payload[0], 9, 9)) for part in moving.parts)
    with pytest.raises(PlanMismatch, match="9 by 9"):
        next(preprocess(packed(video(1, 4, 60, 90)), replace(moving, parts=alike)))
    tower, [part, *_] = tower_of(make_tiny(tmp_path, FAMILY)), inputs_of(FAMILY, picture(40, 40, 1))
    for bad in ({"grid": (1, 4, 35)}, {"layout": (3,)}, {"grid": (1, 6, 24)}):
        with pytest.raises(PlanMismatch):
            tower.encode([replace(part, **bad)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slice_nums": 65}, "max_slice_nums"),
        ({"scale_resolution": 3}, "scale_resolution"),
        ({"scale_resolution": 10**6}, "scale_resolution"),
        ({"slice_mode": 1}, "slice_mode"),
        ({"patch_size": 14}, "patch_size"),
        ({"downsample_mode": "2x"}, "downsample_mode"),
        ({"downsample_mode": []}, "downsample_mode"),
    ],
)
def test_bad_processors(settings: dict[str, Any], message: str) -> None:
    for kind in (MiniCPMV46Planner, MiniCPMV46Preprocessor):
        for args in ((SLICES | settings, SLICES), (SLICES, SLICES | settings)):
            with pytest.raises(CheckpointError, match=message):
                kind(CONFIG, *args)
    with pytest.raises(CheckpointError, match="stack_frames"):
        MiniCPMV46Planner(CONFIG, SLICES, {"stack_frames": 2})


def test_what_isnt_planned() -> None:
    planner = MiniCPMV46Planner(CONFIG, SLICES, SLICES)
    for header, bounds, error in (
        (ImageHeader("PNG", 201, 1), PixelBounds(), BadMediaSize),
        (ImageHeader("PNG", 10_000, 10_000), PixelBounds(), MediaTooLarge),
        (ImageHeader("PNG", 100, 100), PixelBounds(min_pixels=100), UnsupportedMedia),
        (VideoHeader("MP4", 90, 90, 4, 2.0), PixelBounds(max_pixels=100), UnsupportedMedia),
    ):
        with pytest.raises(error):
            planner.plan(header, ItemContext(bounds))
    fewer = planner.plan(ImageHeader("PNG", 300, 290), ItemContext(PixelBounds(max_pixels=2 * 48 * 48)))
    assert fewer.num_parts == 3


def test_text_around_pieces(tmp_path: Path) -> None:
    """Images are numbered; equal ones have one key."""
    builder = PromptBuilder(make_tiny(tmp_path, FAMILY))
    image = {"type": "image", "data": png(picture(300, 200, 1))}
    text = {"type": "text", "text": "and"}
    prompt = builder.build([{"role": "user", "content": [image, text, image]}])
    first, second = prompt.items
    assert first.key == second.key
    numbers = [builder.tokenizer.id_of(digit) for digit in "01"]
    opening, closing = SLICE_IDS["<image_id>"], SLICE_IDS["</image_id>"]
    for item, number in zip(prompt.items, numbers, strict=True):
        start = item.placement.start
        assert prompt.tokens[start - 4 : start] == [opening, number, closing, SLICE_IDS["<image>"]]
        assert len(item.placement.spans) == item.plan.num_parts
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SLICES | {"use_image_id": False}))
    assert opening not in PromptBuilder(tmp_path).build([{"role": "user", "content": [image]}]).tokens
