"""Quantized checkpoints in each format, in decoders, experts and towers: they are what their dequantized weights are,
in transformers, too."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter, load_reference
from tests.support.forward import (
    Pool,
    Prompt,
    Running,
    assert_close,
    assert_rows,
    layers_of,
    make_prompt,
    random_input,
    reference_logits,
    step,
)
from tests.support.quantized import Encode, quantized_pair, rounded, value, words
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import WEIGHT_FORMATS, ConcatenatedLinear, PackedLinear, PlainFormat
from triptych.layers.stored.compressed_tensors import GroupQuantization, quantization_config

CPU = torch.device("cpu")
FP32 = PlainFormat(torch.float32)


@dataclass(frozen=True)
class Stored:
    """A format, as a config describes it and as layers are stored."""

    section: dict[str, Any]
    encode: Encode


def packed(bits: int, group: int, *, symmetric: bool) -> Encode:
    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        groups = torch.arange(inputs) // group
        levels, scales, zeros = rounded(weight, bits, groups, symmetric=symmetric)
        tensors = {
            "weight_packed": words(levels, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        return tensors, value(levels, scales, zeros, groups)

    return encode


def but(encode: Encode, *names: str) -> Encode:
    """Leaves layers whose names end like that as they are."""
    return lambda name, weight: None if name.endswith(names) else encode(name, weight)


FORMATS = {
    "pack-quantized": Stored(
        quantization_config(GroupQuantization(32, has_zeros=False), []), packed(4, 32, symmetric=True)
    ),
    "pack-quantized, asymmetric": Stored(
        quantization_config(GroupQuantization(64, has_zeros=True), []), packed(4, 64, symmetric=False)
    ),
}


def modules(encoder: Any) -> Iterator[nn.Module]:
    """The modules of an encoder's towers."""
    for tower in getattr(encoder, "towers", {"": encoder}).values():
        yield tower if isinstance(tower, nn.Module) else tower.module


def assert_same_weights(ours: nn.Module, dense: nn.Module) -> None:
    expected = dense.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert weight.shape == expected[name].shape
        assert not weight.numel() or (weight - expected[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_moe", "kimi_vl", "internvl", "gemma4+gemma4_vision", "phi3"])
def test_decoders_experts_and_towers(tmp_path: Path, name: str, family: str) -> None:
    """Towers of transformers' modules and of our own, reordered ones, separate experts, fused layers."""
    one = FORMATS[name]
    source = make_tiny(tmp_path / "source", BACKBONES.get(family, family))
    stored, dense = quantized_pair(source, tmp_path, one.section, one.encode)
    adapter = load_adapter(dense)
    decoders = [adapter.load_decoder(Checkpoint(folder), FP32, CPU) for folder in (stored, dense)]
    assert_same_weights(*decoders)
    if adapter.encoder_keys(Checkpoint(dense).tensors):
        ours, expected = (adapter.load_encoder(Checkpoint(folder), FP32, CPU) for folder in (stored, dense))
        for one_tower, other in zip(modules(ours), modules(expected), strict=True):
            assert_same_weights(one_tower, other)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantized_model_in_transformers(tmp_path: Path, name: str) -> None:
    one, image = FORMATS[name], random_input((1, 4, 6), patch_values=3 * 2 * 14 * 14)
    stored, dense = quantized_pair(make_tiny(tmp_path / "source", "qwen2_5_vl"), tmp_path, one.section, one.encode)
    adapter, checkpoint, reference = load_adapter(stored), Checkpoint(stored), load_reference(dense)
    [rows] = adapter.load_encoder(checkpoint, FP32, CPU).encode([image])
    [expected_rows] = load_adapter(dense).load_encoder(Checkpoint(dense), FP32, CPU).encode([image])
    assert_rows(rows, expected_rows)
    prompt = make_prompt(reference, list(b"hello"), [image], [rows], adapter.embedding_width)
    pool = Pool(adapter.load_decoder(checkpoint, FP32, CPU))
    ours = step(pool, [(Running(prompt), len(prompt.tokens))])
    expected = reference_logits(reference, prompt, [image])
    assert_close(ours, expected, 1e-4 * expected.abs().max().item())
    assert len(set(expected.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("weights", ["float32", "float16"])
def test_layers_of_unlike_shards_are_multiplied_apart(tmp_path: Path, weights: str) -> None:
    one = FORMATS["pack-quantized"]
    encode = but(one.encode, "k_proj", "layers.1.mlp.up_proj")
    source = make_tiny(tmp_path / "source", "qwen2_5_vl")
    stored, dense = quantized_pair(source, tmp_path, one.section, encode)
    adapter = load_adapter(stored)
    whole, mixed = (
        layers_of(adapter.load_decoder(Checkpoint(folder), form, CPU))[1]
        for folder, form in ((dense, FP32), (stored, WEIGHT_FORMATS[weights]))
    )
    tokens = torch.randn(5, 64)
    for ours, expected in ((mixed.mixer.qkv, whole.mixer.qkv), (mixed.mlp.gate_up, whole.mlp.gate_up)):
        assert isinstance(ours, ConcatenatedLinear)
        assert all(isinstance(part, PackedLinear) for part in ours.linears)
        values = expected(tokens)
        assert (ours(tokens) - values).norm() < 0.02 * values.norm()
        assert ours(tokens).shape == values.shape
    loaded = [adapter.load_decoder(Checkpoint(folder), WEIGHT_FORMATS["float32"], CPU) for folder in (stored, dense)]
    prompt = Prompt(torch.arange(3, 43), torch.arange(40.0).double().expand(3, -1), torch.arange(0), torch.zeros(0, 64))
    logits = [step(Pool(decoder), [(Running(prompt), 40)]) for decoder in loaded]
    assert (logits[0] - logits[1]).norm() < 0.1 * logits[1].norm()
