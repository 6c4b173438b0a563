"""Layers of towers in two calls of the compiled kernels against the same layers module by module, which other tests
compare with transformers."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.clip.configuration_clip import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPAttention

from tests.support.checkpoints import load_adapter
from tests.support.families import WITH_IMAGES
from tests.support.forward import assert_close, random_input
from tests.support.tiny import make_tiny
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import InternalError
from triptych.layers import native, pointwise, tower_layer
from triptych.layers.attention import tower
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.linear import WEIGHT_FORMATS, LayerNorm, PlainFormat, RMSNorm
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP, Activate, TowerLayer, gates_with_factors, use_our_modules
from triptych.models.qwen2_5_vl.encoder import Qwen25VL
from triptych.models.registry import resolve
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
    return vision, [one for one in vision.module.modules() if isinstance(one, TowerLayer)]


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
    assert len(layers) == tower.module.config.depth
    has_one_product = name != "qwen2_5_omni"  # whose queries, keys and values are products of their own
    assert {is_compiled(layer) for layer in layers} == {(has_one_product, True)}
    values = tower.module.patch_embed.proj.linear.product.inputs
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
    values = tower.module.config.in_channels if hasattr(tower.module.config, "in_channels") else 3
    patch = values * tower.module.config.temporal_patch_size * tower.module.config.patch_size**2
    rows = torch.cat(tower.encode([random_input(grid, 0, patch) for grid in GRIDS]))
    assert rows.isfinite().all()


class _Block(nn.Module):
    """A layer as in transformers' towers, of other activations than those that we know."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = activation


def test_only_known_activations_are_replaced() -> None:
    assert gates_with_factors(nn.ModuleList([_Block(nn.ReLU())]), {"_Block"}) == {}
    assert gates_with_factors(nn.ModuleList([_Block(nn.SiLU())]), {"_Block"}) == {"0.gate_proj": "0.up_proj"}
    block = nn.ModuleList([_Block(nn.ReLU())])
    with pytest.raises(InternalError, match="ModuleList's 0 is no _Block that can be replaced"):
        use_our_modules(block, in_bf16=False, replaced={"_Block"})
    assert isinstance(block[0], _Block)
    assert isinstance(block[0].act_fn, nn.ReLU)
    with pytest.raises(InternalError, match="ModuleList has no replaceable Block"):
        use_our_modules(block, in_bf16=False, replaced={"Block"})


def test_only_named_classes_are_replaced(folders: dict[str, Path]) -> None:
    """But for layer norms and activations, whose classes say what they compute."""
    assert gates_with_factors(nn.ModuleList([_Block(nn.SiLU())]), {"MLP"}) == {}
    [spec] = Qwen25VL.specs
    config = load_config(folders["qwen2_5_vl"])["vision_config"]
    module = resolve(spec.module)(resolve(spec.config)(**config))
    use_our_modules(module, in_bf16=False, replaced=())
    assert not any(isinstance(one, TowerLayer | MLP | TowerAttention | RMSNorm) for one in module.modules())
    assert any(isinstance(one, Activate) for one in module.modules())


def test_segments_must_add_up(folders: dict[str, Path]) -> None:
    _, [layer, *_] = load(folders["qwen2_vl"], WEIGHT_FORMATS["float32"])
    hidden = torch.randn(8, len(layer.attention_norm.weight))
    angles: Tensor = torch.randn(8, 2, hidden.shape[1] // layer.attention.num_heads)
    with pytest.raises(ValueError, match="segments of 7 tokens for 8"):
        layer(hidden, torch.tensor([0, 4, 7]), (angles[:, 0], angles[:, 1]))


def test_attention_over_batches_is_not_replaced() -> None:
    """CLIP's children are named as those of an audio tower, but it takes other arguments."""
    attention = CLIPAttention(CLIPVisionConfig(hidden_size=8, num_attention_heads=2))
    assert TowerAttention.in_place_of(attention) is None
