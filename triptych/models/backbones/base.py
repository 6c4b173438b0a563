"""What a backbone is: the description of a decoder, made of a text config without torch; and what backbones share.

A text config is the part of a checkpoint's ``config.json`` that describes the language model, as published or as
``save_pretrained`` of transformers 5 writes it. Every function raises CheckpointError for a setting that is missing,
invalid or not supported.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig, TensorNames
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import AttentionSpec, GatedMLPSpec, LayerSpec
from triptych.models.shared.settings import positive_number, setting

TextConfig = Mapping[str, Any]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of ``layers.pointwise.Activation``, by those in configs."""

MAX_LAYERS = 1000
"""Bounds what a damaged config can make a process allocate before the checkpoint's tensors contradict it."""
MAX_HEAD_VALUES = 2**20
"""Values of all query heads together; bounded for the same reason."""

QUANTIZED_CACHE = (".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point")
"""Ends of the names of tensors for quantized KV caches, which compressed-tensors, ModelOpt and vLLM write."""
COMMON_NAMES = TensorNames(ignored=("rotary_emb.inv_freq", *QUANTIZED_CACHE))
"""Files of older versions of transformers hold the rotary frequencies, which follow from the config. Scales of a KV
cache in FP8 (``self_attn.k_proj.k_scale``, ``self_attn.kv_scale``) are of no use to caches in other formats."""


@dataclass(frozen=True)
class Backbone:
    """A kind of decoder."""

    description: str
    """What is special about it, for documentation."""
    describe: Callable[[TextConfig], DecoderConfig]
    """Returns the decoder's parameters, but for those that ``decoder_config`` adds."""
    ties_embeddings: bool = False
    """Default of ``tie_word_embeddings``."""

    def decoder_config(self, text: TextConfig, *, tie_embeddings: bool, num_deepstack_layers: int = 0) -> DecoderConfig:
        """Return the parameters of the decoder that ``text`` describes. Raises CheckpointError."""
        found = self.describe(text)
        return replace(found, tie_embeddings=tie_embeddings, num_deepstack_layers=num_deepstack_layers)


def decoder(
    text: TextConfig, layers: Iterable[LayerSpec], *, eps: float, names: TensorNames = COMMON_NAMES
) -> DecoderConfig:
    """Return a decoder of ``layers``; ``eps`` is the default of its norms."""
    return DecoderConfig(
        vocab_size=setting(text, "vocab_size", int),
        hidden_size=setting(text, "hidden_size", int),
        layers=tuple(layers),
        rms_norm_eps=positive_number(text, "rms_norm_eps", eps),
        names=names,
    )


def num_layers(text: TextConfig) -> int:
    """Return the number of decoder layers."""
    return _number_of_layers("num_hidden_layers", setting(text, "num_hidden_layers", int))


def layer_types(text: TextConfig, known: tuple[str, ...] = (FULL, SLIDING)) -> list[str]:
    """Return the kind of each layer's attention, one of ``known``; empty if the config doesn't say."""
    types = setting(text, "layer_types", list, default=[])
    if types and (len(types) != num_layers(text) or not all(kind in known for kind in types)):
        raise CheckpointError(f"config.json: layer_types {types} must name {' or '.join(known)} per layer")
    return types


def alternating_types(text: TextConfig, period: int) -> list[str]:
    """Return the kind of each layer's attention; by default, it is full in every ``period``-th layer."""
    default = [FULL if (1 + index) % period == 0 else SLIDING for index in range(num_layers(text))]
    return layer_types(text) or default


def has_positions(text: TextConfig) -> list[bool]:
    """Return whether each layer's queries and keys are rotated; by default, those of every fourth aren't."""
    layers = num_layers(text)
    flags = setting(text, "no_rope_layers", list, default=[])  # 1 where there are positions, despite its name
    if not flags:
        interval = setting(text, "no_rope_layer_interval", int, default=4)
        return [(1 + index) % interval != 0 for index in range(layers)]
    if len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise CheckpointError(
            f"config.json: no_rope_layers must have a 0 or 1 for each of {layers} layers, not {flags}"
        )
    return [bool(flag) for flag in flags[:layers]]


def layers_up_to(text: TextConfig, name: str, default: int) -> int:
    """Return a setting that counts layers and may be 0."""
    count = text.get(name, default)
    if type(count) is not int or count < 0:
        raise CheckpointError(f"config.json: {name} must be a number of layers, not {count!r}")
    return _number_of_layers(name, count)


def attention(
    text: TextConfig, rope: RopeConfig, *, head_dim: int | None = None, num_kv_heads: int | None = None
) -> AttentionSpec:
    """Return attention with the config's heads. ``head_dim`` and ``num_kv_heads`` are defaults; None: the hidden size
    divided by the number of heads, and the number of query heads. Raises CheckpointError unless the kv heads divide the
    query heads."""
    num_heads, hidden_size = setting(text, "num_attention_heads", int), setting(text, "hidden_size", int)
    kv_heads = setting(text, "num_key_value_heads", int, default=num_kv_heads or num_heads)
    dim = setting(text, "head_dim", int, default=head_dim or hidden_size // num_heads)
    if num_heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads: {kv_heads} key and value heads don't divide {num_heads} query heads"
        )
    if not 0 < num_heads * dim <= MAX_HEAD_VALUES:
        raise CheckpointError(
            f"config.json: num_attention_heads or head_dim: {num_heads} heads of {dim} values can't be served"
        )
    return AttentionSpec(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim, rope=rope)


def listed_layers(text: TextConfig, name: str, default: list[int] | None = None) -> list[int]:
    """Return a setting that lists layers by number, of which some may not exist."""
    listed = setting(text, name, list, default=default)
    if not all(type(index) is int for index in listed):
        raise CheckpointError(f"config.json: {name} must be numbers of layers, not {listed!r}")
    return listed


def gated_mlp(text: TextConfig) -> GatedMLPSpec:
    """Return the MLP of dense layers."""
    return GatedMLPSpec(setting(text, "intermediate_size", int), _activation(text))


def check_silu(text: TextConfig) -> None:
    """Raise CheckpointError for an activation other than SiLU."""
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not served; only 'silu' is")


def _number_of_layers(name: str, count: int) -> int:
    if count > MAX_LAYERS:
        raise CheckpointError(f"config.json: {name} must be at most {MAX_LAYERS}, not {count}")
    return count


def _activation(text: TextConfig) -> str:
    """Return the name of ``layers.pointwise.Activation`` for an MLP's activation."""
    activation = text.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act {activation!r} is not served; served are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[activation]
