"""Towers whose linear layers are in int8, and the parts of a model that ``--quantization`` reaches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor

from demo.questions import EVALUATION_SEEDS, make_example
from tests.support.checkpoints import load_adapter
from tests.support.forward import random_input
from tests.support.tiny import TINY, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.demo import MODEL_DIR
from triptych.layers import native
from triptych.layers.int8 import OneDnnInt8Product
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS, PackedLinear, WeightFormat
from triptych.layers.products import CompiledProduct, WeightKind
from triptych.layers.specs import MoESpec
from triptych.models.base import AUDIO, EncoderInput
from triptych.models.registry import FAMILIES

CPU, FP32 = torch.device("cpu"), WEIGHT_FORMATS["float32"]
INT8 = QUANTIZED_FORMATS["int8"].beside(WEIGHT_FORMATS["float16"])
BOUND = 0.03
"""Of the norm of a row's embedding, and of each of its deepstack features."""


def tower_of(folder: Path, weights: WeightFormat) -> Any:
    return load_adapter(folder).load_encoder(Checkpoint(folder), weights, CPU)


def int8_layers(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """The name of each packed layer, and whether its weights are in int8."""
    for name, layer in module.named_modules():
        if isinstance(layer, PackedLinear):
            product = layer.product
            is_int8 = isinstance(product, CompiledProduct) and product.operands.kind == WeightKind.INT8
            yield name, is_int8 or isinstance(product, OneDnnInt8Product)


@pytest.fixture(scope="module")
def pictures() -> list[EncoderInput]:
    """Pictures of the demo model's questions."""
    processor = AutoImageProcessor.from_pretrained(MODEL_DIR, backend="pil")
    shown = [picture for seed in EVALUATION_SEEDS[:8] for picture in make_example(seed).pictures]
    processed = [processor([picture.convert("RGB")], return_tensors="pt") for picture in shown]
    return [
        EncoderInput(one["pixel_values"].numpy(), tuple(one["image_grid_thw"][0].tolist()), "") for one in processed
    ]


def relative_errors(rows: Tensor, exact: Tensor, width: int) -> Tensor:
    """The norm of each row's error, as a share of the exact row's, for each of its features: [rows, features]."""
    error, size = (tensor.unflatten(1, (-1, width)).norm(dim=2) for tensor in (rows - exact, exact))
    return error / size


def test_rows_are_within_the_bound_of_float32(pictures: list[EncoderInput]) -> None:
    exact, rows = (torch.cat(tower_of(MODEL_DIR, weights).encode(pictures)) for weights in (FP32, INT8))
    errors = relative_errors(rows, exact, 192)
    assert errors.shape[1] == 3
    assert errors.median() > 1e-3
    assert errors.max() < BOUND


def test_without_a_compiler_too(pictures: list[EncoderInput], monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN has one bit less."""
    exact = torch.cat(tower_of(MODEL_DIR, FP32).encode(pictures[:2]))
    monkeypatch.setattr(native, "library", lambda: None)
    rows = torch.cat(tower_of(MODEL_DIR, INT8).encode(pictures[:2]))
    assert relative_errors(rows, exact, 192).max() < 2 * BOUND


def test_an_item_is_within_the_bound_of_itself_in_any_batch(pictures: list[EncoderInput]) -> None:
    tower = tower_of(MODEL_DIR, INT8)
    for item, rows in zip(pictures, tower.encode(pictures), strict=True):
        assert relative_errors(rows, tower.encode([item])[0], 192).max() < BOUND


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_picture_that_is_not_a_number_spoils_its_own_rows_alone(pictures: list[EncoderInput], value: float) -> None:
    tower = tower_of(MODEL_DIR, INT8)
    good, other = pictures[0], pictures[1]
    patches = other.patches.copy()
    patches[3, 5] = value
    bad = EncoderInput(patches, other.grid, other.name)
    expected = tower.encode([good, other, good])
    rows = tower.encode([good, bad, good])
    assert rows[1].isnan().any()
    assert torch.equal(rows[0], expected[0])
    assert torch.equal(rows[2], expected[2])


def test_no_number_is_too_large_or_too_small() -> None:
    """Activations far beyond float16's range, and none at all."""
    tower = tower_of(MODEL_DIR, INT8)
    item = random_input((1, 4, 4), 0)
    for scale in (1e12, 1e-30, 0.0):
        [rows] = tower.encode([EncoderInput(item.patches * np.float32(scale), item.grid, item.name)])
        assert rows.isfinite().all()


@pytest.mark.parametrize("name", [name for name in TINY if FAMILIES[name].takes_media])
def test_all_layers_of_every_familys_towers_but_convolutions(name: str, tmp_path: Path) -> None:
    tower = tower_of(make_tiny(tmp_path, name, "published"), INT8)
    for one in getattr(tower, "towers", {"": tower}).values():
        found = dict(int8_layers(one))
        assert sum(found.values()) > 4
        assert {layer for layer, is_int8 in found.items() if not is_int8} <= {"patches", "merger.products.0"}


def test_an_audio_tower(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "qwen3_omni_moe", "published")
    features = np.random.default_rng(0).standard_normal((200, 20)).astype(np.float32)
    part = EncoderInput(features, (200, 1, 1), "sound", AUDIO)
    exact, rows = (tower_of(folder, weights).encode([part])[0][:, :64] for weights in (FP32, INT8))
    assert 0 < (rows - exact).abs().median() < 0.1


@pytest.mark.parametrize("name", TINY)
def test_int8_reaches_every_product_of_a_decoder_but_head_and_router(name: str, tmp_path: Path) -> None:
    """Also those of experts; the same layers prefill and decode."""
    folder = make_tiny(tmp_path, name, "published")
    decoder = load_adapter(folder).load_decoder(Checkpoint(folder), INT8, CPU)
    found = dict(int8_layers(decoder))
    ffns = [layer.ffn for layer in decoder.config.layers]
    experts = [ffn.num_experts + bool(ffn.shared) if isinstance(ffn, MoESpec) else 1 for ffn in ffns]
    assert len(found) == sum(2 + 2 * count for count in experts) + 1
    assert [layer for layer, is_int8 in found.items() if not is_int8] == ["head.linear"]
