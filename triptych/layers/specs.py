"""What a decoder's layer consists of, without torch: specs that ``models/backbones`` make of a checkpoint's config, and
of which ``mixers``, ``ffns`` and ``blocks`` build modules.

A spec describes a whole layer; ``shard`` returns one rank's part of it.
"""

from dataclasses import dataclass, replace

from triptych.errors import ConfigError
from triptych.layers.cache_spec import CacheFormat, CacheSpec
from triptych.layers.rope_config import RopeConfig


@dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position: by ``1 + beta * log(1 + floor(position / original_length))``."""

    beta: float
    original_length: int
    """In tokens; within it, queries stay as they are."""


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
    window: int | None = None
    """Tokens that a token attends to, including itself; None: all before it."""
    query_scaling: QueryScaling | None = None

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
        kernels, a mask and gathered pages."""
        heads = self.num_heads + 2 * self.num_kv_heads
        mask = tokens * context_length
        gathered = 3 * context_length * self.num_kv_heads * self.head_dim
        return 3 * tokens * heads * self.head_dim + mask + gathered


@dataclass(frozen=True)
class GatedMLPSpec:
    """``down(activation(gate(x)) * up(x))``."""

    intermediate_size: int
    activation: str = "silu"
    """In lower case, the name of one of ``pointwise.Activation``."""
    bias: bool = False
    """Whether all three projections have biases."""

    def shard(self, size: int) -> "GatedMLPSpec":
        """Return one of ``size`` ranks' share of the MLP. Raises ConfigError if there is none."""
        check_divides("intermediate values", self.intermediate_size, size)
        return replace(self, intermediate_size=per_rank(self.intermediate_size, size))


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts, each a gated MLP, with a softmax router."""

    num_experts: int
    experts_per_token: int
    """Experts that process a token."""
    intermediate_size: int
    """Of one expert."""
    norm_topk_prob: bool
    """Whether the chosen experts' weights are normalised to sum to one."""

    def shard(self, size: int) -> "MoESpec":
        """Return one of ``size`` ranks' share of each expert. Raises ConfigError if there is none."""
        check_divides("intermediate values of an expert", self.intermediate_size, size)
        return replace(self, intermediate_size=per_rank(self.intermediate_size, size))


FfnSpec = GatedMLPSpec | MoESpec
"""The part of a layer that treats tokens one by one."""


@dataclass(frozen=True)
class NormNames:
    """The norms around a layer's two parts, by the names of their tensors."""

    before_mixer: str = "input_layernorm"
    before_ffn: str = "post_attention_layernorm"
    after_mixer: str | None = None
    """Of the mixer's output, before it is added to the residual stream; None if there is none."""
    after_ffn: str | None = None
    """Of the ffn's output."""


PRE_NORMS = NormNames()


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: a mixer and an ffn, each with its norms and added to the residual stream."""

    mixer: AttentionSpec
    ffn: FfnSpec
    norms: NormNames = PRE_NORMS

    def shard(self, size: int) -> "LayerSpec":
        """Return one of ``size`` ranks' share. Raises ConfigError if there is none."""
        return replace(self, mixer=self.mixer.shard(size), ffn=self.ffn.shard(size))

    def step_values(self, tokens: int, context_length: int, hidden_size: int) -> int:
        """Return how many values a step holds at most: those of the mixer, or its output with those of the ffn."""
        ffn = tokens * (4 * self.ffn.intermediate_size + self.mixer.output_size + 2 * hidden_size)
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
