"""The modules that treat tokens one by one, built from their specs; ``prefix`` is a module's name in the decoder.

The reference is ``Qwen2MLP`` and ``Qwen3MoeSparseMoeBlock`` in transformers.
"""

import torch
from torch import Tensor, nn

from triptych.layers.linear import Linear
from triptych.layers.parallel import ShardedDimension
from triptych.layers.pointwise import Activation, gate_and_mul
from triptych.layers.specs import FfnSpec, GatedMLPSpec, MoESpec
from triptych.layers.weights import WeightReader


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (arXiv:2002.05202), with gate and up fused."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation = Activation.SILU) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]."""
        return self.down(gate_and_mul(self.gate_up(hidden), self.activation))


class MixtureOfExperts(nn.Module):
    """Routes each token to its ``experts_per_token`` best experts and adds up their weighted outputs."""

    def __init__(self, spec: MoESpec, router: Linear, experts: list[GatedMLP]) -> None:
        super().__init__()
        self.spec = spec
        self.router = router
        self.experts = nn.ModuleList(experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]."""
        k = self.spec.experts_per_token
        probabilities = self.router(hidden).softmax(dim=-1, dtype=torch.float32)  # [T, experts]
        scales, chosen = probabilities.topk(k, dim=-1)  # [T, k]
        if self.spec.norm_topk_prob:
            scales = scales / scales.sum(dim=-1, keepdim=True)
        # sorted by expert, the T * k assignments form one run per expert, so each expert runs once
        assigned = chosen.flatten()
        order = assigned.argsort(stable=True)
        counts = assigned.bincount(minlength=self.spec.num_experts).tolist()
        tokens = (order // k).split(counts)
        scales = scales.to(hidden.dtype).flatten()[order].unsqueeze(-1).split(counts)
        output = torch.zeros_like(hidden)
        for expert, count in enumerate(counts):
            if count:
                expert_output = self.experts[expert](hidden[tokens[expert]])
                output.index_add_(0, tokens[expert], expert_output * scales[expert])
        return output


def load_ffn(spec: FfnSpec, hidden_size: int, reader: WeightReader, prefix: str) -> nn.Module:
    """Load this rank's part of a layer's ffn; the ranks' outputs are summed."""
    match spec:
        case GatedMLPSpec():
            module: nn.Module = _load_mlp(spec, hidden_size, reader, prefix)
        case MoESpec():
            module = _load_mixture(spec, hidden_size, reader, prefix)
    return reader.all_reduced(module)


def _load_mlp(spec: GatedMLPSpec, hidden_size: int, reader: WeightReader, prefix: str) -> GatedMLP:
    intermediate = ShardedDimension(spec.intermediate_size)
    return GatedMLP(
        gate_up=reader.column_parallel(
            {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}, hidden_size, bias=spec.bias
        ),
        down=reader.row_parallel(f"{prefix}.down_proj", hidden_size, intermediate, bias=spec.bias),
        activation=Activation[spec.activation.upper()],
    )


def _load_mixture(spec: MoESpec, hidden_size: int, reader: WeightReader, prefix: str) -> MixtureOfExperts:
    """The router isn't packed: rounding could change which experts run."""
    intermediate = ShardedDimension(spec.intermediate_size)
    gate_ups = reader.expert_gate_ups(f"{prefix}.experts", spec.num_experts, intermediate, hidden_size)
    downs = reader.expert_downs(f"{prefix}.experts", spec.num_experts, hidden_size, intermediate)
    experts = [GatedMLP(gate_up, down) for gate_up, down in zip(gate_ups, downs, strict=True)]
    return MixtureOfExperts(spec, reader.plain_linear(f"{prefix}.gate", spec.num_experts, hidden_size), experts)
