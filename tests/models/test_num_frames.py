"""How many frames of a video a planner says to sample: for every kind of plan, all of those that the client chose."""

from pathlib import Path

import pytest

from tests.support.families import FRAME_PARTS, FRAME_TILES, VIDEO_ANSWERS
from tests.support.minicpm import PROCESSOR, config_of
from tests.support.tiny import OWN_TOWERS, TINY, write_settings
from triptych.media.frames import FORMAT
from triptych.models.minicpmv.plan import MiniCPMVPlanner
from triptych.prompt.prompt import PromptBuilder
from triptych.types import FrameSampling, ItemContext, VideoHeader


@pytest.mark.parametrize("family", [*VIDEO_ANSWERS, *FRAME_TILES, *FRAME_PARTS, "kimi_k25"])
@pytest.mark.parametrize("frames", [1, 7, 12])
def test_all_that_the_client_chose(tmp_path: Path, family: str, frames: int) -> None:
    write_settings(tmp_path, (TINY | OWN_TOWERS)[family])
    planner = PromptBuilder(tmp_path).planner
    plan = planner.plan(VideoHeader(FORMAT, 96, 64, frames, 2.0, presampled=True))
    assert frames <= planner.num_frames(plan) <= max(frames, 2), "a temporal patch repeats the only frame"


@pytest.mark.parametrize("frames", [1, 7, 12])
def test_frames_that_are_shown_together_count_one_by_one(frames: int) -> None:
    planner = MiniCPMVPlanner(config_of(4.5), PROCESSOR)
    plan = planner.plan(
        VideoHeader("MP4", 96, 64, frames, 30.0), ItemContext(sampling=FrameSampling(num_frames=frames))
    )
    assert planner.num_frames(plan) == frames
