"""What a decoder's layer consists of, without torch: specs that ``models/backbones`` make of a checkpoint's config, and
of which ``mixers``, ``ffns`` and ``blocks`` build modules.

A spec describes a whole layer; ``shard`` returns one rank's part of it.
"""

from dataclasses import dataclass, replace
from enum import Enum

from triptych.errors import CheckpointError, ConfigError
from triptych.layers.cache_spec import CacheFormat, CacheSpec, Window
from triptych.layers.rope_config import RopeConfig
from triptych.layers.state_spec import StatePart, StateSpec

STATE_FORMAT = CacheFormat("float32", 4)
"""Format of recurrent states, whatever the weights' format: rounding would add up over all tokens."""


@dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position: by ``1 + beta * log(1 + floor((position + offset) / original_length))``."""

    beta: float
    original_length: int
    """In tokens; within it, queries stay as they are."""
    offset: int = 0
    """Added to positions."""


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention over the tokens before, with rotary positions."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; consecutive query heads share one."""
    head_dim: int
    """Values per head: queries are [T, heads, head_dim], keys and values [T, kv_heads, head_dim]."""
    rope: RopeConfig
    qkv_bias: bool = False
    """Whether query, key and value projections have biases."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    qk_norm: bool = False
    """Whether each head's query and key are normalised."""
    qk_norm_weights: bool = True
    """Whether these norms have weights."""
    v_norm: bool = False
    """Whether each head's value is normalised, too, without a weight; only with ``qk_norm``."""
    k_is_v: bool = False
    """Whether values are the keys before their norm and rotation, so that one projection serves both."""
    window: Window | None = None
    """Which tokens a token attends to; None: all before it."""
    scale: float | None = None
    """Factor of the products of queries and keys; None: ``head_dim ** -0.5``."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    has_sinks: bool = False
    """Whether each query head has a logit that takes part in the softmax's sum, without a value."""
    spans: bool = False
    """Whether the tokens of an atomic span attend to all of it, as far as the window goes."""
    query_scaling: QueryScaling | None = None
    output_gate: bool = False
    """Whether the sigmoid of a gate scales the output. The query projection yields each head's query, then its gate."""

    @property
    def rotary(self) -> tuple[int, RopeConfig]:
        """Values per head that the rotary embedding covers, and the embedding."""
        return self.head_dim, self.rope

    @property
    def output_size(self) -> int:
        """Values per token that the output projection takes."""
        return self.num_heads * self.head_dim

    def shard(self, size: int) -> "AttentionSpec":
        """Return one of ``size`` ranks' share of the heads. Raises ConfigError if there is none."""
        check_divides("query heads", self.num_heads, size)
        check_divides("kv heads", self.num_kv_heads, size, shared=True)
        return replace(self, num_heads=per_rank(self.num_heads, size), num_kv_heads=per_rank(self.num_kv_heads, size))

    def cache_spec(self, stored: CacheFormat) -> CacheSpec:
        """Return what a layer keeps in a cache of this format."""
        return CacheSpec(self.num_kv_heads, (self.head_dim, self.head_dim), stored, self.window)

    def step_values(self, tokens: int, context_length: int) -> int:
        """Return how many values a step holds at most: three copies of queries, keys and values and, without compiled
        kernels, a mask, the scores of a head if PyTorch's fused attention can't be used, and gathered pages."""
        heads = self.num_heads * (2 if self.output_gate else 1) + 2 * self.num_kv_heads
        mask = tokens * context_length * (4 if self.has_sinks or self.softcap is not None else 1)
        gathered = 3 * context_length * self.num_kv_heads * self.head_dim
        return 3 * tokens * heads * self.head_dim + mask + gathered


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are projections of one
    latent per token, beside a rotated key that all heads share."""

    num_heads: int
    latent_dim: int
    """Values of a token's latent."""
    key_dim: int
    """Values of a head's query and key that aren't rotated."""
    rotated_dim: int
    """Values of a head's query, and of the shared key, that are."""
    value_dim: int
    """Values of a head's value."""
    rope: RopeConfig
    scale: float
    """Factor of the products of queries and keys."""
    query_latent_dim: int | None = None
    """Values of the latent that queries are projections of; None: they are projections of the residual stream."""
    bias: bool = False
    """Whether the projections to latents and the output projection have biases."""

    window: None = None

    @property
    def rotary(self) -> tuple[int, RopeConfig]:
        """Values per head that the rotary embedding covers, and the embedding."""
        return self.rotated_dim, self.rope

    @property
    def cached_dim(self) -> int:
        """Values per token in the cache: the latent, then the rotated key."""
        return self.latent_dim + self.rotated_dim

    @property
    def output_size(self) -> int:
        """Values per token that the output projection takes."""
        return self.num_heads * self.value_dim

    def shard(self, size: int) -> "MLASpec":
        """Return one of ``size`` ranks' share of the heads. Raises ConfigError if there is none."""
        check_divides("query heads", self.num_heads, size)
        return replace(self, num_heads=per_rank(self.num_heads, size))

    def cache_spec(self, stored: CacheFormat) -> CacheSpec:
        """Return what a layer keeps in a cache of this format."""
        return CacheSpec(1, (self.cached_dim,), stored)

    def step_values(self, tokens: int, context_length: int) -> int:
        """Return how many values a step holds at most: queries and their projections, attention's output and, without
        compiled kernels, a mask and gathered pages."""
        per_head = self.key_dim + 2 * self.rotated_dim + 4 * self.latent_dim + 2 * self.value_dim
        per_token = self.num_heads * per_head + 3 * self.cached_dim + (self.query_latent_dim or 0)
        return tokens * (per_token + context_length) + 3 * context_length * self.cached_dim


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated delta net (arXiv:2412.06464): a convolution over the last tokens, and a matrix per head that each token
    changes. Names are those of its projections."""

    key_heads: int
    """Heads of queries and keys; consecutive value heads share one."""
    value_heads: int
    key_dim: int
    """Values of a query, and of a key."""
    value_dim: int
    is_grouped: bool = False
    """Whether two projections yield, for each key head in turn, what belongs to it (``in_proj_qkvz`` and
    ``in_proj_ba``), instead of one each for all heads' queries, keys and values (``in_proj_qkv``), and gates."""

    CONV_TOKENS = 3
    """Earlier tokens that the convolution sees."""

    rotary = None
    """It has no positions."""

    @property
    def channels(self) -> int:
        """Values of a token's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.output_size

    @property
    def output_size(self) -> int:
        """Values per token that the output projection takes."""
        return self.value_heads * self.value_dim

    def shard(self, size: int) -> "DeltaNetSpec":
        """Return one of ``size`` ranks' share of the heads. Raises ConfigError if there is none."""
        check_divides("key heads of delta nets", self.key_heads, size)
        return replace(self, key_heads=self.key_heads // size, value_heads=self.value_heads // size)

    def state_spec(self, activations: CacheFormat) -> StateSpec:
        """Return what a layer keeps of a request: the heads' matrices, and the convolution's last inputs in the
        activations' format."""
        heads = self.value_heads, self.key_dim, self.value_dim
        return StatePart(heads, STATE_FORMAT), StatePart((self.CONV_TOKENS, self.channels), activations)

    def step_values(self, tokens: int, context_length: int) -> int:
        """Return how many values a step holds at most: what is projected and convolved, and, without compiled kernels,
        a sequence's queries, keys and values for each value head in several forms."""
        heads = self.value_heads * (2 * self.key_dim + self.value_dim)
        return tokens * (2 * self.channels + 3 * self.output_size + 4 * heads)


MixerSpec = AttentionSpec | MLASpec | DeltaNetSpec
"""The part of a layer that mixes tokens."""


@dataclass(frozen=True)
class GatedMLPSpec:
    """``down(activation(gate(x)) * up(x))``."""

    intermediate_size: int
    activation: str = "silu"
    """In lower case, the name of one of ``pointwise.Activation``."""
    bias: bool = False
    """Whether all three projections have biases."""

    @property
    def step_values(self) -> int:
        """Values that a step holds per token at most."""
        return 4 * self.intermediate_size

    def shard(self, size: int) -> "GatedMLPSpec":
        """Return one of ``size`` ranks' share of the MLP. Raises ConfigError if there is none."""
        check_divides("intermediate values", self.intermediate_size, size)
        return replace(self, intermediate_size=per_rank(self.intermediate_size, size))


class Score(Enum):
    """How a router's logits become scores, from 0 to 1."""

    SOFTMAX = "softmax"
    """Over all experts. Normalised, the scores of the chosen experts are the softmax of their logits alone."""
    SIGMOID = "sigmoid"
    """Each logit's sigmoid by itself."""


@dataclass(frozen=True)
class ExpertGroups:
    """Divides the experts, in order, into groups of equal size; a token's experts come from its best groups."""

    count: int
    """Number of groups; divides the number of experts."""
    kept: int
    """Number of groups that a token's experts come from."""
    ranked_by: int
    """How many of a group's best experts are added up to rank it; at most the group's size."""


@dataclass(frozen=True)
class RoutingSpec:
    """How a router chooses each token's experts, and weighs them."""

    experts_per_token: int
    score: Score = Score.SOFTMAX
    normalised: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of all weights."""
    groups: ExpertGroups | None = None
    """None: all experts compete."""


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Activation ``(up + 1) * gate * sigmoid(alpha * gate)``, with clamped gate and up."""

    limit: float
    """Largest gate, and largest magnitude of up."""
    alpha: float


@dataclass(frozen=True)
class SharedExpertSpec:
    """A gated MLP that processes every token, beside the chosen experts."""

    name: str
    mlp: GatedMLPSpec
    gate: str | None = None
    """Name of a layer [hidden] → [1] whose sigmoid scales the output; None: it isn't scaled."""


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts, each a gated MLP. Names are those of its parts in the layer's ffn."""

    num_experts: int
    intermediate_size: int
    """Width of one expert."""
    routing: RoutingSpec
    router: str = "gate"
    """Name of the layer [hidden] → [experts] that yields the logits."""
    correction: str | None = None
    """Name of the tensor that is added to scores for the choice of experts only; None: there is none."""
    expert_scales: str | None = None
    """Name of the tensor [experts] of factors of each expert's weights; None: there are none."""
    shared: SharedExpertSpec | None = None
    weighs_inputs: bool = False
    """Whether weights multiply the experts' inputs instead of their outputs."""
    has_biases: bool = False
    """Whether router and experts have biases."""
    activation: str | ClampedSwiGLU = "silu"
    """Activation of the experts: one that ``GatedMLPSpec`` names, or clamped."""
    alternating: bool = False
    """Whether gates and ups alternate in the checkpoint, instead of all gates preceding all ups."""

    def __post_init__(self) -> None:
        """Raises CheckpointError if there aren't enough experts to choose from."""
        groups, experts = self.routing.groups, self.num_experts
        if groups is not None:
            size = experts // groups.count
            if experts % groups.count or groups.kept > groups.count or groups.ranked_by > size:
                raise CheckpointError(
                    f"config.json: n_group or topk_group: {experts} experts can't be routed in {groups}"
                )
            experts = groups.kept * size
        if self.routing.experts_per_token > experts:
            raise CheckpointError(
                "config.json: num_experts_per_tok or top_k_experts: "
                f"{self.routing.experts_per_token} experts per token can't be chosen from {experts}"
            )

    @property
    def step_values(self) -> int:
        """Values that a step holds per token at most: of an expert or the shared one, and the scores."""
        shared = 0 if self.shared is None else self.shared.mlp.step_values
        return max(4 * self.intermediate_size, shared) + 4 * self.num_experts

    def shard(self, size: int) -> "MoESpec":
        """Return one of ``size`` ranks' share of each expert. Raises ConfigError if there is none."""
        check_divides("intermediate values of an expert", self.intermediate_size, size)
        shared = None if self.shared is None else replace(self.shared, mlp=self.shared.mlp.shard(size))
        return replace(self, intermediate_size=per_rank(self.intermediate_size, size), shared=shared)


@dataclass(frozen=True)
class DenseAndExpertsSpec:
    """A gated MLP and a mixture of experts side by side, whose outputs are normalised and added up. The experts and
    their router see the residual stream through norms of their own. Names are those of tensors in the layer."""

    dense: GatedMLPSpec
    experts: MoESpec
    before_experts: str
    """Norm of the experts' input."""
    after_dense: str
    after_experts: str
    router_scale: str
    """Weight, [hidden], of the norm of the router's input, less a factor ``hidden ** -0.5``."""

    @property
    def step_values(self) -> int:
        """Values that a step holds per token at most."""
        return max(self.dense.step_values, self.experts.step_values)

    def shard(self, size: int) -> "DenseAndExpertsSpec":
        """Return one of ``size`` ranks' share of both. Raises ConfigError if there is none."""
        return replace(self, dense=self.dense.shard(size), experts=self.experts.shard(size))


FfnSpec = GatedMLPSpec | MoESpec | DenseAndExpertsSpec
"""The part of a layer that treats tokens one by one."""


@dataclass(frozen=True)
class NormNames:
    """The norms around a layer's two parts, by the names of their tensors."""

    before_mixer: str = "input_layernorm"
    before_ffn: str = "post_attention_layernorm"
    after_mixer: str | None = None
    """Norm of the mixer's output, before it is added to the residual stream; None if there is none."""
    after_ffn: str | None = None
    """Norm of the ffn's output."""


PRE_NORMS = NormNames()


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: a mixer and an ffn, each with its norms and added to the residual stream."""

    mixer: MixerSpec
    ffn: FfnSpec
    norms: NormNames = PRE_NORMS
    cache_of: int | None = None
    """Number of an earlier layer whose keys and values this one reads, instead of its own; their heads must match."""
    factor: str | None = None
    """Name of a tensor [1] that multiplies the residual stream after the layer; None: there is none."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether it keeps something of each token, in a cache of its own."""
        return self.cache_of is None and not isinstance(self.mixer, DeltaNetSpec)

    def shard(self, size: int) -> "LayerSpec":
        """Return one of ``size`` ranks' share. Raises ConfigError if there is none."""
        return replace(self, mixer=self.mixer.shard(size), ffn=self.ffn.shard(size))

    def step_values(self, tokens: int, context_length: int, hidden_size: int) -> int:
        """Return how many values a step holds at most: those of the mixer, or its output with those of the ffn."""
        ffn = tokens * (self.ffn.step_values + self.mixer.output_size + 2 * hidden_size)
        return max(self.mixer.step_values(tokens, context_length), ffn)


def per_rank(units: int, size: int) -> int:
    """Return how many of ``units`` each of ``size`` ranks has, at least one."""
    return max(1, units // size)


def check_divides(what: str, units: int, size: int, *, shared: bool = False) -> None:
    """Raise ConfigError if ``size`` ranks can't divide ``units`` evenly; several ranks may share a ``shared`` unit."""
    if units % size and not (shared and size % units == 0):
        raise ConfigError(
            f"--tensor-parallel-size {size} doesn't divide the model's {what}, of which there are {units}"
        )
