"""SmolVLM's videos are sampled, described, resized and cut like transformers' processors do, against what those made of
the same frames (``golden/make_smolvlm_videos.py``, which needs torchvision)."""

import json
from typing import Any

import numpy as np
import pytest

from tests.models.golden.make_smolvlm_videos import FILE, settings_of
from tests.models.golden.make_videos import digest, video
from tests.support.clips import packed
from tests.support.tiny import OWN_TOWERS
from triptych.errors import CheckpointError, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.media import frames
from triptych.models.idefics3.plan import SmolVLMPlanner
from triptych.models.idefics3.preprocess import SmolVLMPreprocessor
from triptych.models.idefics3.video import in_words
from triptych.models.shared.video import sampled_frames
from triptych.types import FrameSampling, ItemContext, PixelBounds, VideoHeader

CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
TINY = OWN_TOWERS["smolvlm"]
IMAGES = TINY.preprocessor or {}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_as_the_reference(number: int) -> None:
    case = CASES[number]
    planner = SmolVLMPlanner(TINY.config, IMAGES, settings_of(case))
    header = VideoHeader(frames.FORMAT, case["width"], case["height"], case["frames"], case["rate"])
    plan = planner.plan(header, ItemContext(sampling=FrameSampling(**case.get("asked", {}))))
    assert list(sampled_frames(plan)) == case["indices"]
    assert planner.placeholder(plan, lambda token: "[image]") == case["text"]
    assert planner.runs(plan) == [4] * len(case["indices"])
    assert plan.is_whole
    data = packed(video(number, case["frames"], case["height"], case["width"]))
    parts = list(SmolVLMPreprocessor(TINY.config, IMAGES, settings_of(case))(data, plan))
    assert digest(np.concatenate([part.patches for part in parts])) == case["digest"]


def test_sampling() -> None:
    """64 frames at most, one a second; a config's or a request's own."""

    def count(settings: dict[str, Any], total: int = 6000, presampled: bool = False, **asked: Any) -> int:
        planner = SmolVLMPlanner(TINY.config, IMAGES, settings)
        header = VideoHeader("MP4", 64, 64, total, 30.0, presampled=presampled)
        return planner.plan(header, ItemContext(sampling=FrameSampling(**asked))).num_parts

    older = {"video_sampling": {"fps": 2, "max_frames": 50}}
    assert [count({}), count({}, 600), count(older), count(older, 600), count({"num_frames": 5})] == [64, 20, 50, 40, 5]
    assert [count({}, num_frames=7), count({}, 600, fps=0.5), count({}, 70, presampled=True)] == [7, 10, 70]
    for wrong in ({"num_frames": 769}, {"num_frames": 3, "fps": 1.0}):
        with pytest.raises(UnsupportedMedia):
            count({}, **wrong)


def test_numbers_in_words() -> None:
    said = {0: "zero", 13: "thirteen", 40: "forty", 64: "sixty-four", 100: "one hundred"}
    said |= {101: "one hundred and one", 768: "seven hundred and sixty-eight", 1001: "one thousand and one"}
    said |= {3700: "three thousand, seven hundred", 12345: "twelve thousand, three hundred and forty-five"}
    assert {number: in_words(number) for number in said} == said
    with pytest.raises(ValueError, match="too large"):
        in_words(10**6)


def test_what_is_refused() -> None:
    planner = SmolVLMPlanner(TINY.config, IMAGES, {})
    for header, bounds, error in (
        (VideoHeader("MP4", 64, 64, 60, 30.0), PixelBounds(max_pixels=10_000), UnsupportedMedia),
        (VideoHeader("MP4", 10_000, 10_000, 60, 30.0), PixelBounds(), MediaTooLarge),
    ):
        with pytest.raises(error):
            planner.plan(header, ItemContext(bounds))
    for settings in (
        {"max_image_size": {"longest_edge": 20}},
        {"size": {"height": 20, "width": 20}},
        {"video_sampling": 5},
        {"resample": 0},
    ):
        with pytest.raises(CheckpointError):
            SmolVLMPreprocessor(TINY.config, IMAGES, settings)
    for wrong in ({"num_frames": -3}, {"fps": 0}, {"video_sampling": {"max_frames": "5"}}):
        with pytest.raises(CheckpointError):
            SmolVLMPlanner(TINY.config, IMAGES, wrong)


def test_a_plan_of_another_video() -> None:
    plan = SmolVLMPlanner(TINY.config, IMAGES, {}).plan(VideoHeader(frames.FORMAT, 40, 30, 90, 1.0, presampled=True))
    with pytest.raises(PlanMismatch):
        list(SmolVLMPreprocessor(TINY.config, IMAGES, {})(packed(video(0, 5, 30, 40)), plan))
