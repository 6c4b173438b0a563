"""What a decoder is, in numbers. Filled from a checkpoint's config by ``families/<family>/tower.py``."""

from dataclasses import dataclass, replace

from triptych.errors import ConfigError


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: a softmax router sends each token to ``experts_per_token`` of ``num_experts`` MLPs.

    ``norm_topk_prob`` renormalises the chosen experts' weights to sum to one. Layers in ``dense_layers`` have one
    plain MLP instead.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: frozenset[int]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``mrope_section`` counts the frequencies that take their position from the temporal,
    height and width axis, which take turns (``interleaved``) or follow each other; None: all take the first."""

    theta: float
    mrope_section: tuple[int, int, int] | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """The parameters of ``Decoder``.

    ``qkv_bias`` and ``output_bias`` are those of the attention's projections; ``qk_norm`` normalises each head's query
    and key. ``num_deepstack_layers`` is how many of the first layers add deepstack features after them. ``moe`` is None
    for a decoder whose layers are all dense. In ``windowed_layers``, a token sees the last ``window`` alone, itself
    included.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    num_deepstack_layers: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = True
    moe: MoEConfig | None = None
    window: int | None = None
    windowed_layers: frozenset[int] = frozenset()

    def shard(self, size: int) -> "DecoderConfig":
        """What one of ``size`` ranks computes: its heads and its part of each MLP. The residual stream, the vocabulary
        and the number of experts are every rank's. Raises ConfigError for a size that doesn't divide one of them."""
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

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers, for elements of that many bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def step_bytes(self, tokens: int, logits: int, context_length: int) -> int:
        """About what a step of so many tokens needs besides weights and KV cache, at most, in fp32: the residual stream
        and media features, and beside them what is larger: a layer's attention over the longest context (queries, keys
        and values thrice over, and where kernels aren't compiled a mask, and scattered pages put in order and widened),
        its MLP, with attention's output, or the logits of so many tokens and the sampler's copies of them."""
        stream = tokens * self.hidden_size * (2 + self.num_deepstack_layers)
        heads = self.num_heads + 2 * self.num_kv_heads
        mask = tokens * context_length
        gathered = 3 * context_length * self.num_kv_heads * self.head_dim
        attention = 3 * tokens * heads * self.head_dim + mask + gathered
        mlp = tokens * (4 * self.intermediate_size + self.num_heads * self.head_dim + 2 * self.hidden_size)
        return 4 * (stream + max(attention, mlp, 4 * logits * self.vocab_size))

    def window_of(self, layer: int) -> int | None:
        """How many tokens each of a layer's tokens sees at most; None for all."""
        return self.window if layer in self.windowed_layers else None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` routes its tokens to experts."""
        return self.moe is not None and layer not in self.moe.dense_layers


def per_rank(units: int, size: int) -> int:
    """How many of so many units each of ``size`` ranks has."""
    return max(1, units // size)


def _check_divides(what: str, units: int, size: int, *, shared: bool = False) -> None:
    """Raises ConfigError when ``units`` can't be dealt out evenly to ``size`` ranks; ``shared`` units may be fewer."""
    if units % size and not (shared and size % units == 0):
        raise ConfigError(
            f"--tensor-parallel-size {size} doesn't divide the model's {what}, of which there are {units}"
        )
