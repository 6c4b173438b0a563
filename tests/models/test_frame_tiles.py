"""Videos whose frames are tiles are sampled, resized and cut like transformers' processors do, against their stored
results for the same frames (``golden/make_frame_tiles.py``, which needs torchvision)."""

import json
from typing import Any

import numpy as np
import pytest

from tests.models.golden.make_frame_tiles import FILE, settings_of
from tests.models.golden.make_videos import digest, video
from tests.support.clips import packed
from tests.support.tiny import IDS, OWN_TOWERS
from triptych.errors import CheckpointError, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.media import frames
from triptych.models.base import Planner
from triptych.models.registry import FAMILIES, resolve
from triptych.models.shared.video import sampled_frames
from triptych.types import FrameSampling, ItemContext, ItemPlan, PixelBounds, VideoHeader

CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
ROWS = {"internvl": 4, "llava_onevision": 9}


def made(part: str, family: str, settings: dict[str, Any]) -> Any:
    tiny = OWN_TOWERS[family]
    return resolve(getattr(FAMILIES[family], part))(tiny.config, tiny.preprocessor, settings)


def plan_of(case: dict[str, Any]) -> tuple[Planner, ItemPlan]:
    planner: Planner = made("planner", case["family"], settings_of(case["family"], case))
    asked = {name: case[name] for name in ("num_frames", "fps") if name in case}
    header = VideoHeader(
        frames.FORMAT, case["width"], case["height"], case["frames"], case["rate"], presampled=not asked
    )
    return planner, planner.plan(header, ItemContext(sampling=FrameSampling(**asked)))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_as_the_reference(number: int) -> None:
    case = CASES[number]
    family, seed = case["family"], number % (len(CASES) // 2)
    planner, plan = plan_of(case)
    assert list(sampled_frames(plan)) == case["indices"]
    rows, count = ROWS[family], len(case["indices"])
    if family == "internvl":
        image = f"<img>[{IDS['<|image_pad|>']}]</img>"
        text = "\n".join(f"Frame{frame + 1}: {image}" for frame in range(count))
        assert (planner.placeholder(plan, lambda token: f"[{token}]"), planner.runs(plan)) == (text, [rows] * count)
    else:
        assert planner.placeholder(plan, str) == str(IDS["<|video_pad|>"])
        assert planner.runs(plan) == [rows * count + 1]
    assert plan.is_whole
    data = packed(video(seed, case["frames"], case["height"], case["width"]))
    parts = list(made("preprocessor", family, settings_of(family, case))(data, plan))
    assert digest(np.concatenate([part.patches for part in parts])) == case["digest"]
    assert len({part.name for part in parts}) == len(parts)


@pytest.mark.parametrize("family", ROWS)
def test_sampling_by_default(family: str) -> None:
    """32 frames, or all of a shorter video; a config's or a request's own."""
    header = VideoHeader("MP4", 64, 64, 600, 30.0)

    def count(settings: dict[str, Any], header: VideoHeader = header, **asked: Any) -> int:
        plan: ItemPlan = made("planner", family, settings).plan(header, ItemContext(sampling=FrameSampling(**asked)))
        return plan.num_parts

    assert [count({}), count({"num_frames": 5}), count({"fps": 2}), count({"fps": 2}, num_frames=3)] == [32, 5, 40, 3]
    assert [count({}, fps=1.0), count({}, VideoHeader("MP4", 64, 64, 7, 30.0), num_frames=9)] == [20, 7]
    for asked in ({"num_frames": 769}, {"num_frames": 3, "fps": 1.0}):
        with pytest.raises(UnsupportedMedia):
            count({}, **asked)


@pytest.mark.parametrize("family", ROWS)
def test_what_is_refused(family: str) -> None:
    planner: Planner = made("planner", family, {})
    for header, bounds, error in (
        (VideoHeader("MP4", 64, 64, 60, 30.0), PixelBounds(max_pixels=10_000), UnsupportedMedia),
        (VideoHeader("MP4", 10_000, 10_000, 60, 30.0), PixelBounds(), MediaTooLarge),
    ):
        with pytest.raises(error):
            planner.plan(header, ItemContext(bounds))
    for settings in ({"size": {"height": 20, "width": 20}}, {"resample": 0}):
        with pytest.raises(CheckpointError):
            made("preprocessor", family, settings)
    with pytest.raises(CheckpointError):
        made("planner", family, {"num_frames": -3})


@pytest.mark.parametrize("family", ROWS)
def test_a_plan_of_another_video(family: str) -> None:
    case = next(case for case in CASES if case["family"] == family and case["frames"] == 9)
    _, plan = plan_of(case)
    with pytest.raises(PlanMismatch):
        list(made("preprocessor", family, {})(packed(video(0, 5, case["height"], case["width"])), plan))


def test_other_families_take_no_videos() -> None:
    for family in ("llava", "llava_next"):
        with pytest.raises(UnsupportedMedia, match="no videos"):
            made("planner", family, {}).plan(VideoHeader("MP4", 64, 64, 60, 30.0))
