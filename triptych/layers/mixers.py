"""The modules that mix tokens, built from their specs; ``prefix`` is a module's name in the decoder.

The references are ``Qwen3Attention``, ``Gemma2Attention``, ``GptOssAttention``, ``Ministral3Attention`` and
``Llama4TextAttention`` in transformers.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from triptych.layers.attention.base import AttentionBackend, AttentionOptions
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.delta_net import GatedDeltaNet
from triptych.layers.latent import LatentAttention
from triptych.layers.layer_context import LayerContext
from triptych.layers.linear import RMSNorm
from triptych.layers.parallel import ShardedDimension
from triptych.layers.pointwise import rotate
from triptych.layers.specs import AttentionSpec, DeltaNetSpec, MLASpec, QueryScaling
from triptych.layers.token_choice import with_choice
from triptych.layers.weights import WeightReader


class Attention(nn.Module):
    """Grouped-query attention over the paged cache. ``forward`` ends before the output projection, ``output``, which
    the layer applies to the tokens it needs."""

    def __init__(
        self,
        spec: AttentionSpec,
        config: DecoderConfig,
        reader: WeightReader,
        prefix: str,
        backend: AttentionBackend,
        *,
        reads_other_cache: bool,
    ) -> None:
        super().__init__()
        shard, head_dim = spec.shard(reader.group.size), spec.head_dim
        self.shape = heads, kv_heads, _ = shard.num_heads, shard.num_kv_heads, head_dim
        self.reads_other_cache = reads_other_cache
        if reads_other_cache:
            kv_heads = 0
        self.head_counts = [heads, kv_heads, kv_heads]
        self.num_gates = heads if spec.output_gate else 0
        self.head_dim = head_dim
        self.backend = backend
        sinks = None
        if spec.has_sinks:
            own = ShardedDimension(spec.num_heads).part(reader.group)
            sinks = reader.float32_vector(f"{prefix}.sinks", spec.num_heads)[own].contiguous()
        self.options = AttentionOptions(spec.window, spec.scale, spec.softcap, sinks, spans=spec.spans)
        self.query_scaling = spec.query_scaling
        self.rope_index = config.ropes.index(spec.rotary)
        queries, keys = ShardedDimension(spec.num_heads, head_dim), ShardedDimension(spec.num_kv_heads, head_dim)
        order = spec.rope.order(head_dim)
        projected = gated_queries(queries, order) if spec.output_gate else replace(queries, order=order)
        projections = {f"{prefix}.q_proj": projected}
        if not self.reads_other_cache:
            projections[f"{prefix}.k_proj"] = replace(keys, order=order)
            if not spec.k_is_v:
                projections[f"{prefix}.v_proj"] = keys
        repeats_last = spec.k_is_v and not self.reads_other_cache
        self.qkv = reader.column_parallel(
            projections, config.hidden_size, bias=spec.qkv_bias, repeats_last=repeats_last
        )
        self.output = reader.all_reduced(
            reader.row_parallel(f"{prefix}.o_proj", config.hidden_size, queries, bias=spec.output_bias)
        )
        self.normalises_values = spec.v_norm
        self.qk_norm: nn.Module = nn.Identity()
        if spec.qk_norm:
            # Queries, keys and values are adjacent, so one norm with a weight per head serves all that are normalised.
            names = ("q_norm", "k_norm")[: 1 if self.reads_other_cache else 2]
            if spec.qk_norm_weights:
                weights = [reader.vector(f"{prefix}.{name}", head_dim) for name in names]
            else:
                weights = [torch.ones(head_dim, dtype=reader.weights.activations, device=reader.device)] * len(names)
            if order is not None:
                weights = [weight[list(order)] for weight in weights]
            if spec.v_norm:
                weights.append(torch.ones_like(weights[0]))
            counts = zip(weights, self.head_counts, strict=False)
            by_head = torch.cat([weight.expand(count, -1) for weight, count in counts])
            self.qk_norm = RMSNorm(by_head, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cache: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """Return the input of ``output``, [T, heads * head_dim], for ``hidden`` [T, hidden]; write the new tokens' keys
        and values to the layer's ``cache``, unless that is another layer's, which has done so."""
        keys, values = cache
        heads, kv_heads, _ = self.head_counts
        # a new tensor [T, gates + heads + 2 kv_heads, head_dim], in which queries and keys are rotated in place
        qkv = with_choice(self.qkv, hidden, context.choice).unflatten(-1, (-1, self.head_dim))
        gates, qkv = qkv.tensor_split((self.num_gates,), dim=1)
        if self.normalises_values:
            qkv = self.qk_norm(qkv)
        qk, value = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if not self.normalises_values:
            qk = self.qk_norm(qk)
        query, key = rotate(qk, *context.rotations[self.rope_index]).split((heads, kv_heads), dim=1)
        if self.reads_other_cache:
            key, value = key[:0], value[:0]
        if self.query_scaling is not None:
            query = query * query_scales(context.positions, self.query_scaling).to(query.dtype)
        attended = self.backend(query, key, value, keys, values, context.attention, self.options)
        if self.num_gates:
            attended = attended * gates.sigmoid()
        return attended.flatten(1)  # from [T, heads, head_dim]


def gated_queries(queries: ShardedDimension, order: tuple[int, ...] | None) -> ShardedDimension:
    """Return the outputs of a projection to heads' queries, each followed by its gate: all gates, then all ``queries``
    in ``order``."""
    dim = queries.width
    reordered = range(dim) if order is None else order
    return ShardedDimension(queries.units, 2 * dim, order=(*range(dim, 2 * dim), *reordered), parts=(dim, dim))


def query_scales(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """Return the factors of queries, float32 [T, 1, 1], at ``positions`` [3, T]."""
    lengths = torch.floor((positions[0].float() + scaling.offset) / scaling.original_length)
    return (1 + scaling.beta * torch.log(1 + lengths)).view(-1, 1, 1)


Mixer = Attention | LatentAttention | GatedDeltaNet


def load_mixer(config: DecoderConfig, reader: WeightReader, index: int, backend: AttentionBackend) -> Mixer:
    """Load the mixer of layer ``index``."""
    prefix = f"layers.{index}.self_attn"
    match config.layers[index].mixer:
        case AttentionSpec() as spec:
            reads_other_cache = config.layers[index].cache_of is not None
            return Attention(spec, config, reader, prefix, backend, reads_other_cache=reads_other_cache)
        case MLASpec() as spec:
            return LatentAttention(spec, config, reader, prefix, backend)
        case DeltaNetSpec() as spec:
            return GatedDeltaNet(spec, config, reader, f"layers.{index}.linear_attn")
