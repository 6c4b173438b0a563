"""The peak of memory while a decoder is loaded: what is loaded, and one module.

Besides, glibc keeps several freed modules for later use; here, it gives back what is freed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.stored_formats import FORMATS, Stored

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20
HIDDEN, WIDE, LAYERS = 1024, 3072, 12
MODULE = 2 * WIDE * HIDDEN * 4
"""Bytes of the largest module, gates and their factors, in float32."""
OTHER = 24 * MIB
"""Part of a module on its way, embeddings, norms and Python's objects."""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": WIDE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
SHAPES = {
    **{f"self_attn.{kind}_proj": (1024 if kind == "q" else 256, HIDDEN) for kind in "qkv"},
    "self_attn.o_proj": (HIDDEN, 1024),
    **{f"mlp.{kind}_proj": (WIDE, HIDDEN) for kind in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, WIDE),
}
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import PackedLinear, WEIGHT_FORMATS
from triptych.models.text.adapter import TextAdapter
from triptych.checkpoint.config_files import load_config

def status(name):
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024

folder = sys.argv[1]
adapter, checkpoint, device = TextAdapter(load_config(folder)), Checkpoint(folder), torch.device("cpu")
torch.zeros(8).sum()
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
before = status("VmRSS")
decoder = adapter.load_decoder(checkpoint, WEIGHT_FORMATS["float16"], device)
products = [module.product for module in decoder.modules() if isinstance(module, PackedLinear)]
packed = sum(product.panels.nbytes for product in products)
print(json.dumps({"peak": status("VmHWM") - before, "packed": packed}))
"""


def write_checkpoint(folder: Path, stored: Stored | None) -> Path:
    """Writes one layer's weights for all layers."""
    tensors: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        weight = torch.randn(shape) * 0.02
        found = None if stored is None else stored.encode(name, weight)
        encoded = {"weight": weight.bfloat16()} if found is None else found[0]
        for layer in range(LAYERS):
            tensors |= {f"model.layers.{layer}.{name}.{kind}": one.contiguous() for kind, one in encoded.items()}
    for layer in range(LAYERS):
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(size)
        for kind in "qk":
            tensors[f"model.layers.{layer}.self_attn.{kind}_norm.weight"] = torch.ones(64)
    tensors |= {"model.norm.weight": torch.ones(HIDDEN), "model.embed_tokens.weight": torch.randn(264, HIDDEN)}
    tensors["lm_head.weight"] = torch.randn(264, HIDDEN)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})
    section: dict[str, Any] = {} if stored is None else {"quantization_config": stored.section}
    (folder / "config.json").write_text(json.dumps(CONFIG | section))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of memory")
@pytest.mark.parametrize("name", [None, *FORMATS])
def test_the_peak_is_what_is_loaded_and_one_module(tmp_path: Path, name: str | None) -> None:
    folder = write_checkpoint(tmp_path, None if name is None else FORMATS[name])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        check=True,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)},
    )
    found = json.loads(run.stdout)
    assert found["packed"] > 60 * MIB
    assert found["peak"] - found["packed"] < MODULE + OTHER, found
