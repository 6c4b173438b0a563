"""A model from a GGUF file as a checkpoint folder, which Triptych loads.

    python -m bench.gguf_checkpoint SmolLM2-135M-Instruct.Q4_1.gguf /tmp/smollm2 [--off-grid]

Weights are what transformers reads from the file, rounded to float16. A base model has no chat template, and gets one
that is a conversation's texts after a beginning-of-text token: the model continues them. ``--off-grid`` adds noise to
linear layers of as much as 4 bits round: a worse model, whose weights are on no format's grid, so that no format looks
better than it is. Prints the largest difference
of a log probability from transformers' model with the same rounded weights, both in float32.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from bench.scoring import Excerpt, Scorer
from triptych.models.registry import backbone_of

LAYERS = "_proj.weight"
"""What the names of linear layers' weights end with."""
BLOCK = 32
"""Weights whose range is 15 steps of noise."""
TEXT = (
    "The Apache License, Version 2.0, says: you may reproduce and distribute copies of the work. The capital of France"
)
PLAIN_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def convert(gguf: Path, out: Path, *, is_off_grid: bool = False) -> None:
    """Write the checkpoint folder, with the file's tokenizer and its chat template, if it has one; with
    ``is_off_grid``, with noise. Raises CheckpointError for a model type that isn't served."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float16)
    backbone_of({"model_type": model.config.model_type})
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
    tokenizer.save_pretrained(out)
    # by hand: transformers doesn't save a model that was quantized
    config = model.config.to_diff_dict() | {"architectures": [type(model).__name__], "dtype": "float16"}
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if is_off_grid:
        generator = torch.Generator().manual_seed(0)
        tensors |= {name: noisy(one, generator) for name, one in tensors.items() if name.endswith(LAYERS)}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def noisy(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return a weight [out, in], of whole blocks of inputs, with uniform noise of one step of each block."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    steps = (blocks.amax(dim=2, keepdim=True) - blocks.amin(dim=2, keepdim=True)) / 15
    return (blocks + (torch.rand(blocks.shape, generator=generator) - 0.5) * steps).flatten(1).to(weight.dtype)


@torch.inference_mode()
def largest_difference(folder: Path) -> float:
    """Return how far our log probabilities are from transformers' at most, for a short text."""
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model(tokens[None]).logits[0].log_softmax(dim=1)
    ours = Scorer(folder, {"dtype": "float32"}).log_probabilities(Excerpt.of_text(tokens))
    return float((ours - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path, help="where to write the checkpoint folder")
    parser.add_argument("--off-grid", action="store_true", help="add noise of as much as 4 bits round")
    options = parser.parse_args()
    logging.disable_progress_bar()
    convert(options.gguf, options.out, is_off_grid=options.off_grid)
    print(f"largest difference from transformers' log probabilities: {largest_difference(options.out):.3g}")


if __name__ == "__main__":
    main()
