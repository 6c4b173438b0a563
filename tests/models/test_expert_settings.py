"""Settings of mixtures of experts, as published and as transformers saves them, and those that can't be served."""

from typing import Any

import pytest
from transformers import DeepseekV3Config, Glm4MoeConfig

from triptych.errors import CheckpointError
from triptych.layers.specs import ExpertGroups, GatedMLPSpec, MoESpec, RoutingSpec, Score, SharedExpertSpec
from triptych.models.backbones.experts import deepseek_ffns, next_token_layers, qwen_experts, qwen_ffns, sigmoid_routing

QWEN: dict[str, Any] = {
    "num_hidden_layers": 5,
    "intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 32,
}


def deepseek(**settings: Any) -> list[Any]:
    return deepseek_ffns(settings, sigmoid_routing(settings, groups=8, kept_groups=4, scale=2.5), shared=1, dense=3)


def test_qwen_says_which_layers_are_dense() -> None:
    experts = qwen_experts(QWEN, norm_topk_prob=False)
    assert experts == MoESpec(8, 48, RoutingSpec(2, normalised=False))
    saved = {"num_local_experts" if name == "num_experts" else name: value for name, value in QWEN.items()}
    assert qwen_experts(saved | {"norm_topk_prob": True}, norm_topk_prob=False) == MoESpec(8, 48, RoutingSpec(2))
    ffns = qwen_ffns(QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, experts)
    assert [ffn is experts for ffn in ffns] == [False, True, False, False, False]
    assert ffns[0] == GatedMLPSpec(96)


def test_deepseek_v3_as_published_and_as_saved() -> None:
    expected = MoESpec(
        *(32, 48),
        RoutingSpec(8, Score.SIGMOID, scale=2.5, groups=ExpertGroups(8, kept=4, ranked_by=2)),
        correction="gate.e_score_correction_bias",
        shared=SharedExpertSpec("shared_experts", GatedMLPSpec(48)),
    )
    saved = DeepseekV3Config(**SIZES | {"first_k_dense_replace": 1}).to_dict()
    published = SIZES | {"first_k_dense_replace": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
    for text in (saved, published):
        assert deepseek(**text) == [GatedMLPSpec(96), expected, expected]
        assert next_token_layers(text) == ("layers.3.",)
    assert deepseek(**published | {"first_k_dense_replace": 0}) == [expected] * 3


def test_glm_has_one_group() -> None:
    text = Glm4MoeConfig(**SIZES | {"num_experts_per_tok": 4, "n_shared_experts": 2}).to_dict()
    routing = sigmoid_routing(text, groups=1, kept_groups=1, scale=1.0)
    dense, *mixtures = deepseek_ffns(text, routing, shared=1, dense=1)
    assert dense == GatedMLPSpec(96)
    assert [ffn.routing for ffn in mixtures if isinstance(ffn, MoESpec)] == [RoutingSpec(4, Score.SIGMOID)] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": None}, "n_routed_experts must be a positive integer"),
        ({"n_routed_experts": 30}, "30 experts can't be routed in ExpertGroups"),
        ({"n_group": 32}, "n_group or topk_group: 32 experts can't be routed in ExpertGroups"),
        ({"topk_group": 9}, "32 experts can't be routed in ExpertGroups"),
        (
            {"num_experts_per_tok": 17},
            "num_experts_per_tok or top_k_experts: 17 experts per token can't be chosen from 16",
        ),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a number of layers"),
        ({"routed_scaling_factor": "big"}, "routed_scaling_factor must be a number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be a bool"),
        ({"hidden_act": "relu"}, "'relu' is not served"),
    ],
)
def test_settings_that_cannot_be_served(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        deepseek(**SIZES | {"num_experts_per_tok": 8, "first_k_dense_replace": 1} | changes)
    with pytest.raises(CheckpointError, match="num_mtp_layers must be a number of layers"):
        next_token_layers(SIZES | {"num_mtp_layers": "all"})
