"""Quantized checkpoints whose layers ranks divide, and those with LoRAs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.forward import layers_of
from tests.support.quantized import assert_same_weights, quantized_pair
from tests.support.stored_formats import FORMATS, packed
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.decoder import Decoder
from triptych.layers.decoder_config import LoraSpec
from triptych.layers.grouped_weight import GroupedWeight
from triptych.layers.linear import WEIGHT_FORMATS, PlainFormat
from triptych.layers.parallel import SINGLE_RANK, Group, SingleRank
from triptych.layers.token_choice import TokenChoice

CPU = torch.device("cpu")
FP32 = PlainFormat(torch.float32)
SIZES = {"num_attention_heads": 6, "head_dim": 64, "intermediate_size": 192}
"""Each of two ranks has whole groups of 32 inputs, and of 16."""


@dataclass
class Rank(SingleRank):
    """One of two, alone: enough to load a shard."""

    rank: int = 0
    size: int = 2


def load(folder: Path, group: Group = SINGLE_RANK) -> Decoder:
    return load_adapter(folder).load_decoder(Checkpoint(folder), FP32, CPU, group)


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_have_the_parts_of_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    one, source = FORMATS[name], make_tiny(tmp_path / "source", BACKBONES["llama"], config=SIZES)
    stored, dense = quantized_pair(source, tmp_path, one.section, one.encode)
    for rank in (0, 1):
        assert_same_weights(*(load(folder, Rank(rank)) for folder in (stored, dense)))


@pytest.mark.parametrize(("group", "part", "expected"), [(128, (64, 192), 64), (128, (96, 192), 32), (64, (0, 32), 32)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_parts_of_groups_are_smaller_groups(group: int, part: tuple[int, int], expected: int, symmetric: bool) -> None:
    weight = torch.randn(8, 192)
    tensors, value = packed(4, group, symmetric=symmetric)("layer", weight) or ({}, weight)
    zeros = None
    if not symmetric:
        zeros = tensors["weight_zero_point"].T.contiguous().view(torch.uint8)
        zeros = torch.stack((zeros & 15, zeros >> 4), 2).flatten(1).T
    whole = GroupedWeight(tensors["weight_packed"], tensors["weight_scale"].half(), zeros, 192, group)
    columns = slice(*part)
    own = whole.columns(columns)
    assert (own.group, own.shape) == (expected, (8, part[1] - part[0]))
    assert (own.dequantized() - value[:, columns]).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["pack-quantized", "int-quantized", "gptq, ordered", "nvfp4-pack-quantized"])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_loras_on_top(tmp_path: Path, name: str, rank: int | None) -> None:
    one, source = FORMATS[name], make_tiny(tmp_path / "source", BACKBONES["llama"], config=SIZES)
    weights, random = load_file(source / "model.safetensors"), torch.Generator().manual_seed(1)
    lora = LoraSpec("seen", 5, 2.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    for key, weight in list(weights.items()):
        if key.endswith(tuple(f"{layer}.weight" for layer in lora.layers)):
            for kind, shape in {"A": (lora.rank, weight.shape[1]), "B": (weight.shape[0], lora.rank)}.items():
                values = torch.randn(shape, generator=random) * 0.2
                weights[key.replace(".weight", f".lora_{kind}.{lora.name}.weight")] = values
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    tokens, choice = torch.randn(4, 96, generator=random), TokenChoice([None, 0, 0, None])
    outputs = []
    for folder in quantized_pair(source, tmp_path, one.section, one.encode):
        adapter: Any = load_adapter(folder)
        adapter.decoder_config = replace(adapter.decoder_config, loras=(lora,))
        group = SINGLE_RANK if rank is None else Rank(rank)
        mlp = layers_of(adapter.load_decoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], CPU, group))[0].mlp
        outputs.append((mlp if rank is None else mlp.module)(tokens, choice))
    assert (outputs[0] - outputs[1]).norm() < 0.03 * outputs[1].norm()
    assert outputs[1][1:3].norm() > 0.1
