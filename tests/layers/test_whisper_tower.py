"""Towers that are Whisper's encoder with its states averaged in pairs, against transformers'."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import assert_close
from tests.support.tiny import HEARING, TINY, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, PlanMismatch
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import AUDIO, EncoderInput
from triptych.models.qwen2_5_omni.config import thinker_settings, window_framing
from triptych.models.qwen2_audio.config import clip_framing
from triptych.models.shared.whisper_config import WhisperConfig, WhisperFraming

CPU, FP32 = torch.device("cpu"), WEIGHT_FORMATS["float32"]
BANDS = 20
LONGEST = 800
LENGTHS = [3, 4, 5, 7, 8, 37, 98, 99, 100, 101, 102, 103, 137, 200, 201, 250, 399, 797, 798, 799, 800]
"""Frames: less than a window of Qwen2.5-Omni's 100, whole windows, and windows too short for a row."""


def framing_of(family: str) -> WhisperFraming:
    tiny = (TINY | HEARING)[family]
    if family == "qwen2_audio":
        return clip_framing(tiny.config, tiny.preprocessor or {})
    return window_framing(thinker_settings(tiny.config), tiny.preprocessor or {})


@dataclass(frozen=True)
class Case:
    family: str
    folder: Path
    tower: Encoder
    reference: Any
    framing: WhisperFraming


@pytest.fixture(
    scope="module",
    params=[(family, layout) for family in ("qwen2_5_omni", "qwen2_audio") for layout in ("published", "saved")],
    ids=str,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, layout = request.param
    folder = make_tiny(tmp_path_factory.mktemp(family), family, layout)
    tower = load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)
    return Case(family, folder, tower, load_reference(folder), framing_of(family))


def random_features(frames: int) -> NDArray[np.float32]:
    """Of a clip, and of what follows it; by the number of its frames."""
    return np.random.default_rng(frames).standard_normal((LONGEST, BANDS)).astype(np.float32)


def heard(case: Case, frames: int) -> list[EncoderInput]:
    """The parts of an item of random features."""
    features = random_features(frames)
    return [
        EncoderInput(features[first : first + given], (length, 1, 1), f"{frames} {first}", AUDIO)
        for first, length, given in case.framing.windows(frames)
    ]


@torch.inference_mode()
def expected(case: Case, frames: int) -> Tensor:
    """transformers' embeddings of the item by itself."""
    features, tower = torch.from_numpy(random_features(frames).T), case.reference.model.audio_tower
    if case.family == "qwen2_5_omni":
        rows: Tensor = tower(features[:, :frames], feature_lens=torch.tensor([frames])).last_hidden_state
        return rows
    states, count = (int(length) for length in tower._get_feat_extract_output_lengths(frames))
    mask = torch.zeros(1, 1, LONGEST // 2, LONGEST // 2).masked_fill(torch.arange(LONGEST // 2) >= states, -torch.inf)
    embedded: Tensor = case.reference.model.multi_modal_projector(tower(features[None], mask).last_hidden_state)
    return embedded[0, :count]


@pytest.mark.parametrize("frames", LENGTHS)
def test_embeddings_equal_the_reference(case: Case, frames: int) -> None:
    rows = case.tower.encode(heard(case, frames))
    assert_close(torch.cat(rows), expected(case, frames), 1e-5)


def test_mixed_batch_equals_single_items(case: Case) -> None:
    """Windows of several clips, in any order."""
    clips = [heard(case, frames) for frames in LENGTHS]
    batch = [part for parts in clips for part in parts]
    order = np.random.default_rng(0).permutation(len(batch)).tolist()
    mixed = dict(zip(order, case.tower.encode([batch[number] for number in order]), strict=True))
    rows = iter([mixed[number] for number in range(len(batch))])
    for frames, parts in zip(LENGTHS, clips, strict=True):
        assert_close(torch.cat([next(rows) for _ in parts]), expected(case, frames), 1e-5)


def test_packed_linear_layers(case: Case) -> None:
    packed = load_adapter(case.folder).load_encoder(Checkpoint(case.folder), WEIGHT_FORMATS["float16"], CPU)
    parts = heard(case, 250)
    error = (torch.cat(packed.encode(parts)) - torch.cat(case.tower.encode(parts))).abs().median()
    assert 0 < error < 0.05


@pytest.mark.parametrize(("patches", "grid"), [(850, 850), (50, 51), (50, 0), (53, 50)])
def test_frames_that_do_not_fit_their_grid(case: Case, patches: int, grid: int) -> None:
    features = np.zeros((patches, BANDS), dtype=np.float32)
    with pytest.raises(PlanMismatch, match="frames don't fill a window"):
        case.tower.encode([EncoderInput(features, (grid, 1, 1), "x", AUDIO)])


def test_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(CheckpointError, match="d_model 30 must be an even number of values for each of 4"):
        WhisperConfig.from_config({"d_model": 30, "encoder_attention_heads": 4})


def test_cost_counts_every_product() -> None:
    """99 frames are 50 states and 25 rows."""
    settings = {"d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 2, "encoder_attention_heads": 2}
    convolutions = 3 * 20 * 32 * 99 + 3 * 32 * 32 * 50
    layers = 2 * (50 * (4 * 32 * 32 + 2 * 32 * 48) + 2 * 32 * 50 * 50)
    config = WhisperConfig.from_config(settings | {"num_mel_bins": 20})
    assert config.cost(99, 64, 10.0) == (convolutions + layers + 25 * 32 * 64) / 10
