"""GLM-V: plans, pixels, videos and text as transformers has them. Videos are compared with stored results
(``golden/make_glm_videos.py``, which needs torchvision)."""

import json
import random
from typing import Any

import numpy as np
import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests.models.golden.make_glm_videos import FILE, SIZE
from tests.models.golden.make_videos import digest, video
from tests.support.image_cases import png
from tests.support.tiny import GLM
from triptych.errors import BadMediaSize, CheckpointError, UnsupportedMedia
from triptych.media import frames
from triptych.models.glm4v.plan import Glm4vPlanner
from triptych.models.glm4v.preprocess import Glm4vPreprocessor
from triptych.models.shared.video import sampled_frames
from triptych.types import FrameSampling, ImageHeader, ItemContext, PixelBounds, VideoHeader

CONFIG = GLM["glm4v"].config
PROCESSOR = GLM["glm4v"].preprocessor or {}
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
TOKENS = {CONFIG["image_token_id"]: "<|image|>"}
TOKENS |= {
    CONFIG[f"image_{part}_token_id"]: f"<|{name}_of_image|>" for part, name in (("start", "begin"), ("end", "end"))
}


def reference_of(processor: dict[str, Any]) -> Any:
    return Glm4vImageProcessorPil(**{name: it for name, it in processor.items() if name != "image_processor_type"})


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_plans_are_the_processors(count: int) -> None:
    """With the sizes of released checkpoints, and with those of the class."""
    source = random.Random(1)
    for settings in ({}, {"size": {"shortest_edge": 12544, "longest_edge": 9633792}}):
        planner, reference = Glm4vPlanner(CONFIG, settings), reference_of(settings)
        for _ in range(count):
            width, height = source.randint(30, 6000), source.randint(30, 6000)
            plan = planner.plan(ImageHeader("PNG", width, height))
            assert plan.patches == reference.get_number_of_image_patches(height, width)
            assert plan.is_whole


def video_config(case: dict[str, Any]) -> dict[str, Any]:
    return {"size": SIZE, "video_processor_type": f"{case['family']}VideoProcessor"}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_videos_as_the_reference(number: int) -> None:
    case = CASES[number]
    size = case["width"], case["height"]
    header = VideoHeader(frames.FORMAT, *size, case["frames"], case["rate"], presampled=case.get("chosen", False))
    planner = Glm4vPlanner(CONFIG, PROCESSOR, video_config(case))
    plan = planner.plan(header)
    assert list(sampled_frames(plan)) == case["indices"]
    assert list(plan.grid) == case["grid"]
    assert planner.placeholder(plan, lambda token: TOKENS[int(token)]) == case["text"]
    assert list(planner.runs(plan)) == [case["grid"][1] * case["grid"][2] // 4] * case["grid"][0]
    pixels = video(number % (len(CASES) // 2), case["frames"], case["height"], case["width"])
    files = [png(frame) for frame in map(_image, pixels)]
    parts = list(
        Glm4vPreprocessor(CONFIG, PROCESSOR, video_config(case))(
            frames.pack_frames(frames.PackedFrames(case["rate"], files)), plan
        )
    )
    assert digest(np.concatenate([part.patches for part in parts])) == case["digest"]


def _image(frame: Any) -> Any:
    from PIL import Image

    return Image.fromarray(frame)


def test_sampling_by_a_request() -> None:
    header = VideoHeader("MP4", 64, 64, 300, 30.0)
    planner, newer = Glm4vPlanner(CONFIG, PROCESSOR), Glm4vPlanner(CONFIG | {"model_type": "glm46v"}, PROCESSOR)
    assert [len(sampled_frames(one.plan(header))) for one in (planner, newer)] == [20, 60]
    assert len(sampled_frames(planner.plan(header, ItemContext(sampling=FrameSampling(fps=1.0))))) == 10
    for one, sampling in (
        (planner, FrameSampling(num_frames=4)),
        (newer, FrameSampling(num_frames=4)),
        (newer, FrameSampling(fps=1.0)),
        (planner, FrameSampling(fps=77.0)),
        (planner, FrameSampling(fps=1e300)),
    ):
        with pytest.raises(UnsupportedMedia, match=r"can't be set|more than the model takes"):
            one.plan(header, ItemContext(sampling=sampling))


@pytest.mark.parametrize("model_type", ["glm4v", "glm46v"])
@pytest.mark.parametrize(("count", "rate"), [(1, 10.0), (1, 0.01), (2, 30.0), (4, 60.0)])
def test_videos_of_less_than_a_frames_time(model_type: str, count: int, rate: float) -> None:
    planner = Glm4vPlanner(CONFIG | {"model_type": model_type}, PROCESSOR)
    plan = planner.plan(VideoHeader("MP4", 64, 64, count, rate))
    assert plan.is_whole
    assert sampled_frames(plan)[0] == 0


def test_bounds_of_the_area() -> None:
    """Of an image, not of the two frames that it counts as in the processor's file."""
    planner = Glm4vPlanner(CONFIG, PROCESSOR)
    plan = planner.plan(ImageHeader("PNG", 300, 300), ItemContext(PixelBounds(0, 60 * 60)))
    assert (plan.resized_height, plan.resized_width) == (56, 56)
    assert planner.max_image_pixels == 252 * 252
    with pytest.raises(BadMediaSize):
        planner.plan(ImageHeader("PNG", 300, 300), ItemContext(PixelBounds(0, 252 * 252 + 1)))


@pytest.mark.parametrize("settings", [{"max_duration": 0}, {"max_duration": "300"}, {"fps": 0}, {"size": 3}])
def test_bad_video_processors(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        Glm4vPlanner(CONFIG, PROCESSOR, settings)
