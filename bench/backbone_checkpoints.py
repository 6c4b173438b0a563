"""Checkpoint folders of text backbones, about 0.5 billion random parameters each, for ``bench/backbones.py``.

Another backbone is another entry of ``BACKBONES``: the settings of its ``config.json`` that ``COMMON`` hasn't.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.make_checkpoint import copy_tokenizer
from tests.support.random_checkpoint import Sizes, token_ids, write_json, write_tokenizer, write_weights

COMMON = {
    "vocab_size": Sizes().vocabulary,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BACKBONES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 20,
        "head_dim": 64,
        "intermediate_size": 4096,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 20,
        "head_dim": 128,
        "intermediate_size": 3072,
        "rope_theta": 1_000_000.0,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 151_669,  # that of the tokenizer: llama.cpp's converter drops the rest of Gemma's embeddings
        "num_hidden_layers": 12,
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "intermediate_size": 6912,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 8,
        "hidden_size": 768,
        "head_dim": 64,
        "intermediate_size": 768,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""Shapes follow small published models, with layers or widths left out until there are about 0.5 billion parameters."""

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
"""Overrides that make any of them tiny, to try the benchmark."""


def config_of(name: str, *, tiny: bool = False, **changes: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a backbone."""
    ids = token_ids(Sizes().vocabulary)
    special = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    return COMMON | special | BACKBONES[name] | (TINY if tiny else {}) | {"dtype": "bfloat16"} | changes


def make(folder: Path, config: dict[str, Any], tokenizer: Path | None, seed: int = 0) -> None:
    """Write a checkpoint folder in bfloat16, with a published Qwen tokenizer or one that is made up."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    end = [config["eos_token_id"], config["bos_token_id"]]
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": end[1]})
    write_tokenizer(folder, config["vocab_size"])
    if tokenizer:
        copy_tokenizer(tokenizer, folder)
    write_weights(folder, config, seed, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=BACKBONES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a folder with a published Qwen tokenizer; default: made up")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.folder, config_of(options.name), options.tokenizer, options.seed)


if __name__ == "__main__":
    main()
