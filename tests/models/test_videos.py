"""Videos are sampled, resized, cut and timed like transformers' processor, against its stored results for the same
frames (``golden/make_videos.py``, which needs torchvision)."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.models.golden.make_videos import SIZES, TEXT, digest, family_of, settings_of, video
from tests.support.families import VIDEO_CASES
from tests.support.planners import CONFIG
from tests.support.tiny import IDS, PREPROCESSOR, TINY
from triptych.errors import BadMediaSize, CheckpointError, UnsupportedMedia
from triptych.media import frames
from triptych.models.base import EncoderInput, Planner
from triptych.models.qwen2_vl.plan import Qwen2VLPlanner
from triptych.models.qwen3_vl.plan import Qwen3VLPlanner
from triptych.models.qwen3_vl.preprocess import Qwen3VLPreprocessor
from triptych.models.registry import FAMILIES, resolve
from triptych.models.shared.video import (
    IntervalStartSampling,
    PerFrameGeometry,
    PerVideoGeometry,
    VideoGeometry,
    sampled_frames,
)
from triptych.types import FrameSampling, ItemContext, ItemPlan, PixelBounds, Placement, Span, VideoHeader

TIMED = [number for number, case in enumerate(VIDEO_CASES) if case["seconds"] is not None]
IMAGES = {"size": {"shortest_edge": 4096, "longest_edge": 65536}}
SIZE = SIZES["qwen3_vl"]
SPELLING: dict[int | str, str] = {1: "<|image_pad|>", 2: "<|video_pad|>", 3: "<|vision_start|>", 4: "<|vision_end|>"}
SPELLING |= {token_id: token for token, token_id in IDS.items()}


def config_of(family: str) -> dict[str, Any]:
    return CONFIG if family == "qwen3_vl" else TINY[family].config


def packed(pixels: np.ndarray[Any, Any], rate: float = 2.0) -> bytes:
    files = []
    for frame in pixels:
        out = io.BytesIO()
        Image.fromarray(frame).save(out, "PNG", compress_level=0)
        files.append(out.getvalue())
    return frames.pack_frames(frames.PackedFrames(rate, files))


def plan_of(case: dict[str, Any]) -> tuple[Planner, ItemPlan]:
    family = family_of(case)
    planner: Planner = resolve(FAMILIES[family].planner)(config_of(family), IMAGES, settings_of(case))
    size = case["width"], case["height"]
    header = VideoHeader(frames.FORMAT, *size, case["frames"], case["rate"], presampled=case.get("chosen", False))
    return planner, planner.plan(header, ItemContext(sampling=FrameSampling(**case.get("asked", {}))))


@pytest.mark.parametrize("number", range(len(VIDEO_CASES)))
def test_plans_equal_the_reference(number: int) -> None:
    case = VIDEO_CASES[number]
    planner, plan = plan_of(case)
    assert list(sampled_frames(plan)) == case["indices"]
    assert list(plan.grid) == case["grid"]
    text = TEXT.replace("<|video_pad|>", planner.placeholder(plan, SPELLING.__getitem__))
    for rows in planner.runs(plan):
        text = text.replace("<|video_pad|>", f"<{rows} rows>", 1)
    assert text == case["text"]


@pytest.mark.parametrize("number", range(len(VIDEO_CASES)))
def test_patches_equal_the_reference_bit_for_bit(number: int) -> None:
    case = VIDEO_CASES[number]
    family = family_of(case)
    _, plan = plan_of(case)
    data = packed(video(number, case["frames"], case["height"], case["width"]))
    preprocess = resolve(FAMILIES[family].preprocessor or "")(config_of(family), IMAGES, settings_of(case))
    parts = list(preprocess(data, plan))
    assert [part.grid for part in parts] == [(1, *plan.grid[1:])] * plan.grid[0]
    assert digest(np.concatenate([part.patches for part in parts])) == case["digest"]


@pytest.mark.parametrize("number", TIMED)
def test_temporal_distances_equal_the_reference(number: int) -> None:
    case = VIDEO_CASES[number]
    planner, plan = plan_of(case)
    placement = Placement((Span(0, plan.rows),))
    times = planner.positions(plan.rows, [placement], [plan]).prompt[0].reshape(plan.grid[0], -1)
    assert (times == times[:, :1]).all()
    expected = torch.arange(plan.grid[0]) * torch.tensor(case["seconds"])
    rounded = {"qwen2_5_vl": 2, "qwen2_5_omni": 13}  # tokens_per_second, position_id_per_seconds
    if family_of(case) in rounded:
        np.testing.assert_array_equal(times[:, 0], (expected * rounded[family_of(case)]).long())
    else:
        np.testing.assert_allclose(times[:, 0], expected * 13, rtol=1e-6)  # its position_id_per_seconds


def parts_of(pixels: np.ndarray[Any, Any]) -> list[EncoderInput]:
    data = packed(pixels)
    header = VideoHeader(frames.FORMAT, pixels.shape[2], pixels.shape[1], len(pixels), 2.0, presampled=True)
    plan = Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE}).plan(header)
    return list(Qwen3VLPreprocessor(CONFIG, IMAGES, {"size": SIZE})(data, plan))


def test_names_identify_the_content_of_a_part() -> None:
    pixels = video(1, 6, 64, 64)
    names = [part.name for part in parts_of(pixels[[0, 1, 2, 3, 0, 1]])]
    assert names[0] == names[2] != names[1]
    assert names[:2] == [part.name for part in parts_of(pixels[[0, 1, 2, 3, 4, 5]])][:2]
    assert names[0] not in {part.name for part in parts_of(pixels[[1, 0, 2, 3, 1, 0]])}


def test_a_single_frame_is_repeated() -> None:
    planner = Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE})
    plan = planner.plan(VideoHeader("MP4", 64, 64, 1, 30.0))
    assert sampled_frames(plan) == (0, 0)
    assert plan.grid[0] == 1
    (part,) = parts_of(video(1, 1, 64, 64))
    first, second = part.patches.reshape(-1, 3, 2, 256).transpose(2, 0, 1, 3)
    np.testing.assert_array_equal(first, second)


def test_a_request_has_its_own_sampling_and_bounds() -> None:
    planner = Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE})
    header = VideoHeader("MP4", 640, 480, 300, 30.0)
    assert len(sampled_frames(planner.plan(header))) == 20
    assert len(sampled_frames(planner.plan(header, ItemContext(sampling=FrameSampling(fps=1.0))))) == 10
    assert len(sampled_frames(planner.plan(header, ItemContext(sampling=FrameSampling(num_frames=7))))) == 7
    small = planner.plan(header, ItemContext(PixelBounds(max_pixels=20 * 32 * 32)))
    assert small.grid == (10, 2, 2)
    with pytest.raises(UnsupportedMedia, match="exclude each other"):
        planner.plan(header, ItemContext(sampling=FrameSampling(fps=1.0, num_frames=7)))
    with pytest.raises(UnsupportedMedia, match="769 is more than the model takes, 768"):
        planner.plan(header, ItemContext(sampling=FrameSampling(num_frames=769)))
    with pytest.raises(BadMediaSize, match="an area of at most 1000000000 pixels exceeds the model's own"):
        planner.plan(header, ItemContext(PixelBounds(max_pixels=10**9)))
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
def test_invalid_video_settings_name_the_key(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Qwen3VLPlanner(CONFIG, IMAGES, {"size": SIZE} | setting)


def test_unsupported_filter_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="resample 0 is not served"):
        Qwen3VLPreprocessor(CONFIG, IMAGES, {"resample": 0})


@pytest.mark.parametrize(
    ("header", "sampling", "seen"),
    [
        (VideoHeader("MP4", 64, 64, 1, 30.0), {}, (0,)),
        (VideoHeader("MP4", 64, 64, 3, 30.0), {}, (0, 1)),
        (VideoHeader("MP4", 64, 64, 3, 30.0), {"num_frames": 8}, (0, 1)),
        (VideoHeader("MP4", 64, 64, 3, 30.0), {"num_frames": 1}, (0,)),
        (VideoHeader("MP4", 64, 64, 1, 30.0, presampled=True), {}, (0,)),
        (VideoHeader("MP4", 64, 64, 100, 10.0), {"fps": 0.5}, (0, 25, 50, 75)),
    ],
)
def test_no_more_frames_than_the_video_has(
    header: VideoHeader, sampling: dict[str, Any], seen: tuple[int, ...]
) -> None:
    """The reference rejects most of these."""
    planner = Qwen2VLPlanner(TINY["qwen2_vl"].config, PREPROCESSOR, PREPROCESSOR)
    plan = planner.plan(header, ItemContext(sampling=FrameSampling(**sampling)))
    assert sampled_frames(plan) == seen
    assert plan.grid == ((len(seen) + 1) // 2, 4, 4)


@settings(max_examples=300)
@given(st.integers(1, 384), st.integers(1, 8000))
def test_equal_intervals_equal_the_reference(patches: int, frames: int) -> None:
    """The reference sometimes takes one index too many and fails. For many frames, its float32 is too imprecise for
    fractional steps, and its result depends on the CPU's vector width."""
    sampling = IntervalStartSampling.from_config({"num_frames": 2 * patches}, 2)
    count = min(2 * patches, frames // 2 * 2) or 1
    expected = torch.arange(0, frames, frames / count).int().tolist()[:count]
    assert list(sampling.frames(VideoHeader("MP4", 64, 64, frames, 25.0))) == expected


def test_null_settings_mean_the_default() -> None:
    """``save_pretrained`` writes them."""
    null = dict.fromkeys(("fps", "num_frames", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens"))
    header = VideoHeader("MP4", 640, 480, 300, 30.0)
    for family in ("qwen2_vl", "qwen3_vl"):
        make = resolve(FAMILIES[family].planner)
        silent, said = ({"size": SIZES[family]} | config for config in ({}, null))
        config = config_of(family)
        assert make(config, IMAGES, said).plan(header) == make(config, IMAGES, silent).plan(header)


@settings(max_examples=300)
@given(
    st.sampled_from([PerVideoGeometry, PerFrameGeometry]),
    st.integers(2, 768),
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.sampled_from([True, False]),
)
def test_every_size_is_within_bounds(
    kind: type[VideoGeometry], num_frames: int, height: int, width: int, capped: bool
) -> None:
    """The published bounds of the model, for which buffers are sized."""
    together = kind is PerVideoGeometry
    most = 25165824 if together else 12845056
    config = {"size": {"shortest_edge": 4096, "longest_edge": most}, "cap_pixels_per_frame": capped}
    geometry = kind.from_config(config, 32, 2)
    try:
        resized = geometry.resized(num_frames, height, width)
    except BadMediaSize:
        assert max(height, width) > 200 * min(height, width) or (together and min(height, width) < 32)
        return
    assert resized[0] % 32 == resized[1] % 32 == 0
    pixels = resized[0] * resized[1]
    assert (num_frames // 2 * 2 if together else 1) * pixels <= most or 32 in resized
    if capped and not together:
        assert num_frames // 2 * pixels <= max(128_000 * 32 * 32 * 0.9, 4096 * 1.05 * num_frames) or 32 in resized
