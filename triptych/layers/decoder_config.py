"""A decoder's parameters, which ``models/backbones`` make of a checkpoint's config. No torch."""

from dataclasses import dataclass, replace
from functools import cached_property

from triptych.layers.cache_spec import CacheFormat, CacheGroups, CacheSpec
from triptych.layers.rope_config import RopeConfig
from triptych.layers.specs import DeltaNetSpec, LayerSpec, MoESpec, check_divides
from triptych.layers.state_spec import StateSpec


@dataclass(frozen=True)
class TensorNames:
    """How a backbone's checkpoints hold tensors differently from the decoder, which uses the names of most text models
    in transformers (``layers.0.self_attn.q_proj.weight``). A part of a name is what stands between the layer's number
    and ``.weight``."""

    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Parts that hold several parts' outputs, one after the other, and those parts."""
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that checkpoints may hold and the decoder doesn't need."""
    ignored_modules: tuple[str, ...] = ()
    """Beginnings of such names."""
    norm_offset: float = 0.0
    """What is added to the stored weights of norms."""


OWN_NAMES = TensorNames()


@dataclass(frozen=True)
class DecoderConfig:
    """The parameters of a ``Decoder``."""

    vocab_size: int
    """Rows of the embedding [vocab, hidden] and number of logits."""
    hidden_size: int
    """Width of the residual stream [T, hidden]."""
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    names: TensorNames = OWN_NAMES
    tie_embeddings: bool = False
    """Whether the output projection is the embedding."""
    embedding_scale: float = 1.0
    """Factor of tokens' embeddings, but not of media's."""
    logit_softcap: float | None = None
    """Logits become ``logit_softcap * tanh(logit / logit_softcap)``."""
    num_deepstack_layers: int = 0
    """Number of first layers after which deepstack features are added."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def ropes(self) -> tuple[tuple[int, RopeConfig], ...]:
        """The distinct rotary embeddings of the layers, each with the values per head that it covers."""
        rotary = (layer.mixer.rotary for layer in self.layers)
        return tuple(dict.fromkeys(one for one in rotary if one is not None))

    @cached_property
    def cache_groups(self) -> CacheGroups:
        """The groups of layers that share page tables."""
        return CacheGroups.of(layer.mixer.window for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.ffn, MoESpec) for layer in self.layers)

    def shard(self, size: int) -> "DecoderConfig":
        """Return the parameters of one of ``size`` ranks: its share of the heads and of each MLP.

        Every rank has the whole residual stream, vocabulary and number of experts. Raises ConfigError if ``size``
        doesn't divide what is shared.
        """
        check_divides("tokens in the vocabulary", self.vocab_size, size)
        return replace(self, layers=tuple(layer.shard(size) for layer in self.layers))

    def cache_specs(self, stored: CacheFormat) -> tuple[CacheSpec, ...]:
        """Return what each layer keeps in a KV cache of this format."""
        return tuple(layer.mixer.cache_spec(stored) for layer in self.layers)

    def state_specs(self, activations: CacheFormat) -> tuple[StateSpec, ...]:
        """Return what each layer keeps of a request as a whole, in a decoder with activations of this format."""
        return tuple(layer.mixer.state_spec(activations) for layer in self.layers)

    @property
    def has_state(self) -> bool:
        """Whether any layer keeps something of a request as a whole."""
        return any(isinstance(layer.mixer, DeltaNetSpec) for layer in self.layers)

    def step_bytes(self, tokens: int, logits: int, context_length: int) -> int:
        """Estimate the peak memory of a step in bytes, in fp32, without weights and KV cache.

        That is the residual stream and media features, plus the larger of two: the largest layer over the longest
        context, and the logits with the sampler's copies.
        """
        stream = tokens * self.hidden_size * (2 + self.num_deepstack_layers)
        layer = max(spec.step_values(tokens, context_length, self.hidden_size) for spec in set(self.layers))
        return 4 * (stream + max(layer, 4 * logits * self.vocab_size))
