"""Mixtures of experts: a router, the experts, and an expert that all tokens share.

The references are ``Qwen2MoeSparseMoeBlock``, ``DeepseekV3MoE``, ``GptOssMLP``, ``Llama4TextMoe`` and
``Gemma4TextRouter`` in transformers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.layers.compiled_layer import RunExperts, compiled
from triptych.layers.expert_weights import load_experts
from triptych.layers.linear import Linear, RMSNorm
from triptych.layers.mlp import ClampedMLP, GatedMLP, load_mlp
from triptych.layers.routing import route
from triptych.layers.specs import DenseAndExpertsSpec, MoESpec, RoutingSpec, SharedExpertSpec
from triptych.layers.weights import WeightReader


class ExpertRouter(nn.Module):
    """Chooses each token's experts. Computes in float32, whatever the weight format: rounding could change the
    choice."""

    def __init__(
        self,
        spec: RoutingSpec,
        linear: Linear,
        correction: Tensor | None = None,
        expert_scales: Tensor | None = None,
    ) -> None:
        """``linear`` yields the logits [T, experts]; ``correction`` is as in ``route``; ``expert_scales``, float32
        [experts], multiply the weights."""
        super().__init__()
        self.spec = spec
        self.linear = linear
        self.correction = correction
        self.expert_scales = expert_scales

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return experts and weights, as ``route`` does, for ``hidden`` [T, hidden]."""
        chosen, weights = route(self.spec, self.linear(hidden.float()), self.correction)
        return chosen, weights if self.expert_scales is None else weights * self.expert_scales[chosen]


class SharedExpert(nn.Module):
    """An MLP that processes every token, scaled by the sigmoid of its ``gate``, [hidden] → [1], if it has one."""

    def __init__(self, mlp: GatedMLP, gate: Linear | None) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = gate

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]."""
        output: Tensor = self.mlp(hidden)
        return output if self.gate is None else output * self.gate(hidden.float()).sigmoid().to(output.dtype)


Expert = GatedMLP | ClampedMLP


class MixtureOfExperts(nn.Module):
    """Adds up the weighted outputs of each token's experts, and the output of the shared expert."""

    def __init__(
        self,
        router: ExpertRouter,
        experts: Sequence[Expert],
        shared: SharedExpert | None = None,
        *,
        weighs_inputs: bool = False,
    ) -> None:
        """``weighs_inputs``: weights multiply the experts' inputs instead of their outputs."""
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)
        self.shared = shared
        self.weighs_inputs = weighs_inputs
        self.run_experts = _in_one_call(experts, weighs_inputs) or self.one_by_one

    def forward(self, hidden: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]. The router sees ``routed_by``, of the same shape, if given."""
        chosen, weights = self.router(hidden if routed_by is None else routed_by)
        output = self.run_experts(hidden, chosen, weights)
        return output if self.shared is None else output + self.shared(hidden)

    def one_by_one(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, as ``RunExperts`` does, by PyTorch."""
        # sorted by expert, the assignments of tokens form one run per expert, so each expert runs once
        assigned, order = chosen.flatten().sort(stable=True)
        used, counts = torch.stack(assigned.unique_consecutive(return_counts=True)).tolist()
        tokens = (order // chosen.shape[1]).split(counts)
        scales = weights.to(hidden.dtype).flatten()[order].unsqueeze(-1).split(counts)
        output = torch.zeros_like(hidden)
        for expert, rows, scale in zip(used, tokens, scales, strict=True):
            inputs = hidden[rows]
            if self.weighs_inputs:
                outputs = self.experts[expert](inputs * scale)
            else:
                outputs = self.experts[expert](inputs) * scale
            output.index_add_(0, rows, outputs)
        return output


class DenseAndExperts(nn.Module):
    """Adds up the normalised outputs of an MLP and of experts, which see the residual stream in other norms."""

    def __init__(
        self, dense: nn.Module, experts: nn.Module, norms: tuple[RMSNorm, RMSNorm, RMSNorm], routed_by: RMSNorm
    ) -> None:
        """``norms`` are those of the MLP's output, and of the experts' input and output; ``routed_by`` is that of the
        router's input, in float32."""
        super().__init__()
        self.dense = dense
        self.experts = experts
        self.dense_norm, self.input_norm, self.experts_norm = norms
        self.router_norm = routed_by

    def forward(self, normed: Tensor, stream: Tensor) -> Tensor:
        """``stream`` [T, hidden] and ``normed``, the MLP's input, of the same shape → [T, hidden]."""
        output: Tensor = self.dense_norm(self.dense(normed))
        experts = self.experts(self.input_norm(stream), self.router_norm(stream.float()))
        return output + self.experts_norm(experts)


def _in_one_call(experts: Sequence[Expert], weighs_inputs: bool) -> RunExperts | None:
    """Return all experts as one compiled call, or None if the kernels don't support one of them."""
    pairs = [(compiled(expert.gate_up), compiled(expert.down)) for expert in experts]
    supported = [(gate_up, down) for gate_up, down in pairs if gate_up is not None and down is not None]
    if len(supported) < len(experts):
        return None
    return RunExperts(supported, experts[0].activation, weighs_inputs=weighs_inputs)


def load_mixture(spec: MoESpec, reader: WeightReader, prefix: str, hidden_size: int) -> MixtureOfExperts:
    """Load a layer's router, and this rank's part of each expert and of the shared one. The ranks' outputs still have
    to be summed. Raises CheckpointError, as the reader does."""
    router = ExpertRouter(
        spec.routing,
        reader.float32_linear(f"{prefix}.{spec.router}", spec.num_experts, hidden_size, bias=spec.has_biases),
        *(
            None if name is None else reader.float32_vector(f"{prefix}.{name}", spec.num_experts)
            for name in (spec.correction, spec.expert_scales)
        ),
    )
    experts = load_experts(spec, reader, f"{prefix}.experts", hidden_size)
    shared = None if spec.shared is None else _load_shared(spec.shared, reader, prefix, hidden_size)
    return MixtureOfExperts(router, experts, shared, weighs_inputs=spec.weighs_inputs)


def _load_shared(spec: SharedExpertSpec, reader: WeightReader, prefix: str, hidden_size: int) -> SharedExpert:
    gate = None if spec.gate is None else reader.float32_linear(f"{prefix}.{spec.gate}", 1, hidden_size)
    return SharedExpert(load_mlp(spec.mlp, reader, f"{prefix}.{spec.name}", hidden_size), gate)


def load_dense_and_experts(
    spec: DenseAndExpertsSpec, reader: WeightReader, layer: str, hidden_size: int, eps: float
) -> DenseAndExperts:
    """Load this rank's part of an MLP and of experts side by side; the ranks' outputs are summed. ``layer`` is the
    layer's name. Raises CheckpointError, as the reader does."""
    names = spec.after_dense, spec.before_experts, spec.after_experts
    after_dense, before_experts, after_experts = (reader.norm(f"{layer}.{name}", hidden_size, eps) for name in names)
    scale = reader.float32_vector(f"{layer}.{spec.router_scale}", hidden_size) * hidden_size**-0.5
    return DenseAndExperts(
        reader.all_reduced(load_mlp(spec.dense, reader, f"{layer}.mlp", hidden_size)),
        reader.all_reduced(load_mixture(spec.experts, reader, layer, hidden_size)),
        (after_dense, before_experts, after_experts),
        RMSNorm(scale, eps),
    )
