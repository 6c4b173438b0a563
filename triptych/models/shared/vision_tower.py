"""Vision towers of the Qwen-VL and GLM-V series: their settings, the names of their tensors, and loading them.

The references are ``Qwen2VisionTransformerPretrainedModel``, ``Qwen2_5_VisionTransformerPretrainedModel``,
``Qwen3VLVisionModel`` and ``Glm4vVisionModel`` in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, TypeVar

from triptych.errors import CheckpointError
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import TowerLayer
from triptych.models.base import ModelConfig
from triptych.models.shared.grid_tower import GatedMerger, GridTower, Merger, PositionTable, Windows, axial
from triptych.models.shared.settings import axial_theta, positive_number, setting
from triptych.models.shared.tower_limits import check_heads, check_layers
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

T = TypeVar("T")

GATED = 3
"""Layers of a gated MLP."""
DEEPSTACK = "deepstack_visual_indexes"
PRODUCT_EPS = 1e-5
"""Epsilon of the norm between a gated merger's products; not in the config."""


@dataclass(frozen=True)
class VisionTowerSpec:
    """What a family's tower has, and what configs and checkpoints call it."""

    settings: Mapping[str, Any]
    """What is read of the section, with the values of settings that a config may leave out; None if it must not."""
    mlp: tuple[str, ...]
    """Names of an MLP's layers: two or, with gates before them, three."""
    mlp_bias: bool = True
    qkv: tuple[str, ...] = ("qkv",)
    """Names of the layers of queries, keys and values."""
    output_bias: bool = True
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")
    """Names of the norm and of the two layers of a ``Merger``."""
    gated_merger: bool = False
    """Whether there is a ``GatedMerger`` instead, and a norm after the projection of patches."""
    rms_norms: bool = False
    patch_bias: bool = True
    positions: str | None = "pos_embed"
    """Name of the table of positions, if there is one."""
    hidden: str = "hidden_size"
    """Setting with the width of the states."""
    intermediate: str = "intermediate_size"
    """Setting with the width between an MLP's layers."""
    output: str = "out_hidden_size"
    """Setting with the width of an embedding."""
    deepstack: str | None = None
    """Name of the mergers of deepstack features, after the layers that ``DEEPSTACK`` lists."""


@dataclass(frozen=True)
class VisionTowerConfig:
    """The settings of a tower."""

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    merger_size: int
    """Width between the last layers of a gated merger."""
    output_size: int
    merge_size: int
    patch: tuple[int, int]
    """Frames of a patch, and its side in pixels."""
    activation: Activation
    eps: float
    theta: float
    attention_bias: bool
    """Whether the layers of queries, keys and values have biases."""
    side: int
    """Side of the table of positions, if there is one."""
    windows: Windows | None
    deepstack: tuple[int, ...]
    """Numbers of the layers with deepstack features, from 0."""

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_config(cls, vision: ModelConfig, spec: VisionTowerSpec) -> "VisionTowerConfig":
        """Read the ``vision_config`` section. Raises CheckpointError for a setting that is missing, invalid or not
        served."""
        given = {name: default if vision.get(name) is None else vision[name] for name, default in spec.settings.items()}
        read = partial(_read, given)
        hidden, depth, patch = read(spec.hidden, int), read("depth", int), read("patch_size", int)
        check_layers(depth)
        check_heads(hidden, heads := read("num_heads", int))
        if hidden // heads % 4:
            raise CheckpointError(f"config.json: vision_config has {heads} heads of {hidden} values")
        merge = read("spatial_merge_size", int)
        has_ratio = spec.intermediate == "mlp_ratio"
        return cls(
            num_layers=depth,
            num_heads=heads,
            hidden_size=hidden,
            intermediate_size=read(spec.intermediate, int) * (hidden if has_ratio else 1),
            merger_size=read("intermediate_size", int) if spec.gated_merger else hidden * merge**2,
            output_size=read(spec.output, int),
            merge_size=merge,
            patch=(read("temporal_patch_size", int), patch),
            activation=tower_activation(read("hidden_act", str), "vision_config.hidden_act"),
            eps=positive_number(given, "rms_norm_eps", 1e-6),
            theta=axial_theta(vision),
            attention_bias=read("attention_bias", bool) if "attention_bias" in given else True,
            side=_side(given, patch),
            windows=_windows(given, patch * merge, depth) if "window_size" in given else None,
            deepstack=_deepstack(given, depth) if spec.deepstack else (),
        )


def _read(given: ModelConfig, name: str, kind: type[T]) -> T:
    return setting({"vision_config": given}, f"vision_config.{name}", kind)


def _side(given: ModelConfig, patch: int) -> int:
    """Return the side of the table of positions, 0 if there is none."""
    if "image_size" in given:
        return _read(given, "image_size", int) // patch
    return isqrt(_read(given, "num_position_embeddings", int)) if "num_position_embeddings" in given else 0


def _windows(given: ModelConfig, square: int, depth: int) -> Windows:
    side, whole = _read(given, "window_size", int) // square, _read(given, "fullatt_block_indexes", list)
    if not side:
        raise CheckpointError(f"config.json: vision_config.window_size must be at least {square}, an embedding's side")
    return Windows(side, frozenset(layer for layer in range(depth) if layer in whole))


def _deepstack(given: ModelConfig, depth: int) -> tuple[int, ...]:
    layers = _read(given, DEEPSTACK, list)
    if len(layers) != sum(layer in layers for layer in range(depth)):
        raise CheckpointError(f"config.json: {DEEPSTACK} {layers} in a tower of depth {depth}")
    return tuple(layers)


QWEN_PATCHES: dict[str, Any] = {"num_heads": 16, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
QWEN2_5_TOWER = VisionTowerSpec(
    {
        **QWEN_PATCHES,
        "depth": None,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "hidden_act": "silu",
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": None,
    },
    rms_norms=True,
    patch_bias=False,
    positions=None,
    mlp=("gate_proj", "up_proj", "down_proj"),
    merger=("ln_q", "mlp.0", "mlp.2"),
)
QWEN3_TOWER = VisionTowerSpec(
    {
        **QWEN_PATCHES,
        "depth": None,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": None,
    },
    mlp=("linear_fc1", "linear_fc2"),
)


def load_vision_tower(
    reader: TowerWeights, spec: VisionTowerSpec, vision: VisionTowerConfig, tower: str, embedding_width: int
) -> GridTower:
    """Load the tower of this name. Raises CheckpointError as ``TowerWeights`` does."""
    hidden, positions, is_gated = vision.hidden_size, None, spec.gated_merger
    if spec.positions is not None:
        table = reader.parameter(f"{tower}.{spec.positions}.weight", vision.side**2, hidden)
        positions = PositionTable(table.view(vision.side, vision.side, hidden), bicubic=is_gated)
    return GridTower(
        reader.patch_projection(f"{tower}.patch_embed.proj", hidden, vision.patch, spec.patch_bias),
        [_layer(reader, spec, vision, f"{tower}.blocks.{number}") for number in range(vision.num_layers)],
        _gated_merger(reader, vision, tower) if is_gated else _merger(reader, spec, vision, f"{tower}.merger"),
        deepstack={
            layer: _merger(reader, spec, vision, f"{tower}.{spec.deepstack}.{number}", of_squares=True)
            for number, layer in enumerate(vision.deepstack)
        },
        merge_size=vision.merge_size,
        rotate=partial(axial, head_dim=vision.head_dim, theta=vision.theta),
        first_norm=reader.rms_norm(f"{tower}.post_conv_layernorm", hidden, vision.eps) if is_gated else None,
        positions=positions,
        windows=vision.windows,
        embedding_width=embedding_width,
    )


def _layer(reader: TowerWeights, spec: VisionTowerSpec, vision: VisionTowerConfig, name: str) -> TowerLayer:
    hidden = vision.hidden_size
    qkv, (norm, mlp_norm) = [f"{name}.attn.{one}" for one in spec.qkv], (f"{name}.norm1", f"{name}.norm2")
    load_norm = reader.rms_norm if spec.rms_norms else reader.layer_norm
    load_mlp = reader.gated_mlp if len(spec.mlp) == GATED else reader.mlp
    return TowerLayer(
        load_norm(norm, hidden, vision.eps),
        reader.attention(qkv, f"{name}.attn.proj", hidden, vision.num_heads, (vision.attention_bias, spec.output_bias)),
        load_norm(mlp_norm, hidden, vision.eps),
        load_mlp(
            [f"{name}.mlp.{one}" for one in spec.mlp],
            (hidden, vision.intermediate_size, hidden),
            vision.activation,
            spec.mlp_bias,
        ),
    )


def _merger(
    reader: TowerWeights, spec: VisionTowerSpec, vision: VisionTowerConfig, name: str, *, of_squares: bool = False
) -> Merger:
    norm, *layers = (f"{name}.{one}" for one in spec.merger)
    square = vision.hidden_size * vision.merge_size**2
    load_norm = reader.rms_norm if spec.rms_norms else reader.layer_norm
    return Merger(
        load_norm(norm, square if of_squares else vision.hidden_size, vision.eps),
        reader.mlp(layers, (square, square, vision.output_size), Activation.GELU),
        of_squares=of_squares,
    )


def _gated_merger(reader: TowerWeights, vision: VisionTowerConfig, tower: str) -> GatedMerger:
    name, width = f"{tower}.merger", vision.output_size
    return GatedMerger(
        reader.rms_norm(f"{tower}.post_layernorm", vision.hidden_size, vision.eps),
        (
            reader.convolution(f"{tower}.downsample", width, vision.hidden_size, vision.merge_size, bias=True),
            reader.linear([f"{name}.proj"], width, width, bias=False),
        ),
        reader.layer_norm(f"{name}.post_projection_norm", width, PRODUCT_EPS),
        reader.gated_mlp(
            [f"{name}.{one}_proj" for one in ("gate", "up", "down")],
            (width, vision.merger_size, width),
            vision.activation,
            bias=False,
        ),
    )
