"""The modules of a decoder layer, built from a ``WeightReader``; ``prefix`` is a module's name in the decoder.

The reference is ``Qwen2DecoderLayer``, ``Qwen3DecoderLayer`` and ``Qwen3MoeSparseMoeBlock`` in transformers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych.errors import ConfigError
from triptych.layers.attention.base import AttentionBackend, AttentionBatch
from triptych.layers.compiled_layer import AttendLayer, FinishLayer
from triptych.layers.decoder_config import DecoderConfig, MoEConfig
from triptych.layers.linear import Linear, PackedLinear, RMSNorm
from triptych.layers.parallel import ShardedDimension
from triptych.layers.pointwise import rotate, silu_and_mul
from triptych.layers.products import CompiledProduct
from triptych.layers.weights import WeightReader


@dataclass(frozen=True)
class LayerContext:
    """What all layers of one forward pass share."""

    cos: Tensor
    """[T, 1, head_dim], contiguous: cosines of the rotary angles."""
    sin: Tensor
    """[T, 1, head_dim], contiguous: sines of the rotary angles."""
    attention: AttentionBatch


class Attention(nn.Module):
    """Grouped-query attention over the paged cache. ``forward`` ends before the output projection, ``output``, which
    the layer applies to the tokens it needs."""

    def __init__(self, config: DecoderConfig, reader: WeightReader, index: int, backend: AttentionBackend) -> None:
        super().__init__()
        prefix = f"layers.{index}.self_attn"
        shard, head_dim = config.shard(reader.group.size), config.head_dim
        heads, kv_heads = shard.num_heads, shard.num_kv_heads
        self.head_counts = [heads, kv_heads, kv_heads]
        self.head_dim = head_dim
        self.backend = backend
        self.window = config.window_of(index)
        if self.window is not None and not backend.takes_windows:
            raise ConfigError("layers with sliding windows are served on CPUs only so far")
        queries, keys = ShardedDimension(config.num_heads, head_dim), ShardedDimension(config.num_kv_heads, head_dim)
        self.qkv = reader.column_parallel(
            {f"{prefix}.q_proj": queries, f"{prefix}.k_proj": keys, f"{prefix}.v_proj": keys},
            config.hidden_size,
            bias=config.qkv_bias,
        )
        self.output = reader.all_reduced(
            reader.row_parallel(f"{prefix}.o_proj", config.hidden_size, queries, bias=config.output_bias)
        )
        self.qk_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            # Queries and keys are adjacent, so one norm with a weight per head serves both.
            q_weight = reader.vector(f"{prefix}.q_norm", head_dim).expand(heads, -1)
            k_weight = reader.vector(f"{prefix}.k_norm", head_dim).expand(kv_heads, -1)
            self.qk_norm = RMSNorm(torch.cat((q_weight, k_weight)), config.rms_norm_eps)

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor, context: LayerContext) -> Tensor:
        """Return the input of ``output``, [T, heads * head_dim], for ``hidden`` [T, hidden]; write the new tokens' keys
        and values to the layer's cache, ``keys`` and ``values``."""
        heads, kv_heads, _ = self.head_counts
        # a new tensor, in which queries and keys are rotated in place
        qkv = self.qkv(hidden).unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 kv_heads, head_dim]
        qk, value = qkv.split((heads + kv_heads, kv_heads), dim=1)
        query, key = rotate(self.qk_norm(qk), context.cos, context.sin).split((heads, kv_heads), dim=1)
        attended = self.backend(query, key, value, keys, values, context.attention, self.window)  # [T, heads, head_dim]
        return attended.flatten(1)


class GatedMLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``, with gate and up fused."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]."""
        return self.down(silu_and_mul(self.gate_up(hidden)))


class MixtureOfExperts(nn.Module):
    """Routes each token to its ``experts_per_token`` best experts and adds up their weighted outputs."""

    def __init__(self, config: MoEConfig, router: Linear, experts: list[GatedMLP]) -> None:
        super().__init__()
        self.config = config
        self.router = router
        self.experts = nn.ModuleList(experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]."""
        k = self.config.experts_per_token
        probabilities = self.router(hidden).softmax(dim=-1, dtype=torch.float32)  # [T, experts]
        scales, chosen = probabilities.topk(k, dim=-1)  # [T, k]
        if self.config.norm_topk_prob:
            scales = scales / scales.sum(dim=-1, keepdim=True)
        # sorted by expert, the T * k assignments form one run per expert, so each expert runs once
        assigned = chosen.flatten()
        order = assigned.argsort(stable=True)
        counts = assigned.bincount(minlength=self.config.num_experts).tolist()
        tokens = (order // k).split(counts)
        scales = scales.to(hidden.dtype).flatten()[order].unsqueeze(-1).split(counts)
        output = torch.zeros_like(hidden)
        for expert, count in enumerate(counts):
            if count:
                expert_output = self.experts[expert](hidden[tokens[expert]])
                output.index_add_(0, tokens[expert], expert_output * scales[expert])
        return output


def load_dense_mlp(config: DecoderConfig, reader: WeightReader, prefix: str) -> GatedMLP:
    """Load this rank's part of a dense layer's MLP."""
    hidden, intermediate = config.hidden_size, ShardedDimension(config.intermediate_size)
    return GatedMLP(
        gate_up=reader.column_parallel(
            {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}, hidden
        ),
        down=reader.row_parallel(f"{prefix}.down_proj", hidden, intermediate),
    )


def load_mixture(config: DecoderConfig, moe: MoEConfig, reader: WeightReader, prefix: str) -> MixtureOfExperts:
    """Load a layer's router, and this rank's part of each expert. The router isn't packed: rounding could change which
    experts run."""
    hidden, intermediate = config.hidden_size, ShardedDimension(moe.moe_intermediate_size)
    gate_ups = reader.expert_gate_ups(f"{prefix}.experts", moe.num_experts, intermediate, hidden)
    downs = reader.expert_downs(f"{prefix}.experts", moe.num_experts, hidden, intermediate)
    experts = [GatedMLP(gate_up, down) for gate_up, down in zip(gate_ups, downs, strict=True)]
    return MixtureOfExperts(moe, reader.plain_linear(f"{prefix}.gate", moe.num_experts, hidden), experts)


def compiled(linear: nn.Module) -> CompiledProduct | None:
    """Return a linear layer's product if it uses the compiled kernels and needs no all-reduce, else None."""
    product = linear.product if isinstance(linear, PackedLinear) else None
    return product if isinstance(product, CompiledProduct) else None


class DecoderLayer(nn.Module):
    """One decoder layer: attention and MLP, each preceded by a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, reader: WeightReader, index: int, backend: AttentionBackend) -> None:
        super().__init__()
        prefix = f"layers.{index}"
        self.attention_norm = reader.norm(f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, reader, index, backend)
        self.mlp_norm = reader.norm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        mlp: nn.Module
        if config.moe is not None and config.is_moe_layer(index):
            mlp = load_mixture(config, config.moe, reader, f"{prefix}.mlp")
        else:
            mlp = load_dense_mlp(config, reader, f"{prefix}.mlp")
        self.mlp = reader.all_reduced(mlp)
        self.compiled_attend, self.compiled_finish = self.in_compiled_calls()

    def in_compiled_calls(self) -> tuple[AttendLayer | None, FinishLayer | None]:
        """Return the layer's two halves as compiled calls, each None if the kernels don't support it."""
        attention, mlp, kernel = self.attention, self.mlp, getattr(self.attention.backend, "kernel", None)
        heads, kv_heads, _ = attention.head_counts
        attend, finish = None, None
        if kernel is not None and kernel.suits_heads(heads, kv_heads, attention.head_dim):
            shape = heads, kv_heads, attention.head_dim
            heads_norm = attention.qk_norm if isinstance(attention.qk_norm, RMSNorm) else None
            if (qkv := compiled(attention.qkv)) is not None and qkv.library is kernel.library:
                attend = AttendLayer(kernel, self.attention_norm, qkv, heads_norm, shape, attention.window)
        if isinstance(mlp, GatedMLP):
            output, gate_up, down = (compiled(linear) for linear in (attention.output, mlp.gate_up, mlp.down))
            if output is not None and gate_up is not None and down is not None:
                finish = FinishLayer(self.mlp_norm, output, gate_up, down)
        return attend, finish

    def forward(
        self, hidden: Tensor, keys: Tensor, values: Tensor, context: LayerContext, rows: Tensor | None = None
    ) -> Tensor:
        """Return a new tensor [T, hidden] for ``hidden`` [T, hidden]; with ``rows``, int64 [R], only those tokens',
        [R, hidden]. Keys and values of all T tokens are written."""
        if self.compiled_attend is not None and self.compiled_attend.takes(keys.dtype):
            attended = self.compiled_attend(hidden, keys, values, context.cos, context.sin, context.attention)
        else:
            attended = self.attention(self.attention_norm(hidden), keys, values, context)
        if rows is not None:
            hidden, attended = hidden[rows], attended[rows]
            if not len(rows):
                return hidden
        if self.compiled_finish is not None:
            return self.compiled_finish(hidden, attended)
        hidden = hidden + self.attention.output(attended)
        return hidden + self.mlp(self.mlp_norm(hidden))
