"""Audio of Phi-4-multimodal: features, plans and rows as in transformers, for a clip by itself."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import Phi4MultimodalFeatureExtractor

from tests.support.audio_cases import noise
from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import assert_close, assert_rows
from tests.support.published_files import PUBLISHED_PHI4_AUDIO, make_published_phi4
from tests.support.sounds import sound
from tests.support.tiny import PHI4, make_tiny
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import BadMediaSize, CheckpointError, PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.phi4mm.audio import LogFilterbank, audio_config
from triptych.models.phi4mm.plan import Phi4MMPlanner
from triptych.models.phi4mm.preprocess import Phi4MMPreprocessor
from triptych.prompt.probe_audio import probe_audio
from triptych.types import AudioHeader, ItemContext, ItemPlan

PROCESSOR: dict[str, Any] = PHI4.preprocessor or {}
MODES = {"speech": frozenset(("audio",)), "vision": frozenset(("audio", "image"))}
"""The projector, by the request's modalities."""


def plan_of(data: bytes, mode: str = "speech") -> ItemPlan:
    context = ItemContext(modalities=MODES[mode])
    return Phi4MMPlanner(PHI4.config, PROCESSOR).plan(probe_audio(data), context)


@pytest.mark.parametrize("samples", [400, 401, 559, 560, 1680, 16_000, 50_001])
def test_features(samples: int) -> None:
    heard = noise(samples / 16_000, 1)[0, :samples]
    expected = Phi4MultimodalFeatureExtractor()(heard, sampling_rate=16_000, return_tensors="pt")
    features = LogFilterbank(80)(heard)
    assert_close(torch.from_numpy(features), expected["audio_input_features"][0], 1e-4)
    assert plan_of(sound("wav", heard[None])).rows == int(expected["audio_embed_sizes"][0])


@pytest.mark.parametrize("count", [20, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_extractor_counts_as_many(count: int) -> None:
    extractor, source = Phi4MultimodalFeatureExtractor(), random.Random(count)
    planner, silence = Phi4MMPlanner(PHI4.config, PROCESSOR), np.zeros(160_000, np.float32)
    for _ in range(count):
        samples = int(400 * 400 ** source.random())
        counted = extractor(silence[:samples], sampling_rate=16_000, return_tensors="pt")["audio_embed_sizes"]
        assert planner.plan(AudioHeader("WAV", 16_000, 1, samples)).rows == int(counted[0])


def test_short_clips_are_refused() -> None:
    with pytest.raises(BadMediaSize, match="shorter than 25 ms"):
        plan_of(sound("wav", np.zeros((1, 399), np.float32)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("published", [False, True])
@torch.inference_mode()
def test_rows(tmp_path: Path, published: bool, mode: str) -> None:
    """Also of a clip that goes through the tower in two windows."""
    saved = make_tiny(tmp_path / "saved", "phi4_multimodal")
    folder = make_published_phi4(tmp_path / "published") if published else saved
    tower = load_adapter(folder).load_encoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], torch.device("cpu"))
    reference: Any = load_reference(saved)
    embed = reference.model.embed_tokens_extend.audio_embed
    for seconds in (0.03, 1.0, 41.0):
        data = sound("wav", noise(seconds, 1))
        plan = plan_of(data, mode)
        [part] = Phi4MMPreprocessor(load_config(folder), PROCESSOR)(data, plan)
        [rows] = tower.encode([part])
        tokens, features = torch.full((1, plan.rows), reference.config.audio_config.audio_token_id), part.patches[None]
        sizes, embeddings = torch.tensor([plan.rows]), torch.zeros(1, plan.rows, 64)
        expected = embed(tokens, embeddings, torch.from_numpy(features), sizes, None, mode)[0]
        assert_rows(rows, expected)


def test_plans_that_do_not_fit_are_refused() -> None:
    data = sound("wav", noise(1.0, 1))
    plan, preprocess = plan_of(data), Phi4MMPreprocessor(PHI4.config, PROCESSOR)
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    other = type(plan.parts[0])(((0, 13),), 98, 1.0, "audio", (2,))
    for changes in ({"rows": 14}, {"parts": ()}, {"parts": (other,)}):
        with pytest.raises(PlanMismatch):
            list(preprocess(data, ItemPlan(**fields | changes)))


@pytest.mark.parametrize(
    "changes",
    [{"chunk_size": 18}, {"time_reduction": 4}, {"causal": False}, {"activation": "gelu"}, {"ext_pw_out_channel": 8}],
)
def test_settings_that_are_not_served_are_refused(changes: dict[str, Any]) -> None:
    config = {"model_type": "phi4mm", "audio_processor": {"config": PUBLISHED_PHI4_AUDIO | changes}}
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        audio_config(config)


def test_other_features_are_refused() -> None:
    with pytest.raises(CheckpointError, match="hop_length"):
        Phi4MMPlanner(PHI4.config, PROCESSOR | {"hop_length": 100})
