"""Builds a ``DecoderConfig`` from the text part of a checkpoint's config, and finds the names of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from triptych.checkpoint.quantization import PACKED
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig, MoEConfig, RopeConfig
from triptych.layers.rope import parse_rope_config
from triptych.layers.weights import DecoderKeys, ExpertLayout
from triptych.models.shared.settings import setting


@dataclass(frozen=True)
class BackboneDefaults:
    """What a backbone's reference code fixes, and the defaults it uses for settings that a config omits."""

    qkv_bias: bool | None
    """Whether query, key and value projections have biases; None: the config's ``attention_bias`` decides for all four
    projections."""
    qk_norm: bool
    """Whether each head's query and key are normalised."""
    rope: RopeConfig
    """Default rotary settings; also decides whether positions have one axis or three, and in which order."""
    rms_norm_eps: float = 1e-6
    """Default."""
    head_dim: int | None = None
    """Default; None: hidden size divided by the number of heads."""
    experts: bool = False
    """Whether layers are mixtures of experts, except those that the config makes dense."""
    norm_topk_prob: bool = True
    """Default."""
    windows: Literal["none", "upper", "all"] = "none"
    """Layers with a sliding window if the config enables it: none, those from ``max_window_layers`` on (``upper``;
    ``layer_types`` takes precedence), or all."""


QWEN2 = BackboneDefaults(qkv_bias=True, qk_norm=False, rope=RopeConfig(10_000.0), windows="upper")
QWEN3 = BackboneDefaults(qkv_bias=None, qk_norm=True, rope=RopeConfig(10_000.0), head_dim=128, windows="upper")


def build_decoder_config(
    text: Mapping[str, Any], backbone: BackboneDefaults, *, tie_embeddings: bool, num_deepstack_layers: int = 0
) -> DecoderConfig:
    """Return the decoder's parameters for ``text``, a checkpoint's text config.

    Raises CheckpointError for a setting that is missing, invalid or not supported.
    """
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not served; only 'silu' is")
    num_heads, hidden_size = setting(text, "num_attention_heads", int), setting(text, "hidden_size", int)
    window, windowed_layers = _sliding_window(text, backbone)
    has_bias = bool(text.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=setting(text, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=setting(text, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=setting(text, "num_key_value_heads", int, default=num_heads),
        head_dim=setting(text, "head_dim", int, default=backbone.head_dim or hidden_size // num_heads),
        intermediate_size=setting(text, "intermediate_size", int),
        rms_norm_eps=setting(text, "rms_norm_eps", float, default=backbone.rms_norm_eps),
        rope=parse_rope_config(text, backbone.rope),
        tie_embeddings=tie_embeddings,
        num_deepstack_layers=num_deepstack_layers,
        qkv_bias=has_bias if backbone.qkv_bias is None else backbone.qkv_bias,
        output_bias=has_bias and backbone.qkv_bias is None,
        qk_norm=backbone.qk_norm,
        moe=_build_moe_config(text, backbone) if backbone.experts else None,
        window=window,
        windowed_layers=windowed_layers,
    )


def _sliding_window(text: Mapping[str, Any], backbone: BackboneDefaults) -> tuple[int | None, frozenset[int]]:
    """Return the size of the sliding window and the layers that use it."""
    # files saved by transformers have a null for a disabled window
    if backbone.windows == "none" or not text.get("use_sliding_window") or text.get("sliding_window", 0) is None:
        return None, frozenset()
    window, num_layers = setting(text, "sliding_window", int, default=4096), setting(text, "num_hidden_layers", int)
    types = setting(text, "layer_types", list, default=[])
    if backbone.windows == "all":
        return window, frozenset(range(num_layers))
    if not types:
        first = text.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise CheckpointError(f"config.json: max_window_layers must be a number of layers, not {first!r}")
        return window, frozenset(range(first, num_layers))
    if len(types) != num_layers or not all(kind in ("full_attention", "sliding_attention") for kind in types):
        raise CheckpointError(
            f"config.json: layer_types {types} must name full_attention or sliding_attention per layer"
        )
    return window, frozenset(index for index, kind in enumerate(types) if kind == "sliding_attention")


def _build_moe_config(text: Mapping[str, Any], backbone: BackboneDefaults) -> MoEConfig:
    """Return the experts' parameters. Files saved by transformers spell ``num_experts`` as ``num_local_experts``."""
    layers = range(setting(text, "num_hidden_layers", int))
    sparse_step = setting(text, "decoder_sparse_step", int, default=1)
    dense_layers = {index for index in layers if (index + 1) % sparse_step != 0}
    return MoEConfig(
        num_experts=setting(text, "num_experts" if "num_experts" in text else "num_local_experts", int),
        experts_per_token=setting(text, "num_experts_per_tok", int),
        moe_intermediate_size=setting(text, "moe_intermediate_size", int),
        norm_topk_prob=bool(text.get("norm_topk_prob", backbone.norm_topk_prob)),
        dense_layers=frozenset(dense_layers | set(setting(text, "mlp_only_layers", list, default=[]))),
    )


def detect_decoder_keys(config: DecoderConfig, checkpoint: Checkpoint, prefix: str, head: str) -> DecoderKeys:
    """Return the names of a decoder's tensors, with the layout of the experts' weights found in the checkpoint.

    Stacked weights come in two orders, which the shape of at least one of the two tensors distinguishes.
    ``gate_up_proj`` is square, hence ambiguous, only if hidden = 2 * intermediate; ``down_proj`` only if hidden =
    intermediate.
    """
    keys = DecoderKeys(prefix, head)
    layer = next((index for index in range(config.num_layers) if config.is_moe_layer(index)), None)
    if config.moe is None or layer is None:
        return keys
    experts = f"layers.{layer}.mlp.experts"
    if any(keys.key(f"{experts}.0.down_proj.{kind}") in checkpoint.tensors for kind in ("weight", PACKED)):
        return DecoderKeys(prefix, head, ExpertLayout.SEPARATE)
    hidden, intermediate = config.hidden_size, config.moe.moe_intermediate_size
    if hidden != intermediate:
        name, transposed = f"{experts}.down_proj", (intermediate, hidden)
    else:
        name, transposed = f"{experts}.gate_up_proj", (hidden, 2 * intermediate)
    is_transposed = checkpoint.info(keys.key(name)).shape[1:] == transposed
    return DecoderKeys(prefix, head, ExpertLayout.TRANSPOSED if is_transposed else ExpertLayout.STACKED)
