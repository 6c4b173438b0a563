"""Videos are sampled, resized, cut and timed as transformers' own processor does it: against what it made of the same
frames where torchvision can be imported (``golden/make_videos.py``)."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from tests.families.golden.make_videos import SIZE, TEXT, video
from tests.families.test_qwen3_vl_preprocess import CONFIG
from triptych.errors import BadMediaSize, CheckpointError, UnsupportedMedia
from triptych.families.base import TowerInput
from triptych.families.qwen3_vl.plan import Qwen3VLPlanner
from triptych.families.qwen3_vl.preprocess import Qwen3VLPreprocessor
from triptych.families.qwen3_vl.video import VideoGeometry
from triptych.media import frames
from triptych.types import FrameSampling, ItemPlan, PixelBounds, VideoHeader

GOLDEN = Path(__file__).parent / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "qwen3_vl_videos.json").read_text())
IMAGES = {"size": {"shortest_edge": 4096, "longest_edge": 65536}}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray[Any, Any]]:
    return load_file(GOLDEN / "qwen3_vl_videos.safetensors")


def packed(pixels: np.ndarray[Any, Any], rate: float = 2.0) -> bytes:
    files = []
    for frame in pixels:
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "PNG", compress_level=0)
        files.append(out.getvalue())
    return frames.pack_frames(frames.PackedFrames(rate, files))


def plan_of(case: dict[str, Any]) -> tuple[Qwen3VLPlanner, ItemPlan]:
    planner = Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE, **case["settings"]})
    header = VideoHeader(frames.FORMAT, case["width"], case["height"], case["frames"], case["rate"])
    return planner, planner.plan(header)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_plans_are_the_references(number: int) -> None:
    case = CASES[number]
    planner, plan = plan_of(case)
    assert list(plan.frames) == case["indices"]
    assert list(plan.grid) == case["grid"]
    spelling = {1: "<|image_pad|>", 2: "<|video_pad|>", 3: "<|vision_start|>", 4: "<|vision_end|>"}
    text = TEXT.replace("<|video_pad|>", planner.placeholder(plan, spelling.__getitem__))
    for rows in planner.runs(plan):
        text = text.replace("<|video_pad|>", f"<{rows} rows>", 1)
    assert text == case["text"]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_patches_are_the_references_bit_for_bit(number: int, golden: dict[str, np.ndarray[Any, Any]]) -> None:
    case = CASES[number]
    _, plan = plan_of(case)
    data = packed(video(number, case["frames"], case["height"], case["width"]))
    parts = list(Qwen3VLPreprocessor(CONFIG, IMAGES, {"size": SIZE, **case["settings"]})(data, plan))
    assert [part.grid for part in parts] == [(1, *plan.grid[1:])] * plan.grid[0]
    made = np.concatenate([part.patches for part in parts]).reshape(-1, 3, 512)
    table, numbers = golden[f"table{number}"], golden[f"patches{number}"]
    expected = np.stack([table[channel][numbers[:, channel]] for channel in range(3)], axis=1)
    np.testing.assert_array_equal(made.view(np.uint32), expected.view(np.uint32))


def parts_of(pixels: np.ndarray[Any, Any]) -> list[TowerInput]:
    data = packed(pixels)
    header = VideoHeader(frames.FORMAT, pixels.shape[2], pixels.shape[1], len(pixels), 2.0, chosen=True)
    plan = Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE}).plan(header)
    return list(Qwen3VLPreprocessor(CONFIG, IMAGES, {"size": SIZE})(data, plan))


def test_parts_that_look_alike_have_one_name_and_others_have_others() -> None:
    pixels = video(1, 6, 64, 64)
    names = [part.name for part in parts_of(pixels[[0, 1, 2, 3, 0, 1]])]
    assert names[0] == names[2] != names[1]
    assert names[:2] == [part.name for part in parts_of(pixels[[0, 1, 2, 3, 4, 5]])][:2]
    assert names[0] not in {part.name for part in parts_of(pixels[[1, 0, 2, 3, 1, 0]])}


def test_one_frame_is_seen_twice() -> None:
    planner = Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE})
    plan = planner.plan(VideoHeader("MP4", 64, 64, 1, 30.0))
    assert plan.frames == (0, 0)
    assert plan.grid[0] == 1
    (part,) = parts_of(video(1, 1, 64, 64))
    first, second = part.patches.reshape(-1, 3, 2, 256).transpose(2, 0, 1, 3)
    np.testing.assert_array_equal(first, second)


def test_a_request_has_its_own_sampling_and_bounds() -> None:
    planner = Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE})
    header = VideoHeader("MP4", 640, 480, 300, 30.0)
    assert len(planner.plan(header).frames) == 20
    assert len(planner.plan(header, sampling=FrameSampling(fps=1.0)).frames) == 10
    assert len(planner.plan(header, sampling=FrameSampling(num_frames=7)).frames) == 7
    small = planner.plan(header, PixelBounds(max_pixels=20 * 32 * 32))
    assert small.grid == (10, 2, 2)
    with pytest.raises(UnsupportedMedia, match="exclude each other"):
        planner.plan(header, sampling=FrameSampling(fps=1.0, num_frames=7))
    with pytest.raises(UnsupportedMedia, match="769 is more than the model takes, 768"):
        planner.plan(header, sampling=FrameSampling(num_frames=769))
    with pytest.raises(BadMediaSize, match="exceeds the model's own"):
        planner.plan(header, PixelBounds(max_pixels=10**9))
    with pytest.raises(BadMediaSize, match="200-fold"):
        planner.plan(VideoHeader("MP4", 20_000, 32, 300, 30.0))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"size": 5}, "size must be"),
        ({"size": {"shortest_edge": 1}}, "longest_edge"),
        ({"fps": 0}, "fps"),
        ({"max_frames": "a"}, "max_frames"),
        ({"num_frames": -1}, "num_frames"),
    ],
)
def test_settings_that_can_not_be_planned_by(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE} | setting)


def test_a_filter_that_is_not_served() -> None:
    with pytest.raises(CheckpointError, match="resample 1 is not served for videos"):
        Qwen3VLPreprocessor(CONFIG, IMAGES, {"resample": 1})


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 768), st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([True, False]))
def test_every_size_keeps_the_bounds(num_frames: int, height: int, width: int, capped: bool) -> None:
    """The model's own bounds, as published: what is planned is what buffers are made for."""
    config = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "cap_pixels_per_frame": capped}
    geometry = VideoGeometry.from_config(config, 32, 2)
    try:
        resized = geometry.resized(num_frames, height, width)
    except BadMediaSize:
        assert max(height, width) > 200 * min(height, width) or min(height, width) < 32
        return
    assert resized[0] % 32 == resized[1] % 32 == 0
    assert num_frames // 2 * 2 * resized[0] * resized[1] <= 25165824 or 32 in resized
