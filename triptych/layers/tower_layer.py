"""Layers of towers, and MLPs of layers and projectors. Layers that the kernels support are two compiled calls."""

import torch
from torch import Tensor, nn

from triptych.layers.attention.compiled import paged_attention
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.compiled_layer import AttendLayer, FinishExtras, FinishLayer, MultiplyMLP, compiled
from triptych.layers.linear import LayerNorm, RMSNorm
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import Activation


class MLP(nn.Module):
    """``down(activation(up(x)))``: of a tower's layer, or a projector."""

    def __init__(self, up: nn.Module, activation: Activation, down: nn.Module) -> None:
        super().__init__()
        self.up = up
        self.activation = activation
        self.down = down
        first, second = compiled(up), compiled(down)
        self.compiled = None if first is None or second is None else MultiplyMLP(first, activation, second)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [T, in] → [T, out]."""
        if self.compiled is not None and hidden.dtype == torch.float32 and hidden.stride()[1:] == (1,):
            return self.compiled(hidden)
        output: Tensor = self.down(self.activation(self.up(hidden)))
        return output


class TowerLayer(nn.Module):
    """One layer of a tower: attention and MLP, each preceded by a norm and added to the residual stream, maybe after
    another norm."""

    def __init__(
        self,
        attention_norm: LayerNorm | RMSNorm,
        attention: TowerAttention,
        mlp_norm: LayerNorm | RMSNorm,
        mlp: MLP | GatedMLP,
        *,
        mixed_norm: RMSNorm | None = None,
        finished_norm: RMSNorm | None = None,
    ) -> None:
        """``mixed_norm`` and ``finished_norm``, if any, are those of the outputs of attention and MLP. All RMSNorms of
        a layer have the same epsilon."""
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mixed_norm = mixed_norm
        self.finished_norm = finished_norm
        self.compiled_attend, self.compiled_finish = self.in_compiled_calls()

    def in_compiled_calls(self) -> tuple[AttendLayer | None, FinishLayer | None]:
        """Return the layer's two halves as compiled calls, each None if the kernels don't support it."""
        attention, mlp, attend, finish = self.attention, self.mlp, None, None
        first = mlp.up if isinstance(mlp, MLP) else mlp.gate_up
        output, up, down = compiled(attention.output), compiled(first), compiled(mlp.down)
        if output is not None and up is not None and down is not None:
            extras = FinishExtras(self.mixed_norm, self.finished_norm)
            finish = FinishLayer(self.mlp_norm, output, up, down, mlp.activation, extras)
        kernel, heads = paged_attention(attention.in_bf16), attention.num_heads
        qkv = compiled(attention.inputs[0]) if len(attention.inputs) == 1 else None
        if kernel is not None and qkv is not None and qkv.library is kernel.library and not attention.norms:
            head_dim = qkv.outputs // 3 // heads
            if kernel.suits_heads(heads, heads, head_dim):
                shape = heads, heads, head_dim
                attend = AttendLayer(kernel, self.attention_norm, qkv, attention.heads_norm, shape)
        return attend, finish

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Return a new tensor [T, hidden] for ``hidden_states`` [T, hidden]; other arguments as in
        ``TowerAttention``."""
        if self.compiled_attend is not None:
            rotation = None
            if position_embeddings is not None:
                rotation = position_embeddings[0].contiguous(), position_embeddings[1].contiguous()
            lengths = cu_seqlens.diff().tolist()
            attended = self.compiled_attend.over_segments(hidden_states, rotation, lengths, self.attention.scale)
        else:
            normed = self.attention_norm(hidden_states)
            attended = self.attention.attended(normed, cu_seqlens, position_embeddings)
        return self.finish(hidden_states, attended)

    def finish(self, hidden_states: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output, a new tensor [T, hidden], for its input [T, hidden] and what attention's output
        projection takes, [T, heads * head_dim]."""
        if self.compiled_finish is not None:
            return self.compiled_finish(hidden_states, attended)
        mixed = self.attention.output(attended)
        hidden = hidden_states + (mixed if self.mixed_norm is None else self.mixed_norm(mixed))
        finished = self.mlp(self.mlp_norm(hidden))
        layer_output: Tensor = hidden + (finished if self.finished_norm is None else self.finished_norm(finished))
        return layer_output


class PostNormLayer(nn.Module):
    """One layer of a tower: attention and MLP, each followed by a norm and then added to the residual stream."""

    def __init__(self, attention: TowerAttention, attention_norm: LayerNorm, mlp: MLP, mlp_norm: LayerNorm) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Run the layer; arguments and result are those of ``TowerLayer.forward``."""
        attended = self.attention.attended(hidden_states, cu_seqlens, position_embeddings)
        hidden = hidden_states + self.attention_norm(self.attention.output(attended))
        layer_output: Tensor = hidden + self.mlp_norm(self.mlp(hidden))
        return layer_output
