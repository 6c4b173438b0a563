"""Plans of items with the settings of released checkpoints: as the references', and as their descriptions say."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
    _get_feat_extract_output_lengths as qwen2_5_omni_rows,
)
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths as qwen3_omni_rows,
)

from tests.support.released import RELEASED
from triptych.checkpoint.config_files import with_text_config
from triptych.errors import MediaTooLarge
from triptych.models.base import Planner
from triptych.models.registry import FAMILIES, resolve
from triptych.types import AudioHeader, ImageHeader

RATES = (8_000, 16_000, 22_050, 44_100, 48_000)
COUNT = 3000
PATCHES = ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_5", "qwen3_omni_moe"]


def planner_of(name: str) -> Planner:
    tiny = RELEASED[name].tiny(name)
    planner: Planner = resolve(FAMILIES[name].planner)(
        with_text_config(tiny.config), tiny.preprocessor, tiny.video_preprocessor
    )
    return planner


def qwen2_audio_rows(frames: int) -> int:
    """As the model counts them."""
    lengths: Callable[[Any, torch.Tensor], Any] = vars(Qwen2AudioEncoder)["_get_feat_extract_output_lengths"]
    return int(lengths(None, torch.tensor(frames))[1])


@pytest.mark.parametrize(
    ("name", "seconds", "whole", "rows"),
    [
        ("qwen2_audio", 30, math.ceil, qwen2_audio_rows),
        ("qwen2_5_omni", 300, math.ceil, qwen2_5_omni_rows),
        ("qwen3_omni_moe", 300, math.floor, qwen3_omni_rows),
    ],
)
def test_random_clips(name: str, seconds: int, whole: Callable[[float], int], rows: Callable[[int], int]) -> None:
    """``whole`` is what becomes of the last frame: extractors that pad a clip to a fixed length have it."""
    source, planner = random.Random(1), planner_of(name)
    for _ in range(COUNT):
        rate = source.choice(RATES)
        samples = source.randint(-(-400 * rate // 16_000), seconds * rate)
        plan = planner.plan(AudioHeader("WAV", rate, 1, samples))
        assert plan.rows == rows(whole(math.ceil(samples * 16_000 / rate) / 160)), (rate, samples)
        assert plan.is_whole


@pytest.mark.parametrize("name", PATCHES)
def test_random_images(name: str) -> None:
    source, planner = random.Random(1), planner_of(name)
    settings: dict[str, Any] = RELEASED[name].tiny(name).preprocessor or {}
    known = ("min_pixels", "max_pixels", "size", "patch_size", "merge_size")
    reference: Any = Qwen2VLImageProcessorPil(**{key: settings[key] for key in known if key in settings})
    for _ in range(COUNT):
        longest = source.choice((300, 1000, 6000))
        width, height = source.randint(longest // 40, longest), source.randint(longest // 40, longest)
        plan = planner.plan(ImageHeader("PNG", width, height))
        assert 4 * plan.rows == reference.get_number_of_image_patches(height, width), (width, height)


@pytest.mark.parametrize(
    ("name", "header", "rows"),
    [
        ("qwen2_audio", AudioHeader("WAV", 16_000, 1, 160_000), 250),
        ("qwen2_audio", AudioHeader("WAV", 48_000, 2, 30 * 48_000), 750),
        ("qwen2_5_omni", AudioHeader("WAV", 16_000, 1, 16_000), 25),
        ("qwen2_5_omni", AudioHeader("WAV", 16_000, 1, 300 * 16_000), 7500),
        ("qwen3_omni_moe", AudioHeader("WAV", 16_000, 1, 16_000), 13),
        ("minicpmv", ImageHeader("PNG", 448, 448), 64),
        ("minicpmv", ImageHeader("PNG", 1344, 1344), 640),
        ("minicpmv", ImageHeader("PNG", 1920, 1080), 576),
    ],
)
def test_published_figures(name: str, header: AudioHeader | ImageHeader, rows: int) -> None:
    assert planner_of(name).plan(header).rows == rows


@pytest.mark.parametrize(("name", "seconds"), [("qwen2_audio", 30), ("qwen2_5_omni", 300)])
def test_longest_clips(name: str, seconds: int) -> None:
    with pytest.raises(MediaTooLarge, match=f"at most {seconds} s"):
        planner_of(name).plan(AudioHeader("WAV", 16_000, 1, 16_000 * seconds + 161))


@pytest.mark.parametrize("name", RELEASED)
def test_all_files_have_the_sizes(name: str) -> None:
    """Of images, videos and audio alike: what prepares items takes them together."""
    tiny, preprocess = RELEASED[name].tiny(name), FAMILIES[name].preprocessor
    assert preprocess is not None
    resolve(preprocess)(with_text_config(tiny.config), tiny.preprocessor or {}, tiny.video_preprocessor or {})
    planner_of(name)
