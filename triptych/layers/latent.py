"""Multi-head latent attention: queries and outputs are projected, and keys and values stay latents.

A head's key is its projection of a token's latent, so its product with a query is that of the latent with the query's
projection by the same matrix, transposed. Likewise, latents are weighted and added up, and the sum is projected.
So attention has one kv head, whose values are the first part of its keys, and a token leaves one vector in the cache.
Prompts use the same form as single tokens: no keys and values of a long context are computed again for each chunk.
The reference is ``DeepseekV3Attention`` in transformers.
"""

import torch
from torch import Tensor, nn

from triptych.layers.attention.base import AttentionBackend, AttentionOptions
from triptych.layers.compiled_layer import MultiplyHeads, compiled
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.layer_context import LayerContext
from triptych.layers.linear import frozen
from triptych.layers.parallel import ShardedDimension
from triptych.layers.pointwise import rotate
from triptych.layers.specs import MLASpec
from triptych.layers.weights import WeightReader

NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the other norms have."""


class HeadProjections(nn.Module):
    """A matrix for each head. They are never quantized: they stand between others that are."""

    def __init__(self, reader: WeightReader, weights: Tensor) -> None:
        """``weights`` is [heads, out, in]."""
        super().__init__()
        linears = [reader.weights.high_precision(weight, None, reader.device) for weight in weights]
        products = [product for linear in linears if (product := compiled(linear)) is not None]
        self.in_one_call = MultiplyHeads(products) if len(products) == len(linears) else None
        if self.in_one_call is None:
            self.weights = frozen(weights.to(reader.device, reader.weights.activations))

    def forward(self, values: Tensor) -> Tensor:
        """[T, heads, in] → [T, heads, out], a view of [heads, T, out]."""
        if self.in_one_call is not None:
            return self.in_one_call(values).transpose(0, 1)
        return (values.transpose(0, 1) @ self.weights.transpose(1, 2)).transpose(0, 1)


class LatentAttention(nn.Module):
    """Latent attention over the paged cache. ``forward`` ends before the output projection, ``output``, which the layer
    applies to the tokens it needs. Ranks divide the heads; each has the whole latent."""

    def __init__(
        self, spec: MLASpec, config: DecoderConfig, reader: WeightReader, prefix: str, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.options = AttentionOptions(scale=spec.scale, value_dim=spec.latent_dim)
        self.rope_index = config.ropes.index(spec.rotary)
        hidden_size, head_dim = config.hidden_size, spec.key_dim + spec.rotated_dim
        heads = ShardedDimension(spec.num_heads, head_dim, self._order(spec.key_dim))
        if spec.query_latent_dim is None:
            self.queries: nn.Module = reader.column_parallel({f"{prefix}.q_proj": heads}, hidden_size)
        else:
            latent = ShardedDimension(1, spec.query_latent_dim)
            self.queries = nn.Sequential(
                reader.column_parallel({f"{prefix}.q_a_proj": latent}, hidden_size, bias=spec.bias),
                reader.norm(f"{prefix}.q_a_layernorm", spec.query_latent_dim, NORM_EPS),
                reader.column_parallel({f"{prefix}.q_b_proj": heads}, spec.query_latent_dim),
            )
        cached = ShardedDimension(1, spec.cached_dim, self._order(spec.latent_dim))
        self.latents = reader.column_parallel({f"{prefix}.kv_a_proj_with_mqa": cached}, hidden_size, bias=spec.bias)
        self.latent_norm = reader.norm(f"{prefix}.kv_a_layernorm", spec.latent_dim, NORM_EPS)
        both = ShardedDimension(spec.num_heads, spec.key_dim + spec.value_dim)
        weight = reader.rows(f"{prefix}.kv_b_proj", both, spec.latent_dim).unflatten(0, (-1, both.width))
        of_keys, of_values = weight.split((spec.key_dim, spec.value_dim), dim=1)  # [heads, dim, latent]
        self.to_latent = HeadProjections(reader, of_keys.transpose(1, 2))
        self.from_latent = HeadProjections(reader, of_values)
        values = ShardedDimension(spec.num_heads, spec.value_dim)
        self.output = reader.all_reduced(reader.row_parallel(f"{prefix}.o_proj", hidden_size, values, bias=spec.bias))

    def _order(self, still: int) -> tuple[int, ...] | None:
        """Return the order of ``still`` values and those that are rotated."""
        order = self.spec.rope.order(self.spec.rotated_dim)
        return None if order is None else (*range(still), *(still + index for index in order))

    def forward(self, hidden: Tensor, cache: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """Return the input of ``output``, [T, heads * value_dim], for ``hidden`` [T, hidden]; write the new tokens'
        latents and rotated keys to the layer's ``cache``."""
        (cached,), spec = cache, self.spec
        query = self.queries(hidden).unflatten(-1, (-1, spec.key_dim + spec.rotated_dim))
        still, turned = query.split((spec.key_dim, spec.rotated_dim), dim=2)
        latent, shared = self.latents(hidden).split((spec.latent_dim, spec.rotated_dim), dim=1)
        # queries and the key that they share are adjacent, to be rotated at once
        rotated = rotate(torch.cat((turned, shared.unsqueeze(1)), dim=1), *context.rotations[self.rope_index])
        query = torch.cat((self.to_latent(still), rotated[:, :-1]), dim=2)  # [T, heads, latent + rotated]
        key = torch.cat((self.latent_norm(latent), rotated[:, -1]), dim=1).unsqueeze(1)
        attended = self.backend(query, key, None, cached, None, context.attention, self.options)
        return self.from_latent(attended).flatten(1)
