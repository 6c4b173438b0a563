"""Checkpoints with quantized weights, made of dense ones by arithmetic of their own, and the same weights, dequantized,
in dense checkpoints."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

Encode = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]
"""Returns a layer's tensors by the last parts of their names, and the weight that they stand for; None: the layer isn't
quantized. Its name and its weight [out, in] are given."""
LINEAR = re.compile(r".*(_proj|\.qkv|\.proj|fc\d|wqkv|\.wo|linear_\d)\.weight")
"""Keys of linear layers of decoders and towers."""


def quantized_pair(source: Path, to: Path, section: dict[str, Any], encode: Encode) -> tuple[Path, Path]:
    """Writes copies of a checkpoint folder: with layers as ``encode`` stores them, and with their values."""
    stored, dense = to / "stored", to / "dense"
    for folder in (stored, dense):
        shutil.copytree(source, folder)
    kept: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for key, weight in load_file(source / "model.safetensors").items():
        name = key.removesuffix(".weight")
        found = encode(name, weight) if LINEAR.fullmatch(key) and weight.dim() == 2 else None
        kept |= {key: weight} if found is None else {f"{name}.{kind}": one for kind, one in found[0].items()}
        values[key] = weight if found is None else found[1]
    assert kept.keys() != values.keys()
    for folder, tensors in ((stored, kept), (dense, values)):
        contiguous = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return stored, dense


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
