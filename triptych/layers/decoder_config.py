"""A decoder's parameters, which ``models/backbones`` make of a checkpoint's config. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from triptych.errors import CheckpointError
from triptych.layers.cache_spec import CacheFormat, CacheGroups, CacheSpec
from triptych.layers.rope_config import LengthRule, RopeConfig
from triptych.layers.specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseAndExpertsSpec,
    GatedMLPSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    check_divides,
)
from triptych.layers.state_spec import StateSpec


@dataclass(frozen=True)
class TensorNames:
    """How a backbone's checkpoints hold tensors differently from the decoder, which uses the names of most text models
    in transformers (``layers.0.self_attn.q_proj.weight``). A part of a name is what stands between the layer's number
    and ``.weight``."""

    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Parts that hold several parts' outputs, one after the other, and those parts."""
    fused_by_kv_head: bool = False
    """Whether that order is repeated for each kv head, with its share of each part's outputs."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts with other names in the checkpoint, and these."""
    head: str = "lm_head.weight"
    """The output projection, which has no prefix."""
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that checkpoints may hold and the decoder doesn't need."""
    ignored_modules: tuple[str, ...] = ()
    """Beginnings of such names."""
    biased: tuple[str, ...] = ()
    """Parts, as stored, that have biases in any case."""
    norm_offset: float = 0.0
    """What is added to the stored weights of norms."""


OWN_NAMES = TensorNames()


@dataclass(frozen=True)
class PerLayerSpec:
    """A second embedding of tokens: values for each layer, which are gated by the residual stream after the layer's
    ffn, projected, normalised and added to it (Gemma 3n, Gemma 4)."""

    vocab_size: int
    """Rows of the embedding [vocab, layers * size]."""
    size: int
    """Values per layer."""
    activation: str
    """Activation of the gates, one that ``GatedMLPSpec`` names."""


@dataclass(frozen=True)
class LoraSpec:
    """Low-rank matrices that linear layers add for the tokens of requests that have them.

    Of a layer stored as ``NAME.weight`` [out, in], they are ``NAME.lora_A.LORA.weight`` [rank, in] and
    ``NAME.lora_B.LORA.weight`` [out, rank].
    """

    name: str
    rank: int
    scale: float
    """Factor of what is added."""
    layers: tuple[str, ...]
    """The parts of names, as in ``TensorNames``, of the layers that have them, as stored."""


SECOND = 0
"""The number of second weights in a ``TokenChoice``: a decoder has one kind, and then no LoRAs."""


@dataclass(frozen=True)
class SecondWeights:
    """Other weights of all linear layers but the head, for some tokens of media items. Norms have none."""

    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The fields of ``TensorNames`` for these weights, like ``renamed`` and ``biased``."""
    renamed: tuple[tuple[str, str], ...] = ()
    biased: tuple[str, ...] = ()


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
    per_layer: PerLayerSpec | None = None
    """None: there are no embeddings per layer."""
    padding_tokens: tuple[int, ...] = ()
    """Tokens that are embedded as ``pad_token``, and have its embeddings per layer: placeholders of media."""
    pad_token: int = 0
    loras: tuple[LoraSpec, ...] = ()
    """Which requests may have, each at most one. Served in decoders of attention and dense MLPs."""
    second: SecondWeights | None = None
    """Which some tokens of items have (``Span.second``). Served like LoRAs, and not beside them."""

    def __post_init__(self) -> None:
        plain = (isinstance(one.mixer, AttentionSpec) and isinstance(one.ffn, GatedMLPSpec) for one in self.layers)
        if (self.loras or self.second) and not all(plain):
            raise CheckpointError("LoRAs and second weights are served in decoders of attention and dense MLPs alone")
        if self.second and (self.loras or self.per_layer):
            raise CheckpointError("second weights are not served beside LoRAs or embeddings per layer")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def ropes(self) -> tuple[tuple[int, RopeConfig], ...]:
        """The distinct rotary embeddings of the layers, each with the values per head that it covers."""
        rotary = (layer.mixer.rotary for layer in self.layers)
        return tuple(dict.fromkeys(one for one in rotary if one is not None))

    @cached_property
    def length_rule(self) -> LengthRule | None:
        """How the layers' ropes depend on a request's length; None: none does."""
        rules = [rope.length_rule for _, rope in self.ropes]
        return next((rule for rule in rules if rule is not None), None)

    @cached_property
    def caching_layers(self) -> tuple[int, ...]:
        """The layers that keep something of each token. Their order is that of cache specs and of ``KVTensors``."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.keeps_tokens)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state of each request. Their order is that of state specs and of ``StateTensors``."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mixer, DeltaNetSpec))

    @cached_property
    def last_keeping_layer(self) -> int:
        """The last layer that keeps tokens or a state; later ones read an earlier layer's cache."""
        return max((*self.caching_layers, *self.state_layers))

    @cached_property
    def caches(self) -> tuple[int | None, ...]:
        """The place of each layer's keys and values, its own or an earlier layer's, among those of ``caching_layers``;
        None for ``state_layers``."""
        places = {index: place for place, index in enumerate(self.caching_layers)}
        return tuple(
            places.get(index if layer.cache_of is None else layer.cache_of) for index, layer in enumerate(self.layers)
        )

    @cached_property
    def cache_groups(self) -> CacheGroups:
        """The groups of ``caching_layers`` that share page tables."""
        return CacheGroups.of(mixer.window for mixer in self._caching_mixers)

    @property
    def _caching_mixers(self) -> Iterator[AttentionSpec | MLASpec]:
        mixers = (self.layers[index].mixer for index in self.caching_layers)
        return (mixer for mixer in mixers if not isinstance(mixer, DeltaNetSpec))

    @property
    def has_experts(self) -> bool:
        """Whether any layer has a mixture of experts."""
        return any(isinstance(layer.ffn, MoESpec | DenseAndExpertsSpec) for layer in self.layers)

    def shard(self, size: int) -> "DecoderConfig":
        """Return the parameters of one of ``size`` ranks: its share of the heads and of each MLP.

        Every rank has the whole residual stream, vocabulary and number of experts. Raises ConfigError if ``size``
        doesn't divide what is shared.
        """
        check_divides("tokens in the vocabulary", self.vocab_size, size)
        return replace(self, layers=tuple(layer.shard(size) for layer in self.layers))

    def cache_specs(self, stored: CacheFormat) -> tuple[CacheSpec, ...]:
        """Return what each of ``caching_layers`` keeps in a KV cache of this format."""
        return tuple(mixer.cache_spec(stored) for mixer in self._caching_mixers)

    def state_specs(self, activations: CacheFormat) -> tuple[StateSpec, ...]:
        """Return what each of ``state_layers`` keeps of a request, in a decoder with activations of this format."""
        mixers = (self.layers[index].mixer for index in self.state_layers)
        return tuple(mixer.state_spec(activations) for mixer in mixers if isinstance(mixer, DeltaNetSpec))

    @property
    def has_state(self) -> bool:
        """Whether any layer keeps something of a request as a whole."""
        return bool(self.state_layers)

    def step_bytes(self, tokens: int, logits: int, context_length: int) -> int:
        """Estimate the peak memory of a step in bytes, in fp32, without weights and KV cache.

        That is the residual stream, media features and embeddings per layer, plus the larger of two: the largest layer
        over the longest context, and the logits with the sampler's copies.
        """
        stream = tokens * self.hidden_size * (2 + self.num_deepstack_layers)
        if self.per_layer is not None:
            stream += 3 * tokens * self.num_layers * self.per_layer.size  # while they are added up
        layer = max(spec.step_values(tokens, context_length, self.hidden_size) for spec in set(self.layers))
        return 4 * (stream + max(layer, 4 * logits * self.vocab_size))
