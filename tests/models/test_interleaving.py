"""The tokens of a video with an audio track are in the order of transformers' processor."""

import math
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from tests.support.families import HEARD_VIDEOS
from tests.support.planners import BOUNDS, config_of, planner_of, random_sound, random_video, seconds_of
from triptych.errors import BadMediaSize, UnsupportedMedia
from triptych.models.base import AUDIO, VISION, Planner
from triptych.models.qwen3_omni.plan import Qwen3OmniPlanner
from triptych.models.shared.video import sampled_frames
from triptych.types import AudioHeader, ItemContext, ItemPart, ItemPlan, VideoHeader

PROCESSORS: dict[str, Any] = {"qwen2_5_omni": Qwen2_5OmniProcessor, "qwen3_omni_moe": Qwen3OmniMoeProcessor}
PLANNERS = {family: planner_of(family) for family in HEARD_VIDEOS}
PLANNER = PLANNERS["qwen3_omni_moe"]
SECOND = AudioHeader("MP4", 16_000, 1, 16_000, in_video=True)


def reference(family: str, plan: ItemPlan) -> str:
    """Frames are V, audio is A."""
    processor = PROCESSORS[family].__new__(PROCESSORS[family])
    marks = {"audio_bos_token": "<", "audio_eos_token": ">", "audio_token": "A", "video_token": "V"}
    for name, value in ({"video_processor": SimpleNamespace(merge_size=2)} | marks).items():
        setattr(processor, name, value)
    video = {"video_grid_thw": np.array([plan.grid]), "video_second_per_grid": [seconds_of(family, plan)]}
    tokens = sum(part.rows for part in plan.parts if part.tower == AUDIO)
    made: str = processor.replace_video_with_audio_token(
        video, 0, {"num_audio_tokens": [tokens]}, 0, position_id_per_seconds=13.0, seconds_per_chunk=2.0
    )
    return made


def spelled(family: str, planner: Planner, plan: ItemPlan) -> str:
    thinker = config_of(family)["thinker_config"]
    names = {"audio_start_token_id": "<", "audio_end_token_id": ">"}
    letters = {thinker[name]: letter for name, letter in names.items()}
    letters |= {planner.placeholder_tokens["audio"]: "A", planner.placeholder_tokens["video"]: "V"}
    runs = iter(planner.runs(plan))
    placeholder = planner.placeholder(plan, letters.__getitem__)
    return "".join(letter * next(runs) if letter in "AV" else letter for letter in placeholder)


@pytest.mark.parametrize("family", HEARD_VIDEOS)
@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_tokens_are_in_the_order_of_the_reference(family: str, count: int) -> None:
    source, planner = random.Random(7), PLANNERS[family]
    for _ in range(count):
        header, sampling = random_video(source)
        plan = planner.plan(header, ItemContext(BOUNDS, sampling, random_sound(source)))
        tokens = spelled(family, planner, plan)
        assert tokens == reference(family, plan)
        check_parts(planner, plan, tokens.strip("<>"))


def check_parts(planner: Planner, plan: ItemPlan, tokens: str) -> None:
    """Each part's rows are at tokens of its modality, in order."""
    assert plan.sound
    assert plan.is_whole
    firsts = [part.runs[0][0] for part in plan.parts]
    assert firsts == sorted(firsts)
    for part in plan.parts:
        for first_row, rows in part.runs:
            assert set(tokens[first_row : first_row + rows]) == {"A" if part.tower == AUDIO else "V"}
    height, width = plan.grid[1:]
    for tower, planned in ((VISION, [height * width // 4] * plan.grid[0]), (AUDIO, windows(planner, plan.sound))):
        numbers = [number for number, part in enumerate(plan.parts) if part.tower == tower]
        assert [plan.rows_of(number) for number in numbers] == planned
        places = [run for number in numbers for run in plan.runs_of(number)]
        assert places == sorted(places)


def windows(planner: Planner, header: AudioHeader) -> list[int]:
    sound = planner.plan(header)
    return [sound.rows_of(number) for number in range(sound.num_parts)]


def test_a_plan_counts_both() -> None:
    header = VideoHeader("MP4", 64, 64, 100, 10.0)
    seen, heard = PLANNER.plan(header, ItemContext(BOUNDS)), PLANNER.plan(header, ItemContext(BOUNDS, sound=SECOND))
    sound = PLANNER.plan(SECOND)
    assert (heard.rows, heard.cost, heard.patches) == (
        seen.rows + sound.rows,
        seen.cost + sound.cost,
        seen.patches + sound.patches,
    )
    assert heard.sound == SECOND
    assert heard.part_rows == max(seen.part_rows, sound.part_rows)
    assert [part.payload for part in heard.parts if part.tower == AUDIO] == [part.payload for part in sound.parts]
    assert sampled_frames(heard) == sampled_frames(seen)
    assert heard.num_parts == seen.num_parts + sound.num_parts
    assert seen.sound is None
    assert seen.is_whole
    with pytest.raises(BadMediaSize, match="shorter than 25 ms"):
        PLANNER.plan(header, ItemContext(BOUNDS, sound=AudioHeader("MP4", 48_000, 1, 100, in_video=True)))


def test_invalid_parts_are_rejected() -> None:
    plan = PLANNER.plan(VideoHeader("MP4", 64, 64, 100, 10.0), ItemContext(BOUNDS, sound=SECOND))

    def changed(**fields: Any) -> ItemPlan:
        return msgspec.structs.replace(plan, **fields)

    first, *others = plan.parts
    assert not changed(parts=plan.parts[1:]).is_whole
    assert not changed(parts=(*plan.parts, first)).is_whole
    for fields in ({"runs": ((1, 1),)}, {"runs": ()}, {"patches": first.patches + 1}, {"cost": first.cost + 1}):
        part: ItemPart = msgspec.structs.replace(first, **fields)
        assert not changed(parts=(part, *others)).is_whole
    no_rows: ItemPart = msgspec.structs.replace(first, runs=())
    assert not changed(parts=(no_rows, *plan.parts), patches=plan.patches + first.patches).is_whole
    for total in ({"rows": plan.rows + 1}, {"patches": plan.patches + 1}, {"cost": math.nan}, {"cost": math.inf}):
        assert not changed(**total).is_whole
    endless: ItemPart = msgspec.structs.replace(first, cost=math.inf)
    assert not changed(parts=(endless, *others), cost=math.inf).is_whole
    assert not changed(parts=()).is_whole
    assert plan.is_whole


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_families_without_audio_in_video(family: str) -> None:
    planner = planner_of(family)
    assert not planner.audio_in_video
    with pytest.raises(UnsupportedMedia, match="takes no audio track with a video"):
        planner.plan(VideoHeader("MP4", 64, 64, 100, 10.0), ItemContext(BOUNDS, sound=SECOND))


def test_a_config_that_does_not_name_the_end_of_audio() -> None:
    """transformers' config class has no setting for it."""
    config = config_of("qwen3_omni_moe")
    thinker = {k: v for k, v in config["thinker_config"].items() if k != "audio_end_token_id"}
    planner = Qwen3OmniPlanner(config | {"thinker_config": thinker}, {"feature_size": 20})
    assert not planner.audio_in_video
    with pytest.raises(UnsupportedMedia, match="takes no audio track with a video"):
        planner.plan(VideoHeader("MP4", 64, 64, 100, 10.0), ItemContext(BOUNDS, sound=SECOND))
