"""Routers and mixtures of experts against the modules of transformers, on random weights."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.support.forward import assert_close
from tests.support.tiny import split_experts
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError, ConfigError
from triptych.layers import native, pointwise
from triptych.layers.compiled_layer import RunExperts
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS, PlainFormat, PlainLinear, WeightFormat
from triptych.layers.mixture import ExpertRouter, MixtureOfExperts, load_mixture
from triptych.layers.mlp import GatedMLP
from triptych.layers.parallel import SINGLE_RANK, Group, SingleRank
from triptych.layers.routing import route
from triptych.layers.specs import (
    ClampedSwiGLU,
    ExpertGroups,
    GatedMLPSpec,
    MoESpec,
    RoutingSpec,
    Score,
    SharedExpertSpec,
)
from triptych.layers.weights import DecoderKeys, WeightReader

CPU = torch.device("cpu")
FP32 = WEIGHT_FORMATS["float32"]
HIDDEN, WIDTH, EXPERTS, TOKENS = 72, 40, 12, 31
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 3}
DEEPSEEK = SIZES | {"n_routed_experts": EXPERTS, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
CORRECTION = "gate.e_score_correction_bias"
SHARED = SharedExpertSpec("shared_experts", GatedMLPSpec(2 * WIDTH))


@dataclass(frozen=True)
class Case:
    """A module of transformers, and what it is to us."""

    module: Callable[[Any], nn.Module]
    config: Any
    spec: MoESpec
    router: str = "gate"
    """Name of the module's router."""


CASES = {
    "qwen2_moe": Case(
        Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig(**SIZES, num_experts=EXPERTS, shared_expert_intermediate_size=56, norm_topk_prob=False),
        MoESpec(
            *(EXPERTS, WIDTH, RoutingSpec(3, normalised=False)),
            shared=SharedExpertSpec("shared_expert", GatedMLPSpec(56), gate="shared_expert_gate"),
        ),
    ),
    "qwen3_moe": Case(
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=True),
        MoESpec(EXPERTS, WIDTH, RoutingSpec(3)),
    ),
    "deepseek_v2": Case(
        DeepseekV2Moe,
        DeepseekV2Config(
            **DEEPSEEK, num_attention_heads=8, topk_method="group_limited_greedy", n_group=4, topk_group=2
        ),
        MoESpec(
            *(EXPERTS, WIDTH),
            RoutingSpec(3, normalised=False, scale=1.7, groups=ExpertGroups(4, kept=2, ranked_by=1)),
            shared=SHARED,
        ),
    ),
    "deepseek_v3": Case(
        DeepseekV3MoE,
        DeepseekV3Config(**DEEPSEEK, n_group=4, topk_group=2),
        MoESpec(
            *(EXPERTS, WIDTH),
            RoutingSpec(3, Score.SIGMOID, scale=1.7, groups=ExpertGroups(4, kept=2, ranked_by=2)),
            correction=CORRECTION,
            shared=SHARED,
        ),
    ),
    "glm4_moe": Case(
        Glm4MoeMoE,
        Glm4MoeConfig(**DEEPSEEK, norm_topk_prob=False),
        MoESpec(
            *(EXPERTS, WIDTH, RoutingSpec(3, Score.SIGMOID, normalised=False, scale=1.7)),
            correction=CORRECTION,
            shared=SHARED,
        ),
    ),
    "gpt_oss": Case(
        GptOssMLP,
        GptOssConfig(
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_local_experts=EXPERTS,
            num_experts_per_tok=3,
            swiglu_limit=1.5,
        ),
        MoESpec(
            *(EXPERTS, WIDTH, RoutingSpec(3)),
            router="router",
            has_biases=True,
            activation=ClampedSwiGLU(1.5, 1.702),
            alternating=True,
        ),
        router="router",
    ),
    "llama4": Case(
        Llama4TextMoe,
        Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2),
        MoESpec(
            *(EXPERTS, WIDTH, RoutingSpec(2, Score.SIGMOID, normalised=False)),
            router="router",
            shared=SharedExpertSpec("shared_expert", GatedMLPSpec(WIDTH)),
            weighs_inputs=True,
        ),
        router="router",
    ),
}


def random_module(case: Case, gain: float = 1.0) -> nn.Module:
    """The module with random weights: biases and corrections too."""
    torch.manual_seed(3)
    case.config._experts_implementation = "eager"
    module = case.module(case.config).eval().requires_grad_(False)
    for weight in (*module.parameters(), *module.buffers()):
        weight.normal_(std=gain / HIDDEN**0.5)
    return module


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's tensors: experts are stacked."""
    return {f"model.mlp.{name}": tensor for name, tensor in module.state_dict().items()}


def layouts_of(name: str, module: nn.Module) -> list[dict[str, Tensor]]:
    """A checkpoint's tensors in each layout that there is of a model."""
    stacked = tensors_of(module)
    return [stacked] if name in {"gpt_oss", "llama4"} else [stacked, split_experts(stacked)]


def random_tokens() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))


class Rank(SingleRank):
    """One of several ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def loaded(
    folder: Path, spec: MoESpec, tensors: dict[str, Tensor], weights: WeightFormat = FP32, group: Group = SINGLE_RANK
) -> MixtureOfExperts:
    """The mixture that a checkpoint of these tensors holds; none may be left over."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    reader = WeightReader(Checkpoint(folder), DecoderKeys("model.", "head"), weights, CPU, group)
    with torch.inference_mode():
        mixture = load_mixture(spec, reader, "mlp", HIDDEN)
    reader.finish()
    return mixture


@torch.inference_mode()
def outputs_of(module: nn.Module, tokens: Tensor) -> Tensor:
    output = module(tokens[None])
    return (output[0] if isinstance(output, tuple) else output).view(tokens.shape)


@pytest.mark.parametrize("name", CASES)
def test_mixtures_equal_transformers(tmp_path: Path, name: str) -> None:
    case, tokens = CASES[name], random_tokens()
    module = random_module(case)
    expected = outputs_of(module, tokens)
    for tensors in layouts_of(name, module):
        mixture = loaded(tmp_path, case.spec, tensors)
        with torch.inference_mode():
            assert_close(mixture(tokens), expected, 1e-5)
            assert_close(torch.cat([mixture(token[None]) for token in tokens]), expected, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_same_experts_are_chosen(name: str) -> None:
    case, tokens = CASES[name], torch.cat([random_tokens() * scale for scale in (1, 30)])
    module = random_module(case)
    router: Any = getattr(module, case.router)
    correction = getattr(router, "e_score_correction_bias", None)
    logits = router(tokens)[1 if name == "llama4" else 0]
    chosen, weights = route(case.spec.routing, logits.float(), correction)
    if name == "llama4":  # whose router yields a weight per expert, mostly zeros
        expected_weights, expected = router(tokens)[0].topk(2)
    else:
        _, expected_weights, expected = router(tokens)
    assert len({frozenset(row) for row in chosen.tolist()}) > 20
    assert sorted_by_expert(chosen, weights)[0].equal(sorted_by_expert(expected, expected_weights)[0])
    assert_close(sorted_by_expert(chosen, weights)[1], sorted_by_expert(expected, expected_weights)[1], 1e-6)


def sorted_by_expert(chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    found, order = chosen.sort(dim=-1)
    return found, weights.gather(-1, order)


def test_scores_that_saturate_still_have_an_order() -> None:
    chosen, weights = route(RoutingSpec(1, Score.SIGMOID, normalised=False), torch.tensor([[20.0, 40.0, 30.0]]))
    assert (chosen.item(), weights.item()) == (1, 1.0)


def test_weights_of_scores_that_are_all_zero() -> None:
    _, weights = route(RoutingSpec(2, Score.SIGMOID), torch.full((1, 4), -200.0))
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_router_with_a_scale_per_expert_and_inputs_of_its_own() -> None:
    """As in Gemma 4, where routers see the residual stream, normalised and scaled."""
    config = Gemma4TextConfig(hidden_size=HIDDEN, num_experts=EXPERTS, top_k_experts=3)
    module = Gemma4TextRouter(config).requires_grad_(False)
    for weight in module.parameters():
        weight.normal_()
    tokens = 5 * random_tokens()
    linear = PlainLinear(module.proj.weight * module.scale * HIDDEN**-0.5, None)
    router = ExpertRouter(RoutingSpec(3), linear, expert_scales=module.per_expert_scale)
    _, expected_weights, expected = module(tokens)
    chosen, weights = router(module.norm(tokens))
    assert chosen.equal(expected)
    assert_close(weights, expected_weights, 1e-6)
    pairs = [(torch.randn(2 * WIDTH, HIDDEN) / 9, torch.randn(HIDDEN, WIDTH) / 6) for _ in range(EXPERTS)]
    experts = [GatedMLP(FP32.linear(up, None, CPU), FP32.linear(down, None, CPU)) for up, down in pairs]
    mixture = MixtureOfExperts(router, experts)
    assert mixture(tokens, routed_by=module.norm(tokens)).equal(mixture.run_experts(tokens, chosen, weights))


@pytest.mark.parametrize("weights", ["float16", "float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "llama4", "gpt_oss"])
def test_one_call_equals_expert_by_expert(
    tmp_path: Path, name: str, weights: str, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, except for an activation that only the call has a kernel for."""
    library = pointwise.declared(kernels)
    monkeypatch.setattr(native, "library", lambda: kernels)
    monkeypatch.setattr(pointwise, "compiled_kernels", lambda: library)
    case, tokens = CASES[name], random_tokens()
    mixture = loaded(
        tmp_path, case.spec, tensors_of(random_module(case)), (WEIGHT_FORMATS | QUANTIZED_FORMATS)[weights]
    )
    tolerance = 1e-4 if name == "gpt_oss" else 0
    with torch.inference_mode():
        routed = mixture.router(tokens)
        assert isinstance(mixture.run_experts, RunExperts)
        together = mixture.run_experts(tokens, *routed)
        assert_close(together, mixture.one_by_one(tokens, *routed), tolerance)
        one = slice(5, 6)
        assert mixture.run_experts(tokens[one], *(part[one] for part in routed)).equal(together[one])
        torch.set_num_threads(3 if weights == "float16" else 1)
        assert mixture.run_experts(tokens, *routed).equal(together)


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "gpt_oss"])
def test_ranks_add_up_to_the_whole(tmp_path: Path, name: str) -> None:
    case, tokens = CASES[name], random_tokens()
    for layout in layouts_of(name, random_module(case)):
        whole = loaded(tmp_path, case.spec, layout)
        parts = [loaded(tmp_path, case.spec, layout, group=Rank(rank, 4)) for rank in range(4)]
        with torch.inference_mode():
            assert_close(sum((part(tokens) for part in parts), torch.zeros(())), whole(tokens), 1e-5)
    with pytest.raises(ConfigError, match="intermediate values of an expert, of which there are 40"):
        case.spec.shard(16)
    if case.spec.shared is not None:
        wide = replace(case.spec, shared=replace(case.spec.shared, mlp=GatedMLPSpec(42)))
        with pytest.raises(ConfigError, match="intermediate values, of which there are 42"):
            wide.shard(4)


@pytest.mark.parametrize(
    ("weights", "tolerance"),
    [
        (PlainFormat(torch.bfloat16), 0.03),
        (WEIGHT_FORMATS["bfloat16"], 0.02),
        (WEIGHT_FORMATS["float16"], 0.002),
        (QUANTIZED_FORMATS["int8"], 0.03),
        (QUANTIZED_FORMATS["int4"], 0.2),
    ],
    ids=["plain bfloat16", "bfloat16", "float16", "int8", "int4"],
)
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_other_weight_formats(tmp_path: Path, name: str, weights: WeightFormat, tolerance: float) -> None:
    """The experts that are chosen stay the same, since routers compute in float32."""
    case, tokens = CASES[name], random_tokens().to(weights.activations)
    tensors = tensors_of(random_module(case))
    exact, mixture = loaded(tmp_path, case.spec, tensors), loaded(tmp_path, case.spec, tensors, weights)
    with torch.inference_mode():
        assert mixture.router(tokens)[0].equal(exact.router(tokens)[0])
        expected = exact(tokens.float())
        error = (mixture(tokens).float() - expected).norm() / expected.norm()
    assert 0 < error < tolerance


def test_no_tokens_and_tokens_that_are_not_numbers(tmp_path: Path) -> None:
    """A token with a NaN doesn't affect others."""
    case, tokens = CASES["deepseek_v3"], random_tokens()
    mixture = loaded(tmp_path, case.spec, tensors_of(random_module(case)))
    bad = tokens.clone()
    bad[3] = torch.nan
    with torch.inference_mode():
        assert mixture(tokens[:0]).shape == (0, HIDDEN)
        expected, found = mixture(tokens), mixture(bad)
    assert found[3].isnan().all()
    others = [index for index in range(TOKENS) if index != 3]
    assert found[others].equal(expected[others])


@pytest.mark.parametrize(
    "missing", ["gate.e_score_correction_bias", "shared_experts.up_proj.weight", "experts.down_proj"]
)
def test_missing_tensors_are_named(tmp_path: Path, missing: str) -> None:
    case = CASES["glm4_moe"]
    tensors = tensors_of(random_module(case))
    del tensors[f"model.mlp.{missing}"]
    with pytest.raises(CheckpointError, match=f"model.mlp.{missing}' is missing"):
        loaded(tmp_path, case.spec, tensors)
