"""Layers of towers in two calls of the compiled kernels against the same layers module by module, which other tests
compare with transformers."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import load_adapter
from tests.support.families import WITH_IMAGES
from tests.support.forward import assert_close, random_input
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.layers import native, pointwise, tower_layer
from triptych.layers.attention import tower
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.linear import WEIGHT_FORMATS, LayerNorm, PlainFormat, RMSNorm
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.shared.encoder import MultiTowerEncoder

CPU = torch.device("cpu")
FAMILIES = ["qwen3_vl", *WITH_IMAGES]
IN_HALVES = ("qwen3_vl", "qwen2_5_vl")
"""Compared in half precision in every run: layer norms and GELU, and RMS norms with gates."""
GRIDS = [(1, 4, 6), (1, 2, 2), (1, 18, 10)]
"""An image of a whole window and a part of one, one smaller than a window, one of many windows."""


@pytest.fixture(autouse=True)
def _by_these_kernels(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pointwise.declared(kernels)
    monkeypatch.setattr(native, "library", lambda: kernels)
    monkeypatch.setattr(pointwise, "compiled_kernels", lambda: library)
    for user in (tower, tower_layer):
        monkeypatch.setattr(user, "paged_attention", lambda in_bf16=False: PagedAttention(kernels, in_bf16))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, checkpoint_folder: Callable[..., Path]) -> dict[str, Path]:
    made = {name: make_tiny(tmp_path_factory.mktemp("tiny"), name) for name in WITH_IMAGES}
    return made | {"qwen3_vl": checkpoint_folder()}


def load(folder: Path, weights: PlainFormat | Any) -> tuple[Any, list[TowerLayer]]:
    """Return the vision tower and its layers."""
    encoder: Any = load_adapter(folder).load_encoder(Checkpoint(folder), weights, CPU)
    vision: Any = encoder.towers["vision"] if isinstance(encoder, MultiTowerEncoder) else encoder
    return vision, list(vision.layers)


def is_compiled(layer: TowerLayer) -> tuple[bool, bool]:
    return layer.compiled_attend is not None, layer.compiled_finish is not None


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param(name, one, marks=[] if one == "float32" or name in IN_HALVES else pytest.mark.slow)
        for name in FAMILIES
        for one in ("float32", "float16", "bfloat16")
    ],
)
def test_compiled_layers_are_bit_identical(folders: dict[str, Path], name: str, weights: str) -> None:
    """Families differ in norms, activations, gates and windows."""
    tower, layers = load(folders[name], WEIGHT_FORMATS[weights])
    assert {is_compiled(layer) for layer in layers} == {(True, True)}
    values = tower.patches.product.inputs
    images = [random_input(grid, seed, values) for seed, grid in enumerate(GRIDS)]
    found = torch.cat(tower.encode(images))
    torch.set_num_threads(3)
    assert torch.equal(torch.cat(tower.encode(images)), found)
    for image, rows in zip(images, tower.encode(images), strict=True):
        assert_close(tower.encode([image])[0], rows, 1e-5)
    for layer in layers:
        layer.compiled_attend = layer.compiled_finish = None
    assert torch.equal(torch.cat(tower.encode(images)), found)


def test_families_use_all_kinds_of_layers(folders: dict[str, Path]) -> None:
    kinds = set()
    for name in FAMILIES:
        _, [layer, *_] = load(folders[name], WEIGHT_FORMATS["float32"])
        mlp = layer.mlp.activation if isinstance(layer.mlp, MLP) else type(layer.mlp)
        kinds.add((type(layer.attention_norm), mlp))
    assert kinds == {(LayerNorm, Activation.GELU_TANH), (LayerNorm, Activation.QUICK_GELU), (RMSNorm, GatedMLP)}


@pytest.mark.parametrize("name", FAMILIES)
def test_unsupported_layers_run_module_by_module(folders: dict[str, Path], name: str) -> None:
    tower, layers = load(folders[name], PlainFormat(torch.bfloat16))
    assert {is_compiled(layer) for layer in layers} == {(False, False)}
    rows = torch.cat(tower.encode([random_input(grid, 0, tower.patches.weight.shape[1]) for grid in GRIDS]))
    assert rows.isfinite().all()


def test_segments_must_add_up(folders: dict[str, Path]) -> None:
    _, [layer, *_] = load(folders["qwen2_vl"], WEIGHT_FORMATS["float32"])
    hidden = torch.randn(8, len(layer.attention_norm.weight))
    angles: Tensor = torch.randn(8, 2, hidden.shape[1] // layer.attention.num_heads)
    with pytest.raises(ValueError, match="segments of 7 tokens for 8"):
        layer(hidden, torch.tensor([0, 4, 7]), (angles[:, 0], angles[:, 1]))
