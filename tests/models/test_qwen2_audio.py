"""Qwen2-Audio against the reference: number of tokens, features, templates, names of tensors; and its settings."""

import json
import math
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

from tests.support.checkpoints import load_adapter
from tests.support.sounds import sound, tone
from tests.support.tiny import HEARING, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch, UnsupportedMedia
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.media.audio import decode_audio
from triptych.models.base import EncoderInput
from triptych.models.qwen2_audio.encoder import Qwen2Audio
from triptych.models.qwen2_audio.plan import Qwen2AudioPlanner
from triptych.models.qwen2_audio.preprocess import Qwen2AudioPreprocessor
from triptych.prompt.probe_audio import probe_audio
from triptych.prompt.prompt import PromptBuilder
from triptych.types import AudioHeader, ImageHeader, ItemPlan, VideoHeader

CPU, FP32 = torch.device("cpu"), WEIGHT_FORMATS["float32"]
CONFIG = HEARING["qwen2_audio"].config
PROCESSOR: dict[str, Any] = HEARING["qwen2_audio"].preprocessor or {}
PLANNER = Qwen2AudioPlanner(CONFIG, PROCESSOR)
PREPROCESSOR = Qwen2AudioPreprocessor(CONFIG, PROCESSOR)
SECONDS = 8
EXTRACTOR: Any = WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
TEMPLATE: str = vars(Qwen2AudioProcessor)["default_chat_template"].fget(None)
AUDIO_PAD = "<|audio_pad|>"
"""What the tiny tokenizer has for ``<|AUDIO|>``."""


def edited(**sections: dict[str, Any]) -> dict[str, Any]:
    config = deepcopy(CONFIG)
    for name, changes in sections.items():
        config[name] |= changes
    return config


def heard(samples: int, rate: int = 16_000) -> ItemPlan:
    return PLANNER.plan(AudioHeader("WAV", rate, 1, samples))


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_number_of_tokens_equals_the_reference(count: int) -> None:
    source = random.Random(count)
    for _ in range(count):
        rate = source.choice([8_000, 16_000, 22_050, 44_100, 48_000, 384_000])
        samples = source.randint(-(-400 * rate // 16_000), SECONDS * rate)
        plan = heard(samples, rate)
        frames = math.ceil(math.ceil(samples * 16_000 / rate) / 160)
        assert plan.grid == (frames, 1, 1)
        assert plan.rows == (((frames - 1) // 2 + 1) - 2) // 2 + 1  # as Qwen2AudioProcessor has it
        assert plan.num_parts == 1
        assert plan.is_whole


@pytest.mark.parametrize("frames", [100, 101, 102, 103])
def test_the_processor_counts_as_many(frames: int) -> None:
    processor: Any = Qwen2AudioProcessor.__new__(Qwen2AudioProcessor)
    processor.feature_extractor, processor.audio_token = EXTRACTOR, "A"
    clip = np.zeros(160 * frames, dtype=np.float32)
    _, (text,) = processor._process_audio([clip], sampling_rate=16_000)
    assert len(text) == heard(len(clip)).rows


@pytest.mark.parametrize(
    ("container", "rate", "channels", "seconds"),
    [
        ("mp3", 44_100, 2, 5.37),
        ("ogg", 48_000, 2, 5.37),
        *(("wav", 16_000, 1, seconds) for seconds in (0.3, 5.37, 7.98, 7.99, 8.0)),
    ],
)
def test_features_equal_the_reference(container: str, rate: int, channels: int, seconds: float) -> None:
    """Also those of what follows the clip, which the convolutions see."""
    data = sound(container, tone(seconds, rate, channels), rate)
    header = probe_audio(data)
    plan = PLANNER.plan(header)
    [part] = PREPROCESSOR(data, plan)
    made = EXTRACTOR(decode_audio(data, header, 16_000), sampling_rate=16_000, return_attention_mask=True)
    assert made["attention_mask"].sum() == plan.grid[0] == part.grid[0]
    assert len(part.patches) == min(plan.grid[0] + 2, 100 * SECONDS)
    np.testing.assert_allclose(part.patches, made["input_features"][0].T[: len(part.patches)], atol=1e-4)


def test_media_that_are_refused() -> None:
    with pytest.raises(BadMediaSize, match="shorter than 25 ms"):
        heard(399)
    with pytest.raises(MediaTooLarge, match=r"8\.01 s long; the model takes at most 8 s"):
        heard(128_100)
    with pytest.raises(UnsupportedMedia, match="takes no images"):
        PLANNER.plan(ImageHeader("PNG", 64, 64))
    with pytest.raises(UnsupportedMedia, match="takes no videos"):
        PLANNER.plan(VideoHeader("MP4", 64, 64, 10, 2.0))


def test_other_plans_are_refused() -> None:
    data = sound("flac", tone(2.0, 16_000))
    plan = PLANNER.plan(probe_audio(data))
    for payload in ((), (0, 10**9), (-1, 200)):
        moved = msgspec.structs.replace(plan.parts[0], payload=payload)
        with pytest.raises(PlanMismatch, match="other windows"):
            list(PREPROCESSOR(data, msgspec.structs.replace(plan, parts=(moved,))))
    with pytest.raises(PlanMismatch, match="takes audio alone, not the image of the plan"):
        PREPROCESSOR(data, msgspec.structs.replace(plan, modality="image", header=ImageHeader("PNG", 64, 64)))


@pytest.mark.parametrize(
    "condition",
    [
        "'audio' in content or 'audio_url' in content",
        "'audio' in content or 'audio_url' in content or message['type'] == 'audio'",
        "'audio' in content or 'audio_url' in content or message['type'] == 'audio' or content['type'] == 'audio'",
    ],
)
def test_templates_old_and_new_number_clips(tmp_path: Path, condition: str) -> None:
    newest = "'audio' in content or 'audio_url' in content or message['type'] == 'audio' or content['type'] == 'audio'"
    assert newest in TEMPLATE
    make_tiny(tmp_path, "qwen2_audio")
    template = TEMPLATE.replace(newest, condition).replace("<|AUDIO|>", AUDIO_PAD)
    (tmp_path / "chat_template.jinja").write_text(template)
    builder = PromptBuilder(tmp_path)
    assert builder.modalities == ["audio"]
    clips = [{"type": "audio", "data": sound("wav", tone(seconds, 16_000))} for seconds in (0.5, 1.2)]
    question = {"role": "user", "content": [clips[0], {"type": "text", "text": "or"}, clips[1]]}
    prompt = builder.build([question])
    assert [item.plan.rows for item in prompt.items] == [12, 30]
    begins = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    shown = [f"Audio {number}: <|audio_bos|>{AUDIO_PAD * rows}<|audio_eos|>\n" for number, rows in ((1, 12), (2, 30))]
    text = builder.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
    assert text == f"{begins}{shown[0]}or{shown[1]}<|im_end|>\n<|im_start|>assistant\n"


def test_names_of_tensors(tmp_path: Path) -> None:
    """Published, saved, and as transformers' modules are called: the same model."""
    folders = [make_tiny(tmp_path / layout, "qwen2_audio", layout) for layout in ("published", "saved")]
    nested = make_tiny(tmp_path / "nested", "qwen2_audio")
    weights = load_file(nested / "model.safetensors")
    renamed = {
        f"model.{name}".replace("model.language_model.model.", "model.language_model.").replace(
            "model.language_model.lm_head.", "lm_head."
        ): weight
        for name, weight in weights.items()
    }
    save_file(renamed, nested / "model.safetensors", metadata={"format": "pt"})
    features = np.random.default_rng(1).standard_normal((52, 20)).astype(np.float32)
    rows, decoders = [], []
    for folder in (*folders, nested):
        adapter, checkpoint = load_adapter(folder), Checkpoint(folder)
        tower = adapter.load_encoder(checkpoint, FP32, CPU)
        rows.append(tower.encode([EncoderInput(features, (50, 1, 1), "x", "audio")])[0])
        decoders.append(list(adapter.load_decoder(checkpoint, FP32, CPU).parameters()))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    for own, *others in zip(*decoders, strict=True):
        assert all(torch.equal(own, other) for other in others)


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "qwen2_audio")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"audio_tower.ear.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place for tensor 'audio_tower\.ear\.weight'"):
        load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)


def test_published_files_leave_out_defaults() -> None:
    """As those of Qwen2-Audio-7B do."""
    text = {"model_type": "qwen2", "intermediate_size": 11_008, "max_position_embeddings": 8192, "vocab_size": 156_032}
    published = json.loads(json.dumps({"model_type": "qwen2_audio", "text_config": text, "audio_config": {}}))
    planner = Qwen2AudioPlanner(published, {"chunk_length": 30, "feature_size": 128})
    assert planner.context_length == 8192
    assert planner.placeholder_tokens == {"audio": 151_646}
    assert planner.plan(AudioHeader("WAV", 16_000, 1, 480_000)).rows == 750
    config = Qwen2Audio(published).decoder_config
    assert (config.num_layers, config.hidden_size, config.tie_embeddings) == (32, 4096, False)


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        (edited(audio_config={"max_source_positions": 1500}), {}, "gives 800 frames, but .* takes 3000"),
        (edited(audio_config={"num_mel_bins": 128}), {}, "feature_size is 20, but audio_config.num_mel_bins"),
        (CONFIG, {"chunk_length": 30}, "gives 3000 frames, but .* takes 800"),
        (CONFIG | {"audio_token_index": "x"}, {}, "audio_token_index must be a positive integer"),
    ],
)
def test_unsupported_configs_are_rejected(config: dict[str, Any], processor: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Qwen2AudioPlanner(config, PROCESSOR | processor)


def test_an_activation_that_is_not_served() -> None:
    with pytest.raises(CheckpointError, match="activation_function 'relu' is not served"):
        Qwen2Audio(edited(audio_config={"activation_function": "relu"}))
