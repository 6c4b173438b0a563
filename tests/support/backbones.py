"""Tiny text-only checkpoints of the backbones that no family with towers has, with every oddity switched on."""

from dataclasses import replace
from typing import Any

from tests.support.random_checkpoint import token_ids
from tests.support.tiny import Tiny

VOCABULARY = 264
IDS = token_ids(VOCABULARY)


def _tiny(architecture: str, model_type: str, **settings: Any) -> Tiny:
    """No size is a power of two."""
    shared = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 104,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|im_end|>"],
        "pad_token_id": IDS["<|endoftext|>"],
        "tie_word_embeddings": False,
    }
    return Tiny(shared | settings, split_experts=model_type not in {"gpt_oss", "llama4_text", "gemma4_text"})


def _nested(text: Tiny, architecture: str, model_type: str) -> Tiny:
    """The same as the only part of a model that has towers in other sizes."""
    whole = {"architectures": [architecture], "model_type": model_type, "vision_config": None, "audio_config": None}
    ties = {"tie_word_embeddings": text.config["tie_word_embeddings"]}
    return replace(text, config=whole | ties | {"text_config": text.config})


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 64
}
MSCALES = {"mscale": 0.8, "mscale_all_dim": 1.2}
LATENTS = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "num_hidden_layers": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 18,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
EXPERTS = {
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
GEMMA4 = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16, "final_logit_softcapping": 30.0}
GEMMA4_LAST = ["sliding_attention", "full_attention"]

DELTA_NETS = {
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,
}
"""A head's output may be near zero, and its norm then enlarges rounding: epsilon bounds by how much."""
SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_interleaved": True, "mrope_section": [1, 1, 1]}

BACKBONES: dict[str, Tiny] = {
    "llama": _tiny("Llama", "llama", rope_theta=5e5, rope_scaling=LLAMA3, attention_bias=True, mlp_bias=True),
    "llama-gelu": _tiny(
        "Llama",
        "llama",
        hidden_act="gelu_pytorch_tanh",
        head_dim=20,
        tie_word_embeddings=True,
        rope_scaling={"type": "linear", "factor": 2.0},
    ),
    "smollm3": _tiny("SmolLM3", "smollm3", num_hidden_layers=4, no_rope_layer_interval=3, tie_word_embeddings=True),
    "llama4": _tiny(
        "Llama4",
        "llama4_text",
        num_hidden_layers=4,
        head_dim=20,
        intermediate_size=40,
        intermediate_size_mlp=104,
        num_local_experts=5,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=3,
        attention_chunk_size=12,
        floor_scale=8,
        attn_scale=0.4,
        rope_theta=5e5,
        rope_scaling=LLAMA3 | {"high_freq_factor": 1.0},
    ),
    "llama4-maverick": _tiny(
        "Llama4",
        "llama4_text",
        num_hidden_layers=4,
        head_dim=20,
        intermediate_size=40,
        intermediate_size_mlp=104,
        num_local_experts=5,
        num_experts_per_tok=2,
        moe_layers=[0, 3],
        no_rope_layers=[1, 0, 1, 1],
        attention_chunk_size=16,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
    ),
    "mistral": _tiny("Mistral", "mistral", sliding_window=16, num_key_value_heads=3),
    "ministral": _tiny(
        "Ministral",
        "ministral",
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral3": _tiny(
        "Ministral3",
        "ministral3",
        head_dim=16,
        sliding_window=None,
        rope_parameters=YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.3},
    ),
    "phi3": _tiny(
        "Phi3",
        "phi3",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=160,  # some prompts are longer; others are shorter with their answers
        rope_scaling={"type": "longrope", "short_factor": [1.1, 1.3, 1.7, 2.0, 2.5, 3.0], "long_factor": [9.0] * 6},
    ),
    "qwen2_moe": _tiny(
        "Qwen2Moe",
        "qwen2_moe",
        num_hidden_layers=6,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=4,
    ),
    "gemma2": _tiny(
        "Gemma2",
        "gemma2",
        head_dim=20,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=16,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=30.0,
    ),
    "gemma3": _tiny(
        "Gemma3",
        "gemma3_text",
        num_hidden_layers=4,
        head_dim=24,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=20,
        sliding_window=16,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attention_bias=True,
    ),
    "gemma4-e": _tiny(
        "Gemma4",
        "gemma4_text",
        num_hidden_layers=8,
        head_dim=20,
        global_head_dim=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + GEMMA4_LAST,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCABULARY + 3,
        **GEMMA4,
    ),
    "gemma4-31b": _nested(
        _tiny(
            "Gemma4",
            "gemma4_text",
            num_hidden_layers=4,
            head_dim=24,
            global_head_dim=40,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            attention_bias=True,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=0,
            use_bidirectional_attention="vision",
            **GEMMA4,
        ),
        "Gemma4ForConditionalGeneration",
        "gemma4",
    ),
    "gemma4-moe": _tiny(
        "Gemma4",
        "gemma4_text",
        num_hidden_layers=4,
        head_dim=24,
        global_head_dim=40,
        attention_k_eq_v=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=3,
        moe_intermediate_size=40,
        **GEMMA4,
    ),
    "gpt_oss": _tiny(
        "GptOss",
        "gpt_oss",
        num_hidden_layers=4,
        head_dim=20,
        num_local_experts=7,
        num_experts_per_tok=3,
        swiglu_limit=0.8,
        sliding_window=16,
        rope_theta=150_000.0,
        rope_scaling=YARN | {"truncate": False},
    ),
    "qwen3_next": _tiny(
        "Qwen3Next",
        "qwen3_next",
        **DELTA_NETS | {"linear_num_key_heads": 2},
        num_hidden_layers=6,
        full_attention_interval=3,
        attention_bias=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
        **SHARED_EXPERT,
    ),
    "qwen3_5": _tiny(
        "Qwen3_5",
        "qwen3_5_text",
        **DELTA_NETS,
        num_hidden_layers=5,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
        rope_parameters=MROPE,
    ),
    "qwen3_5_moe": _tiny(
        "Qwen3_5Moe",
        "qwen3_5_moe_text",
        **DELTA_NETS,
        num_hidden_layers=4,
        rope_parameters=MROPE,
        **SHARED_EXPERT,
    ),
    "glm": _tiny("Glm", "glm", head_dim=24, tie_word_embeddings=True),
    "glm4": _tiny("Glm4", "glm4", head_dim=24, attention_bias=False),
    "glm4_moe": _tiny(
        "Glm4Moe",
        "glm4_moe",
        attention_bias=True,
        use_qk_norm=True,
        head_dim=24,
        first_k_dense_replace=1,
        **EXPERTS,
    ),
    "deepseek_v2": _tiny(
        "DeepseekV2",
        "deepseek_v2",
        q_lora_rank=28,
        rope_theta=1e4,
        rope_scaling=YARN | MSCALES,
        first_k_dense_replace=1,
        attention_bias=True,
        topk_method="group_limited_greedy",
        **LATENTS | EXPERTS | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "num_nextn_predict_layers": 0},
    ),
    "deepseek_v2-lite": _tiny(
        "DeepseekV2",
        "deepseek_v2",
        q_lora_rank=None,
        first_k_dense_replace=1,
        topk_method="greedy",
        **LATENTS | EXPERTS | {"norm_topk_prob": False, "num_nextn_predict_layers": 0},
    ),
    "deepseek_v3": _tiny(
        "DeepseekV3",
        "deepseek_v3",
        q_lora_rank=28,
        rope_theta=1e4,
        rope_scaling=YARN | MSCALES,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        **LATENTS | EXPERTS | {"n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3-moonlight": _tiny(
        "DeepseekV3",
        "deepseek_v3",
        q_lora_rank=None,
        rope_interleave=False,
        first_k_dense_replace=2,
        attention_bias=True,
        **LATENTS | EXPERTS,
    ),
    "glm4_moe-air": _tiny(
        "Glm4Moe",
        "glm4_moe",
        attention_bias=False,
        head_dim=24,
        first_k_dense_replace=0,
        partial_rotary_factor=0.25,
        **EXPERTS | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
}

MORE_BACKBONES: dict[str, Tiny] = BACKBONES | {
    "qwen2": _tiny("Qwen2", "qwen2", rope_theta=1e6),
    "qwen3": _tiny("Qwen3", "qwen3", head_dim=20),
    "qwen3_moe": _tiny(
        "Qwen3Moe",
        "qwen3_moe",
        head_dim=20,
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        mlp_only_layers=[2],
        norm_topk_prob=True,
    ),
    "phi3-windows": replace(
        BACKBONES["phi3"], config=BACKBONES["phi3"].config | {"sliding_window": 40, "rope_scaling": None}
    ),
}
"""Those of the slow suite: also Qwen's, which families with towers have, and Phi-3 as its first version has it."""
