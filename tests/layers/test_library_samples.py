"""Layers that the formats' own libraries have quantized (``scripts/quantized_samples.py``): their weights are what the
libraries take them for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import PlainFormat
from triptych.layers.stored.reader import StoredReader

FILE = Path(__file__).parents[1] / "support" / "quantized_samples.safetensors"
with safe_open(FILE, framework="pt") as file:
    SECTIONS: dict[str, dict[str, Any]] = json.loads(file.metadata()["sections"])
ROUNDING = {"NVFP4A16": 2**-8, "MXFP4A16": 2**-8, "ModelOpt NVFP4": 2**-8, "LLM.int8": 2**-10, "AutoAWQ gemm": 2**-10}
"""By how much the values of some libraries are rounded, relative to the value: those of bfloat16 or float16."""


def weight_of(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Our weight of a sample, and its library's."""
    tensors = load_file(FILE)
    value = tensors[f"{name}:value"]
    stored = {
        f"layer.{key.removeprefix(f'{name}.')}": one for key, one in tensors.items() if key.startswith(f"{name}.")
    }
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SECTIONS[name]}))
    reader = StoredReader(Checkpoint(folder), str, PlainFormat(torch.float32), torch.device("cpu"))
    outputs, inputs = value.shape
    ours = reader.stored("layer", outputs, inputs).dequantized()
    reader.check_all_read(stored, "sample")
    return ours, value


@pytest.mark.parametrize("name", SECTIONS)
def test_weights_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    ours, theirs = weight_of(tmp_path, name)
    assert theirs.abs().max() > 0.1
    assert ((ours - theirs).abs() <= ROUNDING.get(name, 1e-6) * theirs.abs() + 1e-7).all()
