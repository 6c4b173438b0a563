"""A decoder's parameters, built from a checkpoint's config by ``models/shared/backbone.py``."""

from dataclasses import dataclass, replace

from triptych.errors import ConfigError


@dataclass(frozen=True)
class MoEConfig:
    """Parameters of a mixture of experts with a softmax router."""

    num_experts: int
    """MLPs per layer."""
    experts_per_token: int
    """MLPs that process a token."""
    moe_intermediate_size: int
    """Intermediate size of one expert."""
    norm_topk_prob: bool
    """Whether the chosen experts' weights are normalised to sum to one."""
    dense_layers: frozenset[int]
    """Indices of layers with one plain MLP instead."""


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary position embedding."""

    theta: float
    """Base of the frequencies."""
    mrope_section: tuple[int, int, int] | None = None
    """Number of frequencies for the temporal, height and width axes (M-RoPE); None: all use the first axis."""
    interleaved: bool = False
    """Whether frequencies of the three axes alternate, instead of forming three sections."""


@dataclass(frozen=True)
class DecoderConfig:
    """The parameters of a ``Decoder``."""

    vocab_size: int
    """Rows of the embedding [vocab, hidden] and number of logits."""
    hidden_size: int
    """Width of the residual stream [T, hidden]."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; consecutive query heads share one."""
    head_dim: int
    """Values per head: queries are [T, heads, head_dim], keys and values [T, kv_heads, head_dim]."""
    intermediate_size: int
    """Width of a dense MLP."""
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    """Whether the output projection is the embedding."""
    num_deepstack_layers: int = 0
    """Number of first layers after which deepstack features are added."""
    qkv_bias: bool = False
    """Whether query, key and value projections have biases."""
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    qk_norm: bool = True
    """Whether each head's query and key are normalised."""
    moe: MoEConfig | None = None
    """None if all layers are dense."""
    window: int | None = None
    """Tokens that a token of ``windowed_layers`` attends to, including itself."""
    windowed_layers: frozenset[int] = frozenset()
    """Indices of the layers with a sliding window."""

    def shard(self, size: int) -> "DecoderConfig":
        """Return the parameters of one of ``size`` ranks: its share of the heads and of each MLP.

        Every rank has the whole residual stream, vocabulary and number of experts. Raises ConfigError if ``size``
        doesn't divide what is shared.
        """
        _check_divides("query heads", self.num_heads, size)
        _check_divides("kv heads", self.num_kv_heads, size, shared=True)
        _check_divides("tokens in the vocabulary", self.vocab_size, size)
        if not all(self.is_moe_layer(layer) for layer in range(self.num_layers)):
            _check_divides("intermediate values", self.intermediate_size, size)
        moe = self.moe
        if moe is not None:
            _check_divides("intermediate values of an expert", moe.moe_intermediate_size, size)
            moe = replace(moe, moe_intermediate_size=per_rank(moe.moe_intermediate_size, size))
        return replace(
            self,
            num_heads=per_rank(self.num_heads, size),
            num_kv_heads=per_rank(self.num_kv_heads, size),
            intermediate_size=per_rank(self.intermediate_size, size),
            moe=moe,
        )

    def kv_bytes(self, head_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers, with ``head_bytes`` per key of a head."""
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    def step_bytes(self, tokens: int, logits: int, context_length: int) -> int:
        """Estimate the peak memory of a step in bytes, in fp32, without weights and KV cache.

        That is the residual stream and media features, plus the largest of three: attention over the longest context,
        the MLP with attention's output, and the logits with the sampler's copies. Attention takes three copies of
        queries, keys and values and, without compiled kernels, a mask and gathered pages.
        """
        stream = tokens * self.hidden_size * (2 + self.num_deepstack_layers)
        heads = self.num_heads + 2 * self.num_kv_heads
        mask = tokens * context_length
        gathered = 3 * context_length * self.num_kv_heads * self.head_dim
        attention = 3 * tokens * heads * self.head_dim + mask + gathered
        mlp = tokens * (4 * self.intermediate_size + self.num_heads * self.head_dim + 2 * self.hidden_size)
        return 4 * (stream + max(attention, mlp, 4 * logits * self.vocab_size))

    def window_of(self, layer: int) -> int | None:
        """Return the number of tokens that a layer's tokens attend to at most; None for all."""
        return self.window if layer in self.windowed_layers else None

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers


def per_rank(units: int, size: int) -> int:
    """Return how many of ``units`` each of ``size`` ranks has, at least one."""
    return max(1, units // size)


def _check_divides(what: str, units: int, size: int, *, shared: bool = False) -> None:
    """Raise ConfigError if ``size`` ranks can't divide ``units`` evenly; several ranks may share a ``shared`` unit."""
    if units % size and not (shared and size % units == 0):
        raise ConfigError(
            f"--tensor-parallel-size {size} doesn't divide the model's {what}, of which there are {units}"
        )
