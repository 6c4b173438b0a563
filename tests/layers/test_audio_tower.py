"""Qwen3-Omni's towers together, and its audio tower against transformers'."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import assert_close, random_input
from tests.support.tiny import TINY, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import PlanMismatch
from triptych.layers.linear import WEIGHT_FORMATS
from triptych.models.base import AUDIO, EncoderInput
from triptych.models.qwen3_omni.audio import ChunkFraming
from triptych.models.shared.encoder import MultiTowerEncoder

CPU, FP32 = torch.device("cpu"), WEIGHT_FORMATS["float32"]
BANDS = 20
HEARING = ChunkFraming.from_configs(
    TINY["qwen3_omni_moe"].config["thinker_config"]["audio_config"], TINY["qwen3_omni_moe"].preprocessor or {}
)
LENGTHS = [2, 8, 9, 37, 99, 100, 101, 137, 200, 201, 250, 400, 555]
"""Frames: less than a chunk of 100, whole chunks, and windows of two of them."""


@pytest.fixture(scope="module", params=["published", "saved"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("omni"), "qwen3_omni_moe", request.param)


@pytest.fixture(scope="module")
def towers(folder: Path) -> MultiTowerEncoder:
    loaded = load_adapter(folder).load_encoder(Checkpoint(folder), FP32, CPU)
    assert isinstance(loaded, MultiTowerEncoder)
    return loaded


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


def heard(frames: int) -> list[EncoderInput]:
    """The parts of an item of random features."""
    features = np.random.default_rng(frames).standard_normal((frames, BANDS)).astype(np.float32)
    parts = []
    for first, length, filled in HEARING.windows(frames):
        patches = np.pad(features[first : first + length], ((0, filled - length), (0, 0)))
        parts.append(EncoderInput(patches, (length, 1, 1), f"{frames} {first}", AUDIO))
    return parts


@torch.inference_mode()
def alone(reference: PreTrainedModel, parts: list[EncoderInput]) -> Tensor:
    """transformers' embeddings of the item by itself."""
    features = torch.from_numpy(np.concatenate([part.patches[: part.grid[0]] for part in parts]))
    rows = reference.model.audio_tower(features.T, feature_lens=torch.tensor([len(features)])).last_hidden_state
    assert isinstance(rows, Tensor)
    return rows


@pytest.mark.parametrize("frames", LENGTHS)
def test_embeddings_equal_the_reference(towers: MultiTowerEncoder, reference: PreTrainedModel, frames: int) -> None:
    parts = heard(frames)
    rows = towers.encode(parts)
    assert [len(one) for one in rows] == [HEARING.rows(part.grid[0]) for part in parts]
    assert_close(torch.cat(rows)[:, :64], alone(reference, parts), 1e-5)
    assert torch.cat(rows).shape[1] == towers.embedding_width == 3 * 64
    assert not torch.cat(rows)[:, 64:].any()


def test_mixed_batch_equals_single_items(towers: MultiTowerEncoder, reference: PreTrainedModel) -> None:
    """One batch of images, parts of several clips and short clips, in any order."""
    images = [random_input(grid, seed, 3 * 2 * 14 * 14) for seed, grid in enumerate([(1, 4, 6), (1, 2, 2)])]
    clips = [heard(frames) for frames in LENGTHS]
    batch = [images[0], *(part for parts in clips for part in parts), images[1]]
    order = np.random.default_rng(0).permutation(len(batch)).tolist()
    mixed = dict(zip(order, towers.encode([batch[number] for number in order]), strict=True))
    rows = [mixed[number] for number in range(len(batch))]
    for image, one in ((images[0], rows[0]), (images[1], rows[-1])):
        assert_close(one, towers.encode([image])[0], 1e-5)
        assert one[:, 64:].any()
    hearing = iter(rows[1:-1])
    for parts in clips:
        together = torch.cat([next(hearing) for _ in parts])
        assert_close(together[:, :64], alone(reference, parts), 1e-5)


def test_all_buffers_are_set(towers: MultiTowerEncoder) -> None:
    for tower in towers.towers.values():
        assert isinstance(tower, nn.Module)
        assert all(not tensor.is_meta for tensor in (*tower.parameters(), *tower.buffers()))


def test_packed_linear_layers(folder: Path, towers: MultiTowerEncoder) -> None:
    packed = load_adapter(folder).load_encoder(Checkpoint(folder), WEIGHT_FORMATS["float16"], CPU)
    parts = heard(555)
    error = (torch.cat(packed.encode(parts)) - torch.cat(towers.encode(parts)))[:, :64].abs().median()
    assert 0 < error < 0.05


@pytest.mark.parametrize(("patches", "grid"), [(150, 150), (200, 90), (200, 201)])
def test_frames_that_do_not_fit_their_grid(towers: MultiTowerEncoder, patches: int, grid: int) -> None:
    features = np.zeros((patches, BANDS), dtype=np.float32)
    with pytest.raises(PlanMismatch, match="aren't whole chunks of 100"):
        towers.encode([EncoderInput(features, (grid, 1, 1), "x", AUDIO)])
