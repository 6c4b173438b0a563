"""Checkpoints with quantized weights, made of dense ones by arithmetic of their own, and the same weights, dequantized,
in dense checkpoints."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

Encode = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]
"""Returns a layer's tensors by the last parts of their names, and the weight that they stand for; None: the layer isn't
quantized. Its name and its weight [out, in] are given."""
LINEAR = re.compile(r".*(_proj|\.qkv|\.proj|fc\d|wqkv|\.wo|linear_\d)\.weight")
"""Keys of linear layers of decoders and towers."""


STACK = re.compile(r".*\.experts\.(gate_up|down)_proj")
"""Keys of stacks of all experts."""


@dataclass(frozen=True)
class StackLayout:
    """How the checkpoint's stacks of experts are stored."""

    is_transposed: bool
    """Whether the dense one's are [experts, in, out]."""
    stores_transposed: bool
    """Whether the quantized ones, and their scales, are."""
    ends: Mapping[str, str]
    """What follows the stack's name in those of its tensors, by kind."""


def quantized_pair(
    source: Path, to: Path, section: dict[str, Any], encode: Encode, stacks: StackLayout | None = None
) -> tuple[Path, Path]:
    """Writes copies of a checkpoint folder: with layers as ``encode`` stores them, and with their values. If ``stacks``
    is given, experts are such layers, else those that aren't in stacks."""
    stored, dense = to / "stored", to / "dense"
    for folder in (stored, dense):
        shutil.copytree(source, folder)
    kept: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for key, weight in load_file(source / "model.safetensors").items():
        name = key.removesuffix(".weight")
        tensors, values[key] = {key: weight}, weight
        if stacks is not None and STACK.fullmatch(key):
            tensors, values[key] = _stack(key, weight, encode, stacks)
        elif LINEAR.fullmatch(key) and weight.dim() == 2 and (found := encode(name, weight)) is not None:
            tensors, values[key] = {f"{name}.{kind}": one for kind, one in found[0].items()}, found[1]
        kept |= tensors
    assert kept.keys() != values.keys()
    for folder, written in ((stored, kept), (dense, values)):
        contiguous = {key: tensor.contiguous().clone() for key, tensor in written.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return stored, dense


def _stack(key: str, weight: Tensor, encode: Encode, stacks: StackLayout) -> tuple[dict[str, Tensor], Tensor]:
    def turned(one: Tensor, is_turned: bool) -> Tensor:
        return one.T if is_turned and one.dim() == 2 else one

    found = [encode(key, turned(one, stacks.is_transposed)) for one in weight]
    members = [one for one in found if one is not None]
    assert len(members) == len(weight)
    tensors = {
        key + end: torch.stack([turned(one[kind], stacks.stores_transposed) for one, _ in members])
        for kind, end in stacks.ends.items()
    }
    return tensors, torch.stack([turned(value, stacks.is_transposed) for _, value in members])


def words(levels: Tensor, bits: int) -> Tensor:
    """[rows, n] of unsigned numbers → int32 [rows, ceil(n * bits / 32)]: each number's lowest bit first, numbers one
    after the other."""
    per_word = 32 // bits
    padded = F.pad(levels.long(), (0, -levels.shape[1] % per_word)).unflatten(1, (-1, per_word))
    shifted = (padded << (bits * torch.arange(per_word))).sum(2)
    return torch.where(shifted < 2**31, shifted, shifted - 2**32).to(torch.int32)


def rounded(weight: Tensor, bits: int, group: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [out, in] from 0 to 2^bits - 1, scales and zeros [out, groups] of a weight; ``group`` [in] is each input's
    group. Scales are numbers of bfloat16 and float16."""
    groups, highest = int(group.max()) + 1, 2**bits - 1
    low, high = (
        torch.zeros(len(weight), groups).scatter_reduce_(1, group.expand_as(weight), weight, kind)
        for kind in ("amin", "amax")
    )
    if symmetric:
        scales = torch.maximum(-low, high) / (highest // 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / highest
        zeros = (-low / scales.clamp(min=1e-9)).round()
    scales = scales.bfloat16().half().float()
    zeros = zeros.clamp(0, highest)
    levels = (weight / scales[:, group].clamp(min=1e-9) + zeros[:, group]).round().clamp(0, highest)
    return levels, scales, zeros


def value(levels: Tensor, scales: Tensor, zeros: Tensor, group: Tensor) -> Tensor:
    """The weight that ``rounded`` has made levels of."""
    return (levels - zeros[:, group]) * scales[:, group]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """All tensors, those of layers in parts as one."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in module.state_dict().items():
        found.setdefault(re.sub(r"linears\.\d+\.", "", name), []).append(tensor)
    return {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in found.items()}


def assert_same_weights(ours: nn.Module, dense: nn.Module) -> None:
    """All weights of a module of quantized layers are those of one of their values."""
    found, expected = state_of(ours), state_of(dense)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.shape == expected[name].shape
        assert not weight.numel() or (weight - expected[name]).abs().max() < 1e-6, name
