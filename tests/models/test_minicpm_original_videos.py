"""Videos of MiniCPM-V 2.6 and 4.5: frames, text, pixels and rows as an implementation written from the published
descriptions has them."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.checkpoints import load_adapter
from tests.support.clips import picture
from tests.support.forward import assert_rows
from tests.support.image_cases import picture as still
from tests.support.image_cases import png
from tests.support.minicpm import (
    PROCESSOR,
    Clip,
    MiniCPMReference,
    config_of,
    grouped,
    make_minicpm,
    pieces_of,
    pixels_of,
    text_of,
    text_of_video,
)
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import InvalidRequest, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.media.frames import PackedFrames, pack_frames
from triptych.models.base import EncoderInput
from triptych.models.minicpmv.plan import MiniCPMVPlanner
from triptych.models.minicpmv.preprocess import MiniCPMVPreprocessor
from triptych.models.minicpmv.sampling import PackedSampling, StepSampling, temporal_ids
from triptych.prompt.probe_video import probe_video
from triptych.prompt.prompt import PromptBuilder
from triptych.types import FrameSampling, ItemContext, VideoHeader

VERSIONS = (2.6, 4.5)
SLICES = {2.6: 2, 4.5: 1}
SAMPLINGS = {2.6: StepSampling.from_config({}, 1), 4.5: PackedSampling.from_config({}, 1)}
QUERIES = 6


def planner_of(version: float) -> MiniCPMVPlanner:
    return MiniCPMVPlanner(config_of(version), PROCESSOR)


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", VERSIONS)
def test_frames_are_the_references(version: float, count: int) -> None:
    source = random.Random(1)
    for _ in range(count):
        rate = source.choice([1.0, 2.0, 12.5, 24.0, 25.0, 29.97002997002997, 60.0])
        total = source.randint(max(round(rate), 1), source.choice([50, 500, 20_000]) + round(rate))
        fps = min(source.choice([0, 0, 1.0, 5.0]), rate)
        header = VideoHeader("MP4", 96, 64, total, rate)
        frames, times = grouped(total, rate, version, fps)
        groups = SAMPLINGS[version].for_request(FrameSampling(fps=fps)).groups(header)
        assert [list(group) for group in groups] == frames, header
        if version == 4.5:
            assert [list(temporal_ids(group, header)) for group in groups] == times, header


@pytest.mark.parametrize(
    ("version", "asked", "header", "groups"),
    [
        (2.6, {"num_frames": 7}, VideoHeader("MP4", 96, 64, 100, 10.0), [1] * 7),
        (2.6, {}, VideoHeader("MP4", 96, 64, 1, 0.2), [1]),
        (4.5, {}, VideoHeader("MP4", 96, 64, 1, 10.0), [1]),
        (4.5, {"num_frames": 7}, VideoHeader("MP4", 96, 64, 100, 10.0), [1] * 7),
        (4.5, {"num_frames": 181}, VideoHeader("MP4", 96, 64, 999, 10.0), [2] * 90 + [1]),
        (4.5, {}, VideoHeader("frames", 96, 64, 200, 1.0, presampled=True), [2] * 100),
        (4.5, {}, VideoHeader("MP4", 96, 64, 10**6, 25.0), [3] * 180),
    ],
)
def test_groups(version: float, asked: dict[str, Any], header: VideoHeader, groups: list[int]) -> None:
    plan = planner_of(version).plan(header, ItemContext(sampling=FrameSampling(**asked)))
    assert [len(part.payload) - 2 for part in plan.parts if part.payload] == groups
    assert plan.is_whole


def clip_of(version: float, groups: list[list[int]], times: list[list[int]], size: tuple[int, int]) -> Clip:
    frames = [[Image.fromarray(picture(number, *size)) for number in group] for group in groups]
    return Clip(frames, times if version == 4.5 else [], SLICES[version])


def file_of(numbers: list[int], size: tuple[int, int], rate: float = 2.0) -> bytes:
    return pack_frames(PackedFrames(rate, [png(Image.fromarray(picture(number, *size))) for number in numbers]))


@pytest.mark.parametrize("size", [(80, 48), (30, 90), (40, 40)])
@pytest.mark.parametrize("version", VERSIONS)
def test_text_pixels_and_rows(tmp_path: Path, version: float, size: tuple[int, int]) -> None:
    numbers, planner = list(range(5)), planner_of(version)
    data = file_of(numbers, size)
    plan = planner.plan(probe_video(data))
    clip = clip_of(version, [[number] for number in numbers], [[5 * number] for number in numbers], size)
    text = planner.label(plan, ItemContext()) + planner.placeholder(plan, str).replace("<unk>", "<unk>" * QUERIES)
    assert text == text_of_video(clip, size, PROCESSOR, QUERIES)
    parts = list(MiniCPMVPreprocessor(config_of(version), PROCESSOR)(data, plan))
    settings = PROCESSOR | {"max_slice_nums": clip.slices}
    expected = [pixels_of(piece, settings) for [frame] in clip.groups for piece in pieces_of(frame, settings)]
    for part, pixels in zip(parts, expected, strict=True):
        _, rows, columns = part.grid
        found = part.patches.reshape(rows, columns, 3, 4, 4).transpose(2, 0, 3, 1, 4).reshape(pixels.shape)
        assert np.array_equal(found, pixels)
    reference = MiniCPMReference(make_minicpm(tmp_path, version), config_of(version))
    assert_rows(encoded(tmp_path, parts), reference.rows(clip))


def encoded(folder: Path, parts: list[EncoderInput]) -> torch.Tensor:
    tower = load_adapter(folder).load_encoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], torch.device("cpu"))
    return torch.cat(tower.encode(parts))


@pytest.mark.parametrize("slices", [1, 4])
def test_rows_of_frames_shown_together(tmp_path: Path, slices: int) -> None:
    """Times near the start and after an hour, in a group that isn't full, and of frames that are cut into slices."""
    size, numbers = (80, 60), list(range(185))
    data = file_of(numbers, size, rate=0.05)
    plan = planner_of(4.5).plan(probe_video(data), ItemContext(options={"max_slice_nums": slices}))
    parts = list(MiniCPMVPreprocessor(config_of(4.5), PROCESSOR)(data, plan))
    each = len(parts) // 93
    assert each == (1 if slices == 1 else 1 + plan.parts[0].payload[-2] * plan.parts[0].payload[-1])
    groups = [numbers[first : first + 2] for first in range(0, 185, 2)]
    clip = clip_of(4.5, groups, [[200 * number for number in group] for group in groups], size)
    reference = MiniCPMReference(make_minicpm(tmp_path, 4.5), config_of(4.5))
    for some in (slice(0, 2), slice(91, 93)):
        shown = Clip(clip.groups[some], clip.times[some], slices)
        found = encoded(tmp_path, parts[some.start * each : some.stop * each])
        assert_rows(found, reference.rows(shown))


def test_times_change_what_a_frame_becomes(tmp_path: Path) -> None:
    """So equal frames at other times are other parts; version 2.6 doesn't see times."""
    for version, equal in ((2.6, True), (4.5, False)):
        data = file_of([3, 3], (40, 40))
        parts = list(
            MiniCPMVPreprocessor(config_of(version), PROCESSOR)(data, planner_of(version).plan(probe_video(data)))
        )
        assert (parts[0].name == parts[1].name) == equal
        first, second = encoded(make_minicpm(tmp_path / str(version), version), parts).split(QUERIES)
        assert torch.equal(first, second) == equal


@pytest.mark.parametrize("version", VERSIONS)
def test_conversations(tmp_path: Path, version: float) -> None:
    """Images beside a video aren't numbered, and a user's text may not have what stands for a video."""
    builder = PromptBuilder(make_minicpm(tmp_path, version))
    shown, size = still(200, 150, 1), (80, 48)
    parts = [{"type": "video", "data": file_of([0, 1], size)}, {"type": "image", "data": png(shown)}]
    prompt = builder.build([{"role": "user", "content": [*parts, {"type": "text", "text": "and?"}]}])
    video = text_of_video(clip_of(version, [[0], [1]], [[0], [5]], size), size, PROCESSOR, QUERIES)
    image = text_of(shown, 0, PROCESSOR, QUERIES).removeprefix("<image_id>0</image_id>")
    written = f"<|im_start|>user\n{video}\n{image}\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tokens == builder.tokenizer.encode(written)
    with pytest.raises(InvalidRequest):
        builder.build([{"role": "user", "content": "see (<video>./</video>)"}])


def test_plans_that_are_refused() -> None:
    data = file_of([0, 1], (40, 40))
    header = probe_video(data)
    preprocess = MiniCPMVPreprocessor(config_of(4.5), PROCESSOR)
    plan = planner_of(4.5).plan(header)
    for payload in ((0,), (0, 1, 0, 0), (), (0, 3, 1)):
        moved = msgspec.structs.replace(plan.parts[0], payload=payload)
        with pytest.raises(PlanMismatch):
            list(preprocess(data, msgspec.structs.replace(plan, parts=(moved, *plan.parts[1:]))))
    with pytest.raises(UnsupportedMedia, match="num_frames 65 is more"):
        planner_of(2.6).plan(header, ItemContext(sampling=FrameSampling(num_frames=65)))
