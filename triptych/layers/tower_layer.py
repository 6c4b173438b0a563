"""Our modules in place of transformers' ones, for towers: norms, activations, attention and whole layers.

A family names the classes that are replaced: modules with equal names of children may compute something else. Layer
norms and activations, whose classes say what they compute, are always replaced.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from triptych.errors import InternalError
from triptych.layers.attention.compiled import paged_attention
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.compiled_layer import AttendLayer, FinishExtras, FinishLayer, MultiplyMLP, compiled
from triptych.layers.linear import LayerNorm, RMSNorm
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import Activation

ACTIVATIONS = {
    "GELUTanh": Activation.GELU_TANH,
    "QuickGELUActivation": Activation.QUICK_GELU,
    "SiLUActivation": Activation.SILU,
    "SiLU": Activation.SILU,
}
"""By the names of classes in ``transformers.activations`` and PyTorch."""
MLPS = (("linear_fc1", "act_fn", "linear_fc2"), ("fc1", "act", "fc2"))
"""Names of the first product, the activation and the second product in the MLPs of transformers' towers."""
GATE, UP, DOWN, GATED_ACTIVATION = "gate_proj", "up_proj", "down_proj", "act_fn"
"""Names of the children of gated MLPs. ``load_module`` has put both the gates and their factors into the first."""


class Activate(nn.Module):
    """An ``Activation`` as a module."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, activations: Tensor) -> Tensor:
        return self.activation(activations)


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
        max_seqlen: int | None = None,
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


def gates_with_factors(module: nn.Module, replaced: Collection[str]) -> dict[str, str]:
    """Return the names of the gates' linear layers in ``module``, and those of their factors, for all MLPs of the
    classes ``replaced`` that ``GatedMLP`` can replace."""
    found = {}
    for name, one in module.named_modules():
        children = dict(one.named_children())
        if type(one).__name__ in replaced and children.keys() == {GATE, UP, DOWN, GATED_ACTIVATION}:
            activation = type(children[GATED_ACTIVATION]).__name__
            if ACTIVATIONS.get(activation) == Activation.SILU:
                found[f"{name}.{GATE}"] = f"{name}.{UP}"
    return found


def use_our_modules(module: nn.Module, in_bf16: bool, replaced: Collection[str]) -> None:
    """Put our modules in place of those in ``module`` that are of the classes ``replaced``, layer norms or activations,
    after its weights have been loaded. Raises InternalError if a module of these classes has no equivalent, or none is
    of one of them.

    ``in_bf16`` is as in ``TowerAttention``.
    """
    missing = set(replaced)
    for name, one in reversed(list(module.named_modules())):  # children first
        kind = type(one).__name__
        ours = _equivalent(one, in_bf16) if kind in replaced else _generic(one)
        if name and ours is not None:
            missing.discard(kind)
            module.set_submodule(name, ours)
        elif kind in replaced:
            raise InternalError(f"{type(module).__name__}'s {name} is no {kind} that can be replaced")
    if missing:
        raise InternalError(f"{type(module).__name__} has no replaceable {', '.join(sorted(missing))}")


def _generic(module: nn.Module) -> nn.Module | None:
    """Return the equivalent of a module whose class says what it computes."""
    if (name := type(module).__name__) in ACTIVATIONS:
        return Activate(ACTIVATIONS[name])
    if isinstance(module, nn.LayerNorm) and module.weight is not None and module.bias is not None:
        return LayerNorm(module.weight, module.bias, module.eps)
    return None


def _equivalent(module: nn.Module, in_bf16: bool) -> nn.Module | None:
    name, settings = type(module).__name__, vars(module)
    if name.endswith("RMSNorm"):
        return RMSNorm(module.get_parameter("weight"), settings["variance_epsilon"])
    return _mlp(module) or TowerAttention.in_place_of(module, in_bf16) or _layer(module)


def _mlp(module: nn.Module) -> nn.Module | None:
    children: dict[str, Any] = dict(module.named_children())
    if children.keys() == {GATE, DOWN, GATED_ACTIVATION}:
        return GatedMLP(children[GATE], children[DOWN])
    for up, activation, down in MLPS:
        if children.keys() == {up, activation, down} and isinstance(found := children[activation], Activate):
            return MLP(children[up], found.activation, children[down])
    return None


def _layer(module: nn.Module) -> TowerLayer | None:
    children = dict(module.named_children())
    if children.keys() != {"norm1", "attn", "norm2", "mlp"}:
        return None
    norms, attention, mlp = (children["norm1"], children["norm2"]), children["attn"], children["mlp"]
    if not isinstance(attention, TowerAttention) or not isinstance(mlp, MLP | GatedMLP):
        return None
    first, second = norms
    if not isinstance(first, LayerNorm | RMSNorm) or not isinstance(second, LayerNorm | RMSNorm):
        return None
    return TowerLayer(first, attention, second, mlp)
