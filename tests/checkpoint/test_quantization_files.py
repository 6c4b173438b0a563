"""Files beside ``config.json`` that describe quantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.checkpoint.config_files import load_config, quantization_section
from triptych.checkpoint.identity import model_identity
from triptych.errors import CheckpointError
from triptych.layers.stored.registry import described_formats

MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.33"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def described(folder: Path) -> str | None:
    found = described_formats(quantization_section(load_config(folder)))
    return None if found is None else found.described


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("hf_quant_config.json", MODELOPT, "modelopt NVFP4, 4-bit floating point in groups of 16"),
        ("quantize_config.json", GPTQ, "GPTQ version 1, 4 bits in groups of 128"),
        ("quant_config.json", AWQ, "AWQ gemm, 4 bits in groups of 128"),
    ],
)
def test_they_count_where_the_config_says_nothing(
    tmp_path: Path, name: str, content: dict[str, Any], words: str
) -> None:
    write(tmp_path, "config.json", {"model_type": "qwen3"})
    assert described(tmp_path) is None
    write(tmp_path, name, content)
    assert described(tmp_path) == words
    write(tmp_path, "config.json", {"quantization_config": {"quant_method": "fp8"}})
    assert (described(tmp_path) or "").startswith("fp8")
    (tmp_path / name).write_text("[")
    assert (described(tmp_path) or "").startswith("fp8")
    write(tmp_path, "config.json", {})
    with pytest.raises(CheckpointError, match=f"{name}: not valid JSON"):
        load_config(tmp_path)


def test_they_are_part_of_the_identity(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {})
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    digests = {model_identity(tmp_path, "text").config}
    for bits in (4, 8):
        write(tmp_path, "quantize_config.json", GPTQ | {"bits": bits})
        digests.add(model_identity(tmp_path, "text").config)
    assert len(digests) == 3
