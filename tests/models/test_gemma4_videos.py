"""Gemma 4's videos are sampled, resized and cut like transformers' processor does, against its stored results for the
same frames (``golden/make_gemma4_videos.py``, which needs torchvision)."""

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.models.golden.make_gemma4_videos import CASES as ASKED
from tests.models.golden.make_gemma4_videos import FILE, settings_of
from tests.models.golden.make_videos import digest, video
from tests.support.clips import packed
from tests.support.gemma4 import in_rows
from tests.support.tiny import GEMMA4, GEMMA_IDS
from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.media import frames
from triptych.models.gemma4.plan import Gemma4Planner
from triptych.models.gemma4.preprocess import Gemma4Preprocessor
from triptych.models.shared.video import sampled_frames
from triptych.types import FrameSampling, ItemContext, ItemPlan, PixelBounds, VideoHeader

CONFIG = GEMMA4.config | {"vision_config": GEMMA4.config["vision_config"] | {"position_embedding_size": 420}}
PROCESSOR: dict[str, Any] = GEMMA4.preprocessor or {}
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
TEXTS = {
    GEMMA_IDS[ours]: theirs
    for ours, theirs in (("<|image>", "<|image>"), ("<image|>", "<image|>"), ("<|video_pad|>", "<|video|>"))
}
CLIP = VideoHeader("MP4", 96, 64, 600, 30.0)


def plan_of(case: dict[str, Any]) -> tuple[Gemma4Planner, ItemPlan]:
    planner = Gemma4Planner(CONFIG, PROCESSOR, settings_of(case))
    asked = {name: case[name] for name in ("num_frames", "fps") if name in case}
    header = VideoHeader(
        *(frames.FORMAT, case["width"], case["height"], case["frames"], case["rate"]),
        presampled=case.get("chosen", False),
    )
    return planner, planner.plan(header, ItemContext(sampling=FrameSampling(**asked)))


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_as_the_reference(number: int) -> None:
    case = CASES[number]
    planner, plan = plan_of(case)
    assert list(sampled_frames(plan)) == case["indices"]
    assert plan.grid == (len(case["indices"]), *case["grid"])
    assert planner.placeholder(plan, lambda token: TEXTS[int(token)]) == case["text"]
    assert planner.runs(plan) == [case["grid"][0] * case["grid"][1] // 9] * len(case["indices"])
    assert plan.is_whole
    data = packed(video(number, case["frames"], case["height"], case["width"]))
    parts = list(Gemma4Preprocessor(CONFIG, PROCESSOR, settings_of(case))(data, plan))
    assert digest(np.stack([in_rows(part).numpy() for part in parts])) == case["digest"]


def test_sampling_by_default() -> None:
    """32 frames, or all of a shorter video; a config's or a request's own."""

    def count(settings: dict[str, Any], header: VideoHeader = CLIP, **asked: Any) -> int:
        planner = Gemma4Planner(CONFIG, PROCESSOR, settings)
        return planner.plan(header, ItemContext(sampling=FrameSampling(**asked))).num_parts

    assert [count({}), count({"num_frames": 5}), count({"fps": 2}), count({"fps": 2}, num_frames=3)] == [32, 5, 40, 3]
    short = VideoHeader("MP4", 64, 64, 7, 30.0)
    assert [count({}, fps=1.0), count({}, short), count({}, short, num_frames=9), count({}, short, fps=1.0)] == [
        *(20, 7, 7, 1)
    ]
    for asked in ({"num_frames": 769}, {"num_frames": 3, "fps": 1.0}):
        with pytest.raises(UnsupportedMedia):
            count({}, **asked)


def test_bounds_are_those_of_each_frame() -> None:
    planner, preprocess = Gemma4Planner(CONFIG, PROCESSOR), Gemma4Preprocessor(CONFIG, PROCESSOR)
    sampling = FrameSampling(num_frames=2)
    fewer = planner.plan(CLIP, ItemContext(PixelBounds(0, 20 * 144), sampling))
    more = planner.plan(CLIP, ItemContext(sampling=sampling, options={"max_soft_tokens": 140}))
    assert [part.rows for part in fewer.parts] == [3 * 5] * 2
    assert [part.rows for part in more.parts] == [9 * 14] * 2
    for plan in (fewer, more):
        header = replace(CLIP, format=frames.FORMAT)
        parts = list(preprocess(packed(video(0, 600, 64, 96)), replace(plan, header=header)))
        assert [part.grid[1] * part.grid[2] // 9 for part in parts] == [part.rows for part in plan.parts]
    for context in (ItemContext(PixelBounds(0, 100)), ItemContext(options={"max_soft_tokens": 71})):
        with pytest.raises(BadMediaSize):
            planner.plan(CLIP, context)
    with pytest.raises(MediaTooLarge):
        planner.plan(VideoHeader("MP4", 10_000, 10_000, 60, 30.0))


def test_bad_settings() -> None:
    for settings in ({"max_soft_tokens": 71}, {"patch_size": 16}):
        for kind in (Gemma4Planner, Gemma4Preprocessor):
            with pytest.raises(CheckpointError, match="video_preprocessor_config"):
                kind(CONFIG, PROCESSOR, settings)
    with pytest.raises(CheckpointError):
        Gemma4Planner(CONFIG, PROCESSOR, {"num_frames": -3})
    with pytest.raises(CheckpointError):
        Gemma4Preprocessor(CONFIG, PROCESSOR, {"resample": 0})


def test_an_input_that_isnt_planned() -> None:
    case = CASES[2]
    _, plan = plan_of(case)
    preprocess = Gemma4Preprocessor(CONFIG, PROCESSOR, settings_of(case))
    data = packed(video(2, case["frames"], case["height"], case["width"]))
    for wrong in ({"resized_width": 10**6}, {"bounds": PixelBounds(0, 1000)}, {"grid": (3, 3, 3)}):
        with pytest.raises(PlanMismatch):
            list(preprocess(data, replace(plan, **wrong)))
    with pytest.raises(PlanMismatch):
        list(preprocess(packed(video(2, 2, case["height"], case["width"])), plan))
