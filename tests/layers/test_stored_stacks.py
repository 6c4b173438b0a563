"""Experts that are quantized and stand in one tensor for all: as gpt-oss, transformers and ModelOpt store them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import Pool, Prompt, Running, assert_close, step
from tests.support.four_bit_floats import mxfp4_blocks, nvfp4
from tests.support.quantized import Encode, StackLayout, quantized_pair
from tests.support.stored_formats import fp8
from tests.support.tiny import make_tiny
from triptych.checkpoint.outline import META, StoredOutline
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.linear import PlainFormat
from triptych.layers.stored.reader import StoredReader

CPU = torch.device("cpu")
FP32 = PlainFormat(torch.float32)
SCALES = {"weight": "", "weight_scale_inv": "_scale_inv"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
BLOCKS = StackLayout(is_transposed=True, stores_transposed=False, ends={"blocks": "_blocks", "scales": "_scales"})
STACKS: dict[str, tuple[str, dict[str, Any], Encode, StackLayout]] = {
    "gpt-oss": ("gpt_oss", MXFP4, mxfp4_blocks, BLOCKS),
    "fp8, blocks": (
        "qwen3_moe",
        {"quant_method": "fp8", "weight_block_size": [16, 24]},
        fp8((16, 24), "weight_scale_inv"),
        StackLayout(is_transposed=False, stores_transposed=False, ends=SCALES),
    ),
    "fp8, tensors": (
        "qwen3_moe",
        {"quant_method": "fp8"},
        fp8(None, "weight_scale_inv", activation_scale=torch.tensor(0.5)),
        StackLayout(
            is_transposed=False, stores_transposed=False, ends=SCALES | {"activation_scale": "_activation_scale"}
        ),
    ),
    "fbgemm_fp8": (
        "llama4",
        {"quant_method": "fbgemm_fp8"},
        fp8(None, "weight_scale", per_output=True),
        StackLayout(is_transposed=True, stores_transposed=True, ends={"weight": "", "weight_scale": "_scale"}),
    ),
    "modelopt": (
        "gpt_oss",
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        nvfp4(modelopt=True),
        StackLayout(
            is_transposed=True,
            stores_transposed=False,
            ends={
                "weight": "",
                **{kind: f"_{kind}" for kind in ("weight_scale", "weight_scale_2", "input_scale")},
            },
        ),
    ),
}


def pair(tmp_path: Path, name: str) -> tuple[Path, Path]:
    family, section, encode, layout = STACKS[name]
    settings = {"intermediate_size": 160} if family == "gpt_oss" else {}
    source = make_tiny(tmp_path / "source", BACKBONES.get(family, family), "stacked", config=settings)
    return quantized_pair(source, tmp_path, section, encode, layout)


def logits(folder: Path) -> Tensor:
    decoder = load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU)
    width = decoder.embedding.shape[1]
    positions = torch.arange(30.0).double().expand(3, -1)
    prompt = Prompt(torch.arange(3, 33), positions, torch.arange(0), torch.zeros(0, width))
    return step(Pool(decoder), [(Running(prompt), 30)])


@pytest.mark.parametrize("name", STACKS)
def test_logits_equal_those_of_the_dequantized_model_in_transformers(tmp_path: Path, name: str) -> None:
    stored, dense = pair(tmp_path, name)
    tensors = Checkpoint(stored).tensors
    assert any(".experts.gate_up_proj_" in key and not key.endswith("bias") for key in tensors)
    with torch.inference_mode():
        expected = load_reference(dense)(input_ids=torch.arange(3, 33)[None]).logits[0]
    assert_close(logits(stored), expected, 1e-4 * expected.abs().max().item())
    assert len(set(expected.argmax(-1).tolist())) > 5
    outline = StoredOutline(stored)
    load_adapter(stored).load_decoder(outline, FP32, META)
    assert outline.names_read == set(tensors)


@pytest.mark.parametrize(
    ("name", "kind", "tensor", "words"),
    [
        ("gpt-oss", "_scales", torch.full((7, 320, 3), 255, dtype=torch.uint8), "scales has values that aren't finite"),
        ("gpt-oss", "_scales", torch.zeros(7, 320, 4, dtype=torch.uint8), r"_scales' has shape \[7, 320, 4\]"),
        ("gpt-oss", "_blocks", torch.zeros(6, 320, 3, 16, dtype=torch.uint8), r"_blocks' has shape \[6, 320, 3, 16\]"),
        ("gpt-oss", "_scales", None, "_scales' is missing"),
        ("gpt-oss", "_blocks", None, "gate_up_proj' is missing"),
        ("fp8, blocks", "_scale_inv", torch.ones(3), r"_scale_inv' has shape \[3\]"),
        ("modelopt", "_weight_scale_2", torch.full((7,), torch.inf), "weight_scale_2 has values that aren't finite"),
    ],
)
def test_damaged_stacks_are_refused_by_name(
    tmp_path: Path, name: str, kind: str, tensor: Tensor | None, words: str
) -> None:
    stored, _ = pair(tmp_path, name)
    weights = load_file(stored / "model.safetensors")
    key = next(one for one in weights if one.endswith(f"layers.1.mlp.experts.gate_up_proj{kind}"))
    weights.pop(key)
    save_file(weights | ({} if tensor is None else {key: tensor}), stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as error:
        logits(stored)
    assert "layers.1.mlp.experts.gate_up_proj" in str(error.value)


def test_blocks_are_what_transformers_takes_them_for(tmp_path: Path) -> None:
    make = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), dtype=torch.uint8, generator=make)
    scales = torch.randint(90, 160, (2, 12, 3), dtype=torch.uint8, generator=make)
    save_file({"down_proj_blocks": blocks, "down_proj_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": MXFP4}))
    reader = StoredReader(Checkpoint(tmp_path), str, FP32, CPU)
    ours = torch.stack([one.dequantized() for one in reader.stack("down_proj", (2, 12, 96), transposed=False)])
    theirs = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(ours.transpose(1, 2), theirs)
