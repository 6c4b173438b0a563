"""A Llama model from a GGUF file as a checkpoint folder of model type ``qwen2``, which Triptych loads.

    python -m bench.gguf_checkpoint SmolLM2-135M-Instruct.Q4_1.gguf /tmp/smollm2

Qwen2 is Llama with biases of queries, keys and values, which are zeros here (``Qwen2Attention`` and ``LlamaAttention``
in transformers). Weights are what transformers reads from the file, rounded to float16. Prints the largest difference
of a logit from transformers' Llama with the same rounded weights, both in float32.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config
from transformers.utils import logging

from bench.scoring import Excerpt, Scorer

TEXT = (
    "The Apache License, Version 2.0, says: you may reproduce and distribute copies of the work. The capital of France"
)


def read_llama(gguf: Path) -> Any:
    """Return the model of a GGUF file in float32, its weights rounded to float16. Raises ValueError for a model that
    isn't Qwen2 with biases of zero."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    rope = config.rope_parameters.get("rope_type", "default")
    if not isinstance(config, LlamaConfig) or config.attention_bias or config.mlp_bias or rope != "default":
        raise ValueError(f"{gguf} is not a plain Llama model")
    for parameter in model.parameters():
        parameter.requires_grad_(False).copy_(parameter.half())
    return model.eval()


def as_qwen2(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the float16 tensors of the checkpoint."""
    llama = model.config
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    config = Qwen2Config(**{name: getattr(llama, name) for name in same}, dtype=torch.float16)
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    if llama.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for index in range(llama.num_hidden_layers):
        for part in ("q_proj", "k_proj", "v_proj"):
            name = f"model.layers.{index}.self_attn.{part}"
            tensors[f"{name}.bias"] = torch.zeros(len(tensors[f"{name}.weight"]), dtype=torch.float16)
    return {"architectures": ["Qwen2ForCausalLM"], **config.to_diff_dict()}, tensors


def convert(gguf: Path, out: Path) -> float:
    """Write the checkpoint folder, with the file's tokenizer and chat template, and return the largest difference."""
    model = read_llama(gguf)
    config, tensors = as_qwen2(model)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    tokens = torch.tensor(tokenizer(TEXT, add_special_tokens=False).input_ids)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0].log_softmax(dim=1)
    ours = Scorer(out, {"dtype": "float32"}).log_probabilities(Excerpt.of_text(tokens))
    return float((ours - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path, help="where to write the checkpoint folder")
    options = parser.parse_args()
    logging.disable_progress_bar()
    print(f"largest difference from transformers' log probabilities: {convert(options.gguf, options.out):.3g}")


if __name__ == "__main__":
    main()
