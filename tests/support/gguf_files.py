"""Writes tiny checkpoints as GGUF files, changed as llama.cpp's converter changes them."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support.backbones import IDS, VOCABULARY
from tests.support.tiny import Tiny
from triptych.checkpoint.gguf.architectures import ARCHITECTURES, tensor_name

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "rms_norm_eps": 2.0**-17,
    "rope_theta": 2.0**16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
}
"""Blocks of 32 divide each row."""
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 16, "hidden_activation": "gelu_pytorch_tanh"}
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 32.0}
COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_SIZES = ("moe_intermediate_size", "intermediate_size")
YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
"""What files call the settings of YaRN."""


def _tiny(architecture: str, model_type: str, **settings: Any) -> Tiny:
    own = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    return Tiny(SIZES | own | settings, split_experts=model_type not in ("gpt_oss", "llama4_text"))


SOURCES: dict[str, Tiny] = {
    "llama": _tiny("Llama", "llama", rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "smollm3": _tiny("SmolLM3", "smollm3", num_hidden_layers=5, tie_word_embeddings=True, pad_token_id=0),
    "qwen2": _tiny("Qwen2", "qwen2", tie_word_embeddings=True),
    "qwen2moe": _tiny("Qwen2Moe", "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=128, norm_topk_prob=False),
    "qwen3": _tiny("Qwen3", "qwen3"),
    "qwen3moe": _tiny("Qwen3Moe", "qwen3_moe", **EXPERTS, norm_topk_prob=True),
    "phi3": _tiny(
        "Phi3",
        "phi3",
        partial_rotary_factor=0.75,
        sliding_window=48,
        head_dim=16,
        pad_token_id=0,
        original_max_position_embeddings=2048,
        rope_scaling={"type": "longrope", "attention_factor": 1.0625}
        | {f"{name}_factor": [1 + number / at for number in range(6)] for name, at in (("short", 16), ("long", 2))},
    ),
    "glm4": _tiny("Glm4", "glm4", partial_rotary_factor=0.5, attention_bias=True, pad_token_id=0),
    "gpt-oss": _tiny(
        "GptOss",
        "gpt_oss",
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=16,
        intermediate_size=64,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
        | {"beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "llama4": _tiny(
        "Llama4",
        "llama4_text",
        num_local_experts=16,
        num_experts_per_tok=1,
        intermediate_size=64,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=2,
        num_hidden_layers=4,
    ),
    "deepseek2": _tiny(
        "DeepseekV3",
        "deepseek_v3",
        head_dim=16,
        num_key_value_heads=6,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "gemma2": _tiny("Gemma2", "gemma2", tie_word_embeddings=True, **GEMMA, **SOFTCAPS),
    "gemma3": _tiny(
        "Gemma3", "gemma3_text", tie_word_embeddings=True, sliding_window_pattern=6, rope_local_base_freq=1e4, **GEMMA
    ),
}
"""By the architecture that files name."""


def write_gguf(source: Path, path: Path, architecture: str, kind: GGMLQuantizationType) -> Path:
    """Writes a checkpoint's weights, those of two dimensions as ``kind``, to ``path``. Returns a copy of the checkpoint
    whose weights are the dequantized ones."""
    entry = ARCHITECTURES[architecture]
    config = json.loads((source / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    _write_settings(writer, architecture, config)
    _write_tokenizer(writer, source)
    stacks: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    dense = {}
    for key, weight in _separated(load_file(source / "model.safetensors"), architecture).items():
        is_quantized = weight.ndim == 2 and kind != GGMLQuantizationType.F32
        stored = quantize(weight, kind) if is_quantized else weight
        dense[key] = dequantize(stored, kind) if is_quantized else weight
        name, expert = tensor_name(key, entry)
        assert name is not None, key
        if name.endswith("norm.weight"):
            stored = stored + np.float32(entry.norm_offset)
        part = re.sub(r"blk\.\d+\.", "", name)
        if entry.rotated and part.startswith(("attn_q.", "attn_k.")):
            heads = config["num_attention_heads" if part.startswith("attn_q") else "num_key_value_heads"]
            stored = stored.reshape(heads, 2, -1, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
        raw = kind if is_quantized else GGMLQuantizationType.F32
        if part == "attn_kv_b.weight":
            for half, values in latents(stored, config).items():
                writer.add_tensor(name.replace("kv_b", half), values, raw_dtype=raw)
        elif expert is None:
            stored = stored[0] if part == "ffn_gate_inp_shexp.weight" and not is_quantized else stored
            writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=raw)
        else:
            stacks[name][expert] = stored
    for name, experts in stacks.items():
        stack = np.stack([experts[number] for number in sorted(experts)])
        writer.add_tensor(name, stack, raw_dtype=kind if name.endswith("weight") else GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    copy = source.with_name(f"{source.name}-dequantized")
    copy.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" or kind == GGMLQuantizationType.F32:
            (copy / file.name).write_bytes(file.read_bytes())
    if kind != GGMLQuantizationType.F32:
        save_file(dense, copy / "model.safetensors")
    return copy


def latents(weight: NDArray[Any], config: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The keys' matrices, transposed, and the values' of a projection of both, by head."""
    heads = weight.reshape(config["num_attention_heads"], -1, weight.shape[1])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], 1)
    return {"k_b": np.ascontiguousarray(keys.swapaxes(1, 2)), "v_b": np.ascontiguousarray(values)}


def _separated(weights: dict[str, NDArray[Any]], architecture: str) -> dict[str, NDArray[Any]]:
    """Each expert's matrices by themselves, where transformers has them in transposed stacks; gates and ups alternate
    in gpt-oss's."""
    found = {}
    for key, stack in weights.items():
        place, is_stack, kind = key.partition(".experts.")
        if kind.partition("_bias")[0] not in ("gate_up_proj", "down_proj"):
            found[key] = stack
            continue
        suffix = "bias" if kind.endswith("_bias") else "weight"
        for expert, matrix in enumerate(stack):
            rows, half = matrix.T, len(matrix.T) // 2
            parts = {"down_proj": rows}
            if kind.startswith("gate_up") and architecture == "gpt-oss":
                parts = {"gate_proj": rows[::2], "up_proj": rows[1::2]}
            elif kind.startswith("gate_up"):
                parts = {"gate_proj": rows[:half], "up_proj": rows[half:]}
            for name, part in parts.items():
                found[f"{place}{is_stack}{expert}.{name}.{suffix}"] = np.ascontiguousarray(part)
    return found


def _write_settings(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    counts = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size_mlp" if architecture == "llama4" else "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "expert_count": next((one for one in COUNTS_OF_EXPERTS if one in config), "num_experts"),
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": next(one for one in EXPERT_SIZES if one in config),
        "interleave_moe_layer_step": "interleave_moe_layer_step",
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    if architecture in ("phi3", "gpt-oss") or "sliding_window_pattern" in config or "attn_logit_softcapping" in config:
        counts["attention.sliding_window"] = "sliding_window"
    floats = {
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "expert_weights_scale": "routed_scaling_factor",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    if "v_head_dim" in config:
        length = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        writer.add_uint32(f"{architecture}.attention.key_length_mla", length)
        writer.add_uint32(f"{architecture}.expert_gating_func", 2)
        writer.add_bool(f"{architecture}.expert_weights_norm", config["norm_topk_prob"])
    if share := config.get("partial_rotary_factor"):
        writer.add_uint32(f"{architecture}.rope.dimension_count", int(share * config["head_dim"]))
    for name, ours in counts.items():
        if ours in config:
            writer.add_uint32(f"{architecture}.{name}", config[ours])
    config = config.get("rope_parameters", {}) | config
    for name, ours in floats.items():
        if ours in config:
            writer.add_float32(f"{architecture}.{name}", config[ours])
    _write_rope(writer, architecture, config)


def _write_rope(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if sections := scaling.get("mrope_section"):
        writer.add_array(f"{architecture}.rope.dimension_sections", [*sections, 0])
    elif scaling.get("rope_type") == "yarn":
        writer.add_string(f"{architecture}.rope.scaling.type", "yarn")
        length = scaling["original_max_position_embeddings"]
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", length)
        for name, ours in YARN.items():
            if ours in scaling:
                tenth = 0.1 if architecture == "deepseek2" and ours == "mscale_all_dim" else 1.0
                writer.add_float32(f"{architecture}.{name}", tenth * scaling[ours])
    elif scaling.get("type") == "longrope":
        length = config["original_max_position_embeddings"]
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", length)
        writer.add_float32(f"{architecture}.rope.scaling.attn_factor", scaling["attention_factor"])
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(scaling[f"{name}_factor"], np.float32))
    elif scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, scaling))
    elif scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling["rope_type"])
        writer.add_float32(f"{architecture}.rope.scaling.factor", scaling["factor"])


def llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> NDArray[np.float32]:
    """What the converter makes of the settings of Llama 3: a divisor of each frequency."""
    places = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    waves = 2 * np.pi * config["rope_theta"] ** places
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    factors: NDArray[np.float32] = (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)
    return factors


def _write_tokenizer(writer: GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    by_id = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    special = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    special.pop(unused := IDS["<|vision_pad|>"])
    by_id[unused] = "ab"  # of the only merge: a file must have one
    tokens = [(by_id | special)[number] for number in range(len(by_id | special))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(len(tokens))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(IDS["<|im_end|>"])
    writer.add_bos_token_id(IDS["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((source / "chat_template.jinja").read_text())
