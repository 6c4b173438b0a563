"""Kimi K2.5's videos: frames, text, pixels and rows as transformers and an independent implementation have them. What
transformers' video processor makes of videos is stored (``golden/make_kimi_videos.py``, which needs torchvision)."""

import json
import random
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from tests.models.golden.make_kimi_videos import CASES as ASKED
from tests.models.golden.make_kimi_videos import FILE, settings_of
from tests.models.golden.make_videos import digest, video
from tests.support.checkpoints import load_adapter, load_reference
from tests.support.clips import packed, picture
from tests.support.forward import assert_close, assert_rows
from tests.support.image_cases import png
from tests.support.kimi import kimi_k25_size, kimi_k25_video
from tests.support.tiny import OWN_TOWERS, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, InvalidRequest, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.media.frames import FORMAT, PackedFrames, pack_frames
from triptych.models.base import EncoderInput
from triptych.models.kimi.plan import KimiK25Planner
from triptych.models.kimi.preprocess import KimiK25Preprocessor
from triptych.models.kimi.video import ChunkSampling, timestamp
from triptych.models.shared.video import sampled_frames
from triptych.prompt.probe_video import probe_video
from triptych.prompt.prompt import PromptBuilder
from triptych.types import FrameSampling, ItemContext, PixelBounds, VideoHeader

TINY = OWN_TOWERS["kimi_k25"]
VIDEO: dict[str, Any] = TINY.video_preprocessor or {}
PUBLISHED: dict[str, Any] = {"in_patch_limit": 16384, "patch_size": 14, "patch_limit_on_one_side": 512}
PUBLISHED |= {"in_patch_limit_each_frame": 4096, "sample_fps": 2.0, "temporal_merge_kernel_size": 4}
PUBLISHED |= {"in_patch_limit_video": None, "timestamp_mode": "hh:mm:ss.fff", "max_num_frames_each_video": None}
PUBLISHED_FILE = {"media_proc_cfg": PUBLISHED}


def planner_of(settings: dict[str, Any] = VIDEO) -> KimiK25Planner:
    return KimiK25Planner(TINY.config, TINY.preprocessor or {}, settings)


def test_frames_are_the_references() -> None:
    """Transformers' function, and the published processor's rule."""
    source = random.Random(1)
    theirs, published = (ChunkSampling.from_config(one, 4) for one in (VIDEO, PUBLISHED_FILE))
    for _ in range(3000):
        rate = source.choice([2.0, 12.5, 24.0, 25.0, 29.97002997002997, 60.0])
        total, fps = source.randint(1, 16_000), source.choice([0.5, 1.0, 2.0])
        header, asked = VideoHeader("MP4", 96, 64, total, rate), FrameSampling(fps=fps)
        expected = default_sample_indices_fn(VideoMetadata(total_num_frames=total, fps=rate), fps=fps)
        assert list(theirs.for_request(asked).frames(header)) == expected.tolist()
        count = max(round(total * min(fps, rate) / rate), 1)
        numbers = np.linspace(0, total - 1, count).round().astype(int).tolist()
        assert list(published.for_request(asked).frames(header)) == numbers


def test_sizes_and_times_of_the_published_settings() -> None:
    planner = planner_of(PUBLISHED_FILE)
    plan = planner.plan(VideoHeader("MP4", 1920, 1080, 7250, 25.0))
    *_, width, height = kimi_k25_size(1920, 1080, 4096)
    assert (plan.resized_width, plan.resized_height) == (width, height)
    assert plan.grid == (145, height // 14, width // 14)
    assert [len(part.payload) for part in plan.parts] == [4] * 145
    assert planner.runs(plan) == [height * width // 28**2] * 145
    assert plan.is_whole
    text = planner.placeholder(plan, lambda _: "[]")
    assert text.startswith("00:00:00.000<|media_begin|>video<|media_content|>[]<|media_end|>00:00:02.000<|media")
    assert [timestamp(seconds) for seconds in (3661.5, 59.9994, 86_400.25)] == [
        "01:01:01.500",
        "00:00:59.999",
        "00:00:00.250",
    ]


def file_of(numbers: list[int], size: tuple[int, int], rate: float = 2.0) -> bytes:
    return pack_frames(PackedFrames(rate, [png(Image.fromarray(picture(number, *size))) for number in numbers]))


def inputs_of(data: bytes, context: ItemContext | None = None) -> list[EncoderInput]:
    plan = planner_of().plan(probe_video(data), context or ItemContext())
    return list(KimiK25Preprocessor(TINY.config, TINY.preprocessor or {}, VIDEO)(data, plan))


def row_by_row(part: EncoderInput) -> torch.Tensor:
    """Pixels [patches, 3, 14, 14], row by row and frame by frame."""
    frames, rows, columns = part.grid
    squares = torch.from_numpy(part.patches).view(frames, rows // 2, columns // 2, 2, 2, 3, 14, 14)
    return squares.transpose(2, 3).reshape(-1, 3, 14, 14)


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_as_the_reference(number: int) -> None:
    """Frames, text and pixels, whose bits are transformers' own."""
    case: dict[str, Any] = json.loads(FILE.read_text())[number]
    assert case.items() >= ASKED[number].items()
    planner = planner_of(settings := settings_of(case))
    size, rate, is_chosen = (case["width"], case["height"]), case["rate"], case.get("chosen", False)
    header = VideoHeader(FORMAT, *size, case["frames"], rate, presampled=is_chosen)
    plan = planner.plan(header, ItemContext(sampling=FrameSampling(**case.get("asked", {}))))
    assert list(sampled_frames(plan)) == case["indices"]
    assert planner.placeholder(plan, lambda _: "#") == re.sub("#+", "#", case["text"])
    assert planner.runs(plan) == [len(run) for run in re.findall("#+", case["text"])]
    data = packed(video(number, case["frames"], case["height"], case["width"]))
    parts = list(KimiK25Preprocessor(TINY.config, TINY.preprocessor or {}, settings)(data, plan))
    assert [list(part.grid) for part in parts] == case["grids"]
    assert digest(torch.cat([row_by_row(part) for part in parts]).numpy()) == case["digest"]


@pytest.mark.parametrize("size", [(80, 48), (30, 90), (13, 14), (200, 150)])
def test_pixels_and_rows(tmp_path: Path, size: tuple[int, int]) -> None:
    """Of two chunks of four frames and one of two, of a single frame, and of both in a batch."""
    folder = make_tiny(tmp_path, "kimi_k25")
    model = cast(Any, load_reference(folder, torch.float32))
    tower = load_adapter(folder).load_encoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], torch.device("cpu"))
    for numbers in (list(range(10)), [7]):
        expected = kimi_k25_video(VIDEO, [Image.fromarray(picture(number, *size)) for number in numbers])
        parts = inputs_of(file_of(numbers, size))
        assert [part.grid for part in parts] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
        assert_close(torch.cat([row_by_row(part) for part in parts]), expected["pixel_values"], 1e-6)
        with torch.inference_mode():
            rows = model.model.get_image_features(**expected).pooler_output
        for part, together, alone in zip(parts, tower.encode(parts), rows, strict=True):
            for ours in (together, tower.encode([part])[0]):
                assert_rows(ours, alone)


def test_names_of_chunks() -> None:
    """They depend on the order of frames, not on their times."""
    size = (40, 40)
    first, second, third = (
        inputs_of(file_of(numbers, size, rate))
        for numbers, rate in (([0, 1, 2, 3, 4], 2.0), ([0, 1, 2, 3, 5], 1.0), ([1, 0, 2, 3, 4], 2.0))
    )
    assert first[0].name == second[0].name != third[0].name
    assert first[1].name == third[1].name != second[1].name


def test_conversations(tmp_path: Path) -> None:
    builder = PromptBuilder(make_tiny(tmp_path, "kimi_k25"))
    assert builder.modalities == ["image", "video"]
    content = [{"type": "video", "data": file_of(list(range(6)), (28, 28))}, {"type": "text", "text": "?"}]
    prompt = builder.build([{"role": "user", "content": content}])
    text = builder.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
    chunks = [f"00:00:0{time}.000<|media_begin|>video<|media_content|><|image_pad|><|media_end|>" for time in (0, 2)]
    assert "".join(chunks) in text
    with pytest.raises(InvalidRequest, match="video_placeholder"):
        builder.build([{"role": "user", "content": "see <|kimi_k25_video_placeholder|>"}])


def test_options_of_requests() -> None:
    data = file_of(list(range(5)), (140, 140))
    bounds = PixelBounds(0, 4 * 28 * 28)
    parts = inputs_of(data, ItemContext(bounds))
    assert [part.grid for part in parts] == [(4, 4, 4), (1, 4, 4)]
    header = VideoHeader("MP4", 96, 64, 500, 25.0)
    plan = planner_of().plan(header, ItemContext(sampling=FrameSampling(num_frames=7)))
    assert [len(part.payload) for part in plan.parts] == [4, 3]
    with pytest.raises(UnsupportedMedia, match="num_frames 20000"):
        planner_of().plan(header, ItemContext(sampling=FrameSampling(num_frames=20_000)))
    with pytest.raises(BadMediaSize, match="the video is 2010 by 10"):
        planner_of().plan(VideoHeader("MP4", 2010, 10, 500, 25.0))
    assert len(sampled_frames(planner_of().plan(VideoHeader("MP4", 96, 64, 10**6, 2.0)))) == 16_384


def test_plans_that_are_refused() -> None:
    data = file_of(list(range(5)), (40, 40))
    plan = planner_of().plan(probe_video(data))
    preprocess = KimiK25Preprocessor(TINY.config, TINY.preprocessor or {}, VIDEO)
    for changes in (
        {"resized_height": plan.resized_height + 28},
        {"parts": (plan.parts[0], msgspec.structs.replace(plan.parts[1], payload=()))},
        {"parts": (msgspec.structs.replace(plan.parts[0], payload=(9,)), plan.parts[1])},
    ):
        with pytest.raises(PlanMismatch):
            list(preprocess(data, msgspec.structs.replace(plan, **changes)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temporal_patch_size": 5}, "a chunk of 5 frames"),
        ({"temporal_patch_size": 0}, "temporal_patch_size"),
        ({"media_proc_cfg": PUBLISHED | {"in_patch_limit_video": 655_360}}, "in_patch_limit_video"),
        ({"max_patches": "many"}, "max_patches"),
        ({"fps": -1}, "fps"),
    ],
)
def test_bad_processors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        planner_of(VIDEO | settings)
