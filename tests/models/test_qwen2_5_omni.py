"""Qwen2.5-Omni's audio against the reference: number of tokens, features, parts; and its settings."""

import math
import random
from copy import deepcopy
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths

from tests.support.sounds import sound, tone
from tests.support.tiny import TINY
from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch
from triptych.media.audio import decode_audio
from triptych.models.base import AUDIO
from triptych.models.qwen2_5_omni.encoder import Qwen25Omni
from triptych.models.qwen2_5_omni.plan import Qwen25OmniPlanner
from triptych.models.qwen2_5_omni.preprocess import Qwen25OmniPreprocessor
from triptych.prompt.probe_audio import probe_audio
from triptych.types import AudioHeader, ItemPlan

CONFIG = TINY["qwen2_5_omni"].config
PROCESSOR: dict[str, Any] = TINY["qwen2_5_omni"].preprocessor or {}
PLANNER = Qwen25OmniPlanner(CONFIG, PROCESSOR)
PREPROCESSOR = Qwen25OmniPreprocessor(CONFIG, PROCESSOR)
EXTRACTOR: Any = WhisperFeatureExtractor(feature_size=20, chunk_length=8)


def edited(**changes: Any) -> dict[str, Any]:
    """``CONFIG`` with changes of the thinker's settings; sections are merged."""
    config = deepcopy(CONFIG)
    thinker = config["thinker_config"]
    for name, value in changes.items():
        thinker[name] = thinker[name] | value if isinstance(value, dict) else value
    return config


def heard(samples: int, rate: int = 16_000) -> ItemPlan:
    return PLANNER.plan(AudioHeader("WAV", rate, 1, samples))


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_number_of_tokens_equals_the_reference(count: int) -> None:
    source = random.Random(count)
    for _ in range(count):
        rate = source.choice([8_000, 16_000, 22_050, 44_100, 48_000, 384_000])
        samples = source.randint(-(-400 * rate // 16_000), 8 * rate)
        plan = heard(samples, rate)
        # as the extractor's mask counts frames, and the processor their tokens
        frames = math.ceil(math.ceil(samples * 16_000 / rate) / 160)
        assert plan.grid == (frames, 1, 1)
        assert plan.rows == _get_feat_extract_output_lengths(frames)
        assert plan.is_whole
        assert all(0 < part.rows <= 25 for part in plan.parts)


@pytest.mark.parametrize(
    ("samples", "windows"),
    [
        (400, [3]),
        (16_000, [100]),
        (16_001, [100]),
        (16_320, [100]),
        (16_321, [100, 3]),
        (40_000, [100, 100, 50]),
        (128_000, [100] * 8),
    ],
)
def test_parts_are_windows_with_rows(samples: int, windows: list[int]) -> None:
    plan = heard(samples)
    assert [part.patches for part in plan.parts] == windows
    assert [part.payload for part in plan.parts] == [(100 * number, length) for number, length in enumerate(windows)]


@pytest.mark.parametrize(
    ("container", "rate", "channels"), [("wav", 16_000, 1), ("mp3", 44_100, 2), ("ogg", 48_000, 2)]
)
@pytest.mark.parametrize("seconds", [0.3, 1.0, 5.37])
def test_features_equal_the_reference(container: str, rate: int, channels: int, seconds: float) -> None:
    data = sound(container, tone(seconds, rate, channels), rate)
    header = probe_audio(data)
    plan = PLANNER.plan(header)
    parts = list(PREPROCESSOR(data, plan))
    assert [part.grid[0] for part in parts] == [part.patches for part in plan.parts]
    assert {part.tower for part in parts} == {AUDIO}
    made = EXTRACTOR(decode_audio(data, header, 16_000), sampling_rate=16_000, return_attention_mask=True)
    assert made["attention_mask"].sum() == plan.grid[0]
    features = np.concatenate([part.patches for part in parts])
    np.testing.assert_allclose(features, made["input_features"][0].T[: len(features)], atol=1e-4)


def test_lengths_that_are_refused() -> None:
    with pytest.raises(BadMediaSize, match="shorter than 25 ms"):
        heard(399)
    with pytest.raises(MediaTooLarge, match=r"8\.00 s long; the model takes at most 8 s"):
        heard(128_001)


def test_other_windows_are_refused() -> None:
    data = sound("flac", tone(2.0, 16_000))
    plan = PLANNER.plan(probe_audio(data))
    for payload in ((), (0, 10**9), (-1, 100)):
        moved = msgspec.structs.replace(plan.parts[0], payload=payload)
        with pytest.raises(PlanMismatch, match="other windows"):
            list(PREPROCESSOR(data, msgspec.structs.replace(plan, parts=(moved, *plan.parts[1:]))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_config": {"n_window": 51}}, "n_window must be even and at most max_source_positions 60, is 51"),
        ({"audio_config": {"n_window": 62}}, "n_window must be even and at most max_source_positions 60, is 62"),
        ({"audio_config": {"num_mel_bins": 128}}, "feature_size is 20, but audio_config.num_mel_bins of config.json"),
        ({"audio_config": {"d_model": "x"}}, "d_model must be a positive integer"),
        ({"position_id_per_seconds": 0.4}, "position_id_per_seconds times seconds_per_chunk must be at least 1"),
        ({"position_id_per_seconds": math.nan}, "position_id_per_seconds must be a positive number"),
        ({"audio_token_index": None}, "audio_token_id must be a positive integer"),
    ],
)
def test_unsupported_configs_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Qwen25OmniPlanner(edited(**changes), PROCESSOR)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_config": {"output_dim": 32}}, "output_dim 32 isn't the hidden size 64"),
        ({"vision_config": {"out_hidden_size": 32}}, "out_hidden_size 32 isn't the hidden size 64"),
        ({"audio_config": {"activation_function": "relu"}}, "activation_function 'relu' is not served"),
    ],
)
def test_unsupported_towers_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Qwen25Omni(edited(**changes))


def test_a_thinker_saved_by_itself() -> None:
    alone = CONFIG["thinker_config"] | {"model_type": "qwen2_5_omni_thinker"}
    header = AudioHeader("WAV", 16_000, 1, 50_000)
    assert Qwen25OmniPlanner(alone, PROCESSOR).plan(header) == PLANNER.plan(header)
    assert Qwen25Omni(alone).decoder_config == Qwen25Omni(CONFIG).decoder_config
