"""Damaged and hostile quantized checkpoints: each is refused in one line, or has weights of the right shape."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.stored_formats import FORMATS
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.linear import PlainFormat
from triptych.layers.stored.reader import StoredReader
from triptych.layers.stored.registry import described_formats

OUTPUTS, INPUTS = 64, 96
VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        3,
        2**40,
        10**30,
        -(10**30),
        0.5,
        float("nan"),
        float("inf"),
        "",
        "int",
        "gptq",
        "🙂" * 1000,
    ),
    *([], {}, [[]], {"": {}}, [1, 2], [0, 0], [-1, 10**30], {"a": 5}, {"weights": {}}, [None] * 1000),
]


def changed(section: Any) -> Iterator[Any]:
    """Sections with one value, of any depth, replaced or left out."""
    items = section.items() if isinstance(section, dict) else enumerate(section) if isinstance(section, list) else ()
    for key, value in items:
        for other in [*VALUES, *changed(value)]:
            copy = section.copy()
            copy[key] = other
            yield copy
        if isinstance(section, dict):
            yield {name: one for name, one in section.items() if name != key}


@pytest.mark.parametrize("name", FORMATS)
def test_any_setting_is_served_or_refused_in_one_line(name: str) -> None:
    refused = 0
    for section in changed(FORMATS[name].section):
        try:
            described_formats(section)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
    assert refused > len(VALUES)


def damaged(tensor: Tensor) -> Iterator[Tensor | None]:
    yield None
    yield tensor.new_empty(0)
    yield tensor.new_empty((0, *tensor.shape))
    yield tensor.flatten()[:1].reshape(())
    yield tensor[None]
    yield tensor.flatten()[:-1]
    for other in (torch.float32, torch.float16, torch.int32, torch.int8, torch.uint8, torch.int64, torch.bool):
        if other != tensor.dtype:
            yield torch.ones(tensor.shape, dtype=other)
    yield tensor.contiguous().reshape(-1).view(torch.uint8).fill_(255).view(tensor.dtype).view(tensor.shape)
    yield torch.zeros_like(tensor)


@pytest.mark.parametrize("name", FORMATS)
def test_any_damage_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    one, weight = FORMATS[name], torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(3)) * 0.1
    layer = "layers.0.up_proj"
    tensors, value = one.encode(layer, weight) or ({}, weight)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": one.section}))
    begun, refused, served = time.monotonic(), 0, 0

    def dequantized(stored: dict[str, Tensor]) -> Tensor:
        marked = {f"other.{kind}": tensor for kind, tensor in tensors.items()}
        mine = {f"{layer}.{kind}": tensor for kind, tensor in stored.items()}
        save_file(
            {key: one.contiguous().clone() for key, one in (marked | mine).items()}, tmp_path / "model.safetensors"
        )
        reader = StoredReader(Checkpoint(tmp_path), str, PlainFormat(torch.float32), torch.device("cpu"))
        return reader.stored(layer, OUTPUTS, INPUTS).dequantized()

    assert (dequantized(tensors) - value).abs().max() < 1e-6
    for kind, tensor in tensors.items():
        for other in damaged(tensor.contiguous().clone()):
            kept = {key: one for key, one in tensors.items() if key != kind}
            try:
                assert dequantized(kept | ({} if other is None else {kind: other})).shape == weight.shape
                served += 1
            except CheckpointError as error:
                refused += 1
                assert layer in str(error)
                assert "\n" not in str(error)
                assert len(str(error)) < 1000
    assert refused > served
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("name", ["awq", "bitsandbytes nf4, nested", "nvfp4-pack-quantized"])
def test_truncated_files(tmp_path: Path, name: str) -> None:
    one = FORMATS[name]
    tensors, _ = one.encode("layer", torch.randn(OUTPUTS, INPUTS)) or ({}, None)
    path = tmp_path / "model.safetensors"
    save_file({f"layer.{kind}": one.contiguous().clone() for kind, one in tensors.items()}, path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": one.section}))
    whole, chance = path.read_bytes(), random.Random(7)
    for _ in range(50):
        path.write_bytes(whole[: chance.randrange(len(whole))])
        with pytest.raises(CheckpointError):
            StoredReader(Checkpoint(tmp_path), str, PlainFormat(torch.float32), torch.device("cpu")).stored(
                "layer", OUTPUTS, INPUTS
            )
