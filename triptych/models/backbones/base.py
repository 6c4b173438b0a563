"""What a backbone is: the description of a decoder, made of a text config without torch; and what backbones share.

A text config is the part of a checkpoint's ``config.json`` that describes the language model, as published or as
``save_pretrained`` of transformers 5 writes it. Every function raises CheckpointError for a setting that is missing,
invalid or not supported.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.specs import AttentionSpec, GatedMLPSpec, LayerSpec, RopeConfig
from triptych.models.shared.settings import setting

TextConfig = Mapping[str, Any]


@dataclass(frozen=True)
class Backbone:
    """A kind of decoder."""

    description: str
    """What is special about it, for documentation."""
    describe: Callable[[TextConfig], DecoderConfig]
    """Returns the decoder's parameters, but for those that ``decoder_config`` adds."""

    def decoder_config(self, text: TextConfig, *, tie_embeddings: bool, num_deepstack_layers: int = 0) -> DecoderConfig:
        """Return the parameters of the decoder that ``text`` describes. Raises CheckpointError."""
        found = self.describe(text)
        return replace(found, tie_embeddings=tie_embeddings, num_deepstack_layers=num_deepstack_layers)


def decoder(text: TextConfig, layers: Iterable[LayerSpec], *, eps: float) -> DecoderConfig:
    """Return a decoder of ``layers``; ``eps`` is the default of its norms."""
    return DecoderConfig(
        vocab_size=setting(text, "vocab_size", int),
        hidden_size=setting(text, "hidden_size", int),
        layers=tuple(layers),
        rms_norm_eps=setting(text, "rms_norm_eps", float, default=eps),
    )


def num_layers(text: TextConfig) -> int:
    """Return the number of decoder layers."""
    return setting(text, "num_hidden_layers", int)


def attention(text: TextConfig, rope: RopeConfig, *, head_dim: int | None = None) -> AttentionSpec:
    """Return attention with the config's heads; ``head_dim`` defaults to the hidden size divided by their number."""
    num_heads, hidden_size = setting(text, "num_attention_heads", int), setting(text, "hidden_size", int)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=setting(text, "num_key_value_heads", int, default=num_heads),
        head_dim=setting(text, "head_dim", int, default=head_dim or hidden_size // num_heads),
        rope=rope,
    )


def gated_mlp(text: TextConfig) -> GatedMLPSpec:
    """Return the MLP of dense layers."""
    check_activation(text)
    return GatedMLPSpec(setting(text, "intermediate_size", int))


def check_activation(text: TextConfig) -> None:
    """Raise CheckpointError for an activation other than SiLU."""
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not served; only 'silu' is")
