"""Gemma 4's audio against the reference: numbers of tokens, features, rows of the tower; and bad configs."""

import random
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import assert_rows
from tests.support.image_cases import picture, png
from tests.support.sounds import sound, tone
from tests.support.tiny import GEMMA4, GEMMA4_AUDIO, GEMMA_IDS, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS
from triptych.media.audio import decode_audio
from triptych.models.base import AUDIO, EncoderInput, ModelConfig
from triptych.models.gemma4.encoder import Gemma4
from triptych.models.gemma4.plan import Gemma4Planner
from triptych.models.gemma4.preprocess import Gemma4Preprocessor
from triptych.models.gemma4.speech import SpeechFeatures
from triptych.prompt.probe import probe_image
from triptych.prompt.probe_audio import probe_audio
from triptych.prompt.prompt import PromptBuilder
from triptych.types import AudioHeader

CPU, FP32 = torch.device("cpu"), WEIGHT_FORMATS["float32"]
GEMMA = "gemma4+gemma4_vision"
CONFIG: ModelConfig = GEMMA4.config
PROCESSOR: dict[str, Any] = GEMMA4.preprocessor or {}
PLANNER, PREPROCESS = Gemma4Planner(CONFIG, PROCESSOR), Gemma4Preprocessor(CONFIG, PROCESSOR)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"feature_size": 128},
    {"feature_size": 40, "per_bin_mean": [0.1 * number for number in range(40)], "per_bin_stddev": [2.0] * 40},
    {"frame_length_ms": 32.0, "hop_length_ms": 8.0, "mel_floor": 0.1, "fft_overdrive": True, "input_scale_factor": 0.5},
    {"sampling_rate": 8000, "min_frequency": 100.0, "max_frequency": 3800.0},
]


def reference_of(settings: dict[str, Any], samples: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int]:
    """The features of valid frames, and the number of tokens that the processor counts."""
    made: Any = Gemma4AudioFeatureExtractor(**settings)([samples], return_tensors="np")
    mask = made["input_features_mask"][0]
    features = made["input_features"][0][mask]
    for _ in range(2):  # as ``Gemma4Processor.replace_audio_token`` counts
        mask = mask[::2]
    return features, int(mask.sum())


def changed(**audio: Any) -> ModelConfig:
    return deepcopy(CONFIG) | {"audio_config": GEMMA4_AUDIO | audio}


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_features_equal_the_reference(number: int) -> None:
    settings, source = SETTINGS[number], random.Random(number)
    features = SpeechFeatures.from_config(settings)
    for samples in (321, 640, source.randint(322, 5000), source.randint(322, 100_000)):
        clip = np.random.default_rng(samples).standard_normal(samples).astype(np.float32)
        expected, _ = reference_of(settings, clip)
        assert np.array_equal(features(clip), expected)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_numbers_of_tokens(count: int) -> None:
    source = random.Random(3)
    for number in range(count):
        samples = (161, 320, 321, 480_000)[number] if number < 4 else source.randint(161, 480_000)
        plan = PLANNER.plan(AudioHeader("WAV", 16_000, 1, samples))
        _, tokens = reference_of({"feature_size": 20}, np.zeros(samples, np.float32))
        assert plan.rows == tokens <= 750
        assert plan.is_whole


def test_too_short_and_too_long() -> None:
    def frames(samples: int, rate: int = 16_000) -> int:
        return PLANNER.plan(AudioHeader("WAV", rate, 1, samples)).grid[0]

    assert [frames(161), frames(480_000), frames(1_440_000, 48_000)] == [1, 2999, 2999]
    with pytest.raises(BadMediaSize, match="shorter than 10 ms"):
        frames(160)
    with pytest.raises(MediaTooLarge, match=r"30\.00 s long; the model takes at most 30 s"):
        frames(480_001)


@pytest.mark.parametrize(
    ("container", "rate", "channels"), [("wav", 16_000, 1), ("mp3", 44_100, 2), ("ogg", 48_000, 2)]
)
def test_files(container: str, rate: int, channels: int) -> None:
    data = sound(container, tone(1.37, rate, channels), rate)
    header = probe_audio(data)
    plan = PLANNER.plan(header)
    [part] = PREPROCESS(data, plan)
    expected, tokens = reference_of({"feature_size": 20}, decode_audio(data, header, 16_000))
    assert np.array_equal(part.patches, expected)
    assert (part.tower, part.grid, plan.rows) == (AUDIO, (len(expected), 1, 1), tokens)


def test_an_input_that_isnt_planned(tmp_path: Path) -> None:
    data = sound("wav", tone(1.0, 16_000))
    plan = PLANNER.plan(probe_audio(data))
    [part] = plan.parts
    with pytest.raises(PlanMismatch, match="other windows"):
        list(PREPROCESS(data, replace(plan, parts=(replace(part, payload=(0, 7)),))))
    deaf = Gemma4Preprocessor(CONFIG | {"audio_config": None}, PROCESSOR)
    with pytest.raises(PlanMismatch, match="doesn't take"):
        list(deaf(data, plan))
    tower = load_adapter(make_tiny(tmp_path, GEMMA)).load_encoder(Checkpoint(tmp_path), FP32, CPU)
    for bands, grid in ((20, (8, 1, 1)), (20, (9, 1, 2)), (16, (9, 1, 1)), (24, (9, 1, 1))):
        with pytest.raises(PlanMismatch, match="don't fill"):
            tower.encode([EncoderInput(np.zeros((9, bands), np.float32), grid, "name", AUDIO)])


def heard(frames: int, bands: int = 20) -> EncoderInput:
    features = np.random.default_rng(frames).standard_normal((frames, bands)).astype(np.float32)
    return EncoderInput(features, (frames, 1, 1), str(frames), AUDIO)


@pytest.mark.parametrize(
    ("settings", "bands"),
    [
        ({}, 20),
        ({"use_clipped_linears": False, "attention_chunk_size": 12, "attention_context_left": 13}, 18),
        ({"gradient_clipping": 1.5, "residual_weight": 0.3, "hidden_act": "gelu", "conv_kernel_size": 1}, 20),
        ({"num_attention_heads": 4, "rms_norm_eps": 0.1, "attention_chunk_size": 1, "attention_context_left": 2}, 20),
    ],
)
def test_rows(tmp_path: Path, settings: dict[str, Any], bands: int) -> None:
    """In batches with images, and beside longer clips, whose rest is silence there."""
    folder = make_tiny(tmp_path, GEMMA, config={"audio_config": GEMMA4_AUDIO | settings})
    tower = load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)
    model = cast(Any, load_reference(folder, torch.float32)).model
    clips = [heard(frames, bands) for frames in (1, 2, 4, 5, 16, 17, 40, 99, 203)]
    [image] = PREPROCESS(png(picture(30, 20, 1)), PLANNER.plan(probe_image(png(picture(30, 20, 1)))))
    found = tower.encode([*clips, image])
    assert torch.equal(found[-1], tower.encode([image])[0])
    for clip, rows in zip(clips, found, strict=False):
        padded = torch.from_numpy(np.pad(clip.patches, ((0, 3), (0, 0))))
        with torch.inference_mode():
            made = model.get_audio_features(padded[None], (torch.arange(len(padded)) < len(clip.patches))[None])
        assert_rows(rows, made.pooler_output[made.attention_mask])


@pytest.mark.parametrize(("weights", "error"), [("bfloat16", 0.06), ("int8", 0.1), ("int4", 0.6)])
def test_formats(tmp_path: Path, weights: str, error: float) -> None:
    folder, clips = make_tiny(tmp_path, GEMMA), [heard(99), heard(40)]
    expected, found = (
        torch.cat(load_adapter(folder).load_encoder(Checkpoint(folder), one, CPU).encode(clips)).float()
        for one in (FP32, (WEIGHT_FORMATS | QUANTIZED_FORMATS)[weights])
    )
    assert 0 < (found - expected).norm() < error * expected.norm()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "whisper"}, "model_type"),
        ({"subsampling_conv_channels": [20]}, "subsampling_conv_channels"),
        ({"subsampling_conv_channels": [20, 10**9]}, "subsampling_conv_channels"),
        ({"subsampling_conv_channels": 20}, "subsampling_conv_channels"),
        ({"num_attention_heads": 5}, "heads"),
        ({"num_hidden_layers": 10**6}, "layers"),
        ({"conv_kernel_size": 10**6}, "window"),
        ({"attention_context_left": 6}, "attention_context_left 6"),
        ({"attention_context_right": 1}, "attention_context_right 1"),
        ({"attention_invalid_logits_value": 0.0}, "attention_invalid_logits_value"),
        ({"attention_logit_cap": 0.0}, "attention_logit_cap"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"use_clipped_linears": "yes"}, "use_clipped_linears"),
    ],
)
def test_bad_configs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Gemma4(changed(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_size": 24}, "feature_size is 24"),
        ({"feature_size": 10**9}, "feature_size"),
        ({"sampling_rate": 0}, "sampling_rate"),
        ({"dither": 0.1}, "dither"),
        ({"preemphasis": 0.97}, "preemphasis"),
        ({"padding_value": 1.0}, "padding_value"),
        ({"frame_length_ms": 0.0}, "frame_length_ms"),
        ({"hop_length_ms": 1e9}, "hop_length_ms"),
        ({"frame_length_ms": 1e6}, "frame_length_ms"),
        ({"min_frequency": 9000.0}, "min_frequency"),
        ({"mel_floor": 0.0}, "mel_floor"),
        ({"per_bin_mean": [1.0]}, "per_bin_mean"),
        ({"per_bin_stddev": ["a"] * 20}, "per_bin_stddev"),
    ],
)
def test_bad_processors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Gemma4Planner(CONFIG, PROCESSOR | settings)


def test_markers_and_models_without_the_tower(tmp_path: Path) -> None:
    data = sound("wav", tone(1.0, 16_000))
    message = {"role": "user", "content": [{"type": "audio", "data": data}]}
    prompt = PromptBuilder(make_tiny(tmp_path / "hears", GEMMA)).build([message])
    [item] = prompt.items
    audio, start, end = (GEMMA_IDS[token] for token in ("<|audio_pad|>", "<|audio>", "<audio|>"))
    [span] = item.placement.spans
    # the tiny template has markers of its own around it
    assert prompt.tokens[span.start - 1 : span.end + 1] == [start, *[audio] * 25, end]
    deaf = PromptBuilder(make_tiny(tmp_path / "deaf", GEMMA, config={"audio_config": None}))
    assert deaf.modalities == ["image", "video"]
    with pytest.raises(UnsupportedMedia, match="no audio"):
        deaf.build([message])
    with pytest.raises(UnsupportedMedia, match="no audio"):
        deaf.planner.plan(probe_audio(data))
