"""Qwen3-Omni's audio against the reference: number of tokens, features, parts."""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from tests.support.sounds import sound, tone
from tests.support.tiny import TINY
from triptych.checkpoint.config_files import load_preprocessor_config
from triptych.errors import BadMediaSize, CheckpointError, MediaMismatch, PlanMismatch
from triptych.media.audio import decode_audio
from triptych.models.base import AUDIO
from triptych.models.qwen3_omni.audio import AudioCostModel, ChunkFraming
from triptych.models.qwen3_omni.plan import Qwen3OmniPlanner
from triptych.models.qwen3_omni.preprocess import Qwen3OmniPreprocessor
from triptych.prompt.probe_audio import probe_audio
from triptych.types import AudioHeader, ItemPlan

CONFIG = TINY["qwen3_omni_moe"].config
PROCESSOR: dict[str, Any] = TINY["qwen3_omni_moe"].preprocessor or {}
PLANNER = Qwen3OmniPlanner(CONFIG, PROCESSOR)
PREPROCESSOR = Qwen3OmniPreprocessor(CONFIG, PROCESSOR)
HEARING = ChunkFraming.from_configs(CONFIG["thinker_config"]["audio_config"], PROCESSOR)


def edited(**audio: Any) -> dict[str, Any]:
    config = deepcopy(CONFIG)
    config["thinker_config"]["audio_config"] |= audio
    return config


def heard(samples: int, rate: int = 16_000, channels: int = 1) -> ItemPlan:
    return PLANNER.plan(AudioHeader("WAV", rate, channels, samples))


def test_number_of_tokens_equals_the_reference() -> None:
    frames = torch.arange(1, 3000)
    expected = _get_feat_extract_output_lengths(frames)
    assert [HEARING.rows(count) for count in frames.tolist()] == expected.tolist()


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000, 384_000])
def test_plans_are_exact_whatever_the_rate(rate: int) -> None:
    source = random.Random(rate)
    extractor: Any = WhisperFeatureExtractor(feature_size=20)
    for seconds in (0.026, 0.5, 1.0, source.uniform(0.1, 5), source.uniform(5, 30)):
        samples = round(seconds * rate)
        plan = heard(samples, rate)
        resampled = np.zeros(-(-samples * 16_000 // rate), dtype=np.float32)
        made = extractor(resampled, sampling_rate=16_000, padding=True, truncation=False, return_attention_mask=True)
        frames = int(made["attention_mask"].sum())
        assert plan.grid == (frames, 1, 1)
        assert plan.rows == _get_feat_extract_output_lengths(frames)
        assert sum(plan.rows_of(part) for part in range(plan.num_parts)) == plan.rows


@pytest.mark.parametrize(
    ("frames", "parts"),
    [
        (2, [(0, 2, 2)]),
        (99, [(0, 99, 99)]),
        (100, [(0, 100, 100)]),
        (101, [(0, 101, 200)]),
        (200, [(0, 200, 200)]),
        (201, [(0, 200, 200), (200, 1, 100)]),
        (555, [(0, 200, 200), (200, 200, 200), (400, 155, 200)]),
    ],
)
def test_parts_are_windows_of_whole_chunks(frames: int, parts: list[tuple[int, int, int]]) -> None:
    assert list(HEARING.windows(frames)) == parts
    plan = heard(max(400, frames * 160))
    assert plan.num_parts == len(parts)
    assert [plan.rows_of(number) for number in range(len(parts))] == [HEARING.rows(part[1]) for part in parts]


@pytest.mark.parametrize(
    ("container", "rate", "channels"), [("wav", 16_000, 1), ("mp3", 44_100, 2), ("ogg", 48_000, 2)]
)
@pytest.mark.parametrize("seconds", [0.3, 1.0, 5.37])
def test_features_equal_the_reference(container: str, rate: int, channels: int, seconds: float) -> None:
    data = sound(container, tone(seconds, rate, channels), rate)
    header = probe_audio(data)
    plan = PLANNER.plan(header)
    parts = list(PREPROCESSOR(data, plan))
    assert len(parts) == plan.num_parts
    assert {part.tower for part in parts} == {AUDIO}
    samples = decode_audio(data, header, 16_000)
    extractor: Any = WhisperFeatureExtractor(feature_size=20)
    made = extractor(samples, sampling_rate=16_000, padding=True, truncation=False)
    features = np.concatenate([part.patches[: part.grid[0]] for part in parts])
    np.testing.assert_allclose(features, made["input_features"][0].T, atol=1e-4)
    assert not any(part.patches[part.grid[0] :].any() for part in parts)
    assert [len(part.patches) for part in parts] == [filled for _, _, filled in HEARING.windows(plan.grid[0])]


def test_names_identify_the_audio_of_a_part() -> None:
    loud = tone(2.5, 16_000)
    first, second = (np.concatenate([loud, tone(2.0, 16_000, hertz=hertz) / 2], axis=1) for hertz in (300, 500))
    names = []
    for samples, container in ((first, "wav"), (second, "wav"), (first, "flac")):
        data = sound(container, samples)
        names.append([part.name for part in PREPROCESSOR(data, PLANNER.plan(probe_audio(data)))])
    assert names[0] == names[2]
    assert names[0][0] == names[1][0]
    assert not set(names[0][1:]) & set(names[1][1:])
    assert len({len(name) for name in names[0]}) == 1


def test_wrong_header_is_an_error() -> None:
    data = sound("flac", tone(2.0, 16_000))
    with pytest.raises(MediaMismatch, match="longer than"):
        list(PREPROCESSOR(data, heard_as("FLAC", 16_000)))
    plan, longer = PLANNER.plan(probe_audio(data)), heard_as("WAV", 48_000)
    with pytest.raises(PlanMismatch, match="other windows"):
        list(PREPROCESSOR(data, msgspec.structs.replace(longer, header=plan.header)))
    for payload in ((), (0, 10**9), (-1, 200)):
        moved = msgspec.structs.replace(plan.parts[0], payload=payload)
        with pytest.raises(PlanMismatch, match="other windows"):
            list(PREPROCESSOR(data, msgspec.structs.replace(plan, parts=(moved,))))


def heard_as(container: str, samples: int) -> ItemPlan:
    return PLANNER.plan(AudioHeader(container, 16_000, 1, samples))


def test_too_short_audio_is_rejected() -> None:
    with pytest.raises(BadMediaSize, match="shorter than 25 ms"):
        heard(399)


@pytest.mark.parametrize(
    ("audio", "processor", "message"),
    [
        ({"n_window": 30}, {}, "n_window must be 49 to 52"),
        ({"n_window_infer": 99}, {}, "n_window_infer must be at least a chunk, 100"),
        ({"num_mel_bins": 128}, {}, "feature_size is 20, but audio_config.num_mel_bins of config.json is 128"),
        ({"num_mel_bins": "x"}, {}, "num_mel_bins must be a positive integer"),
        ({"d_model": None, "output_dim": 0}, {}, "output_dim must be a positive integer"),
        ({}, {"hop_length": 0}, "hop_length must be a positive integer"),
        ({}, {"dither": 0.1}, "dither"),
    ],
)
def test_unsupported_configs_are_rejected(audio: dict[str, Any], processor: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Qwen3OmniPlanner(edited(**audio), PROCESSOR | processor)


def test_cost_counts_every_product() -> None:
    """250 frames are three chunks of convolutions, and 33 tokens in windows of 26 and 7."""
    work = AudioCostModel(hidden_size=32, intermediate_size=48, layers=2, channels=8, output_size=64, bands=20, unit=1)
    stem = 9 * (10 * 50 * 8 + 5 * 25 * 8 * 8 + 3 * 13 * 8 * 8) + 13 * 24 * 32
    layer = 33 * (4 * 32 * 32 + 2 * 32 * 48) + 2 * 32 * (26 * 26 + 7 * 7)
    assert work.cost(HEARING, 250) == 3 * stem + 2 * layer + 33 * 32 * (32 + 64)


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_in_every_file_that_transformers_writes(tmp_path: Path) -> None:
    """The newer file has a section for each processor; either may be missing there. Where it speaks of images nothing
    of the older one shines through: that may bound pixels by other names."""
    older = {"feature_size": 20, "hop_length": 160, "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    assert load_preprocessor_config(tmp_path) == older
    for newer, expected in (
        ({"processor_class": "X"}, older),
        ({"feature_extractor": {"feature_size": 80}}, older | {"feature_size": 80}),
        ({"image_processor": {"patch_size": 16}}, {"patch_size": 16}),
        ({"feature_extractor": {"feature_size": 80}, "image_processor": {"patch_size": 16}}, None),
    ):
        (tmp_path / "processor_config.json").write_text(json.dumps(newer))
        assert load_preprocessor_config(tmp_path) == (expected or {"feature_size": 80, "patch_size": 16})
