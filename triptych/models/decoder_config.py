"""What a decoder is, in numbers. Filled from a checkpoint's config by ``families/<family>/tower.py``."""

from dataclasses import dataclass


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
class DecoderConfig:
    """The parameters of ``Decoder``.

    ``mrope_section`` counts the rotary frequencies that take their position from the temporal, height and width axis.
    ``num_deepstack_layers`` is how many of the first layers add deepstack features after them. ``moe`` is None for a
    decoder whose layers are all dense.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    tie_embeddings: bool
    num_deepstack_layers: int
    attention_bias: bool = False
    moe: MoEConfig | None = None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` routes its tokens to experts."""
        return self.moe is not None and layer not in self.moe.dense_layers
