"""The formats of quantized checkpoints, each as a config describes it and as layers are stored."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.quantized import Encode, rounded, value, words
from triptych.layers.stored.compressed_tensors import GroupQuantization, quantization_config


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


def fp8(block: tuple[int, int] | None, kind: str, *, per_output: bool = False, **extra: Tensor) -> Encode:
    """Blocks of that many outputs and inputs, or one scale for the layer or for each output."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        height, width = block or ((1, weight.shape[1]) if per_output else weight.shape)
        rows, columns = (torch.arange(size) // step for size, step in zip(weight.shape, (height, width), strict=True))
        highest = torch.stack([weight[rows == row].abs().amax(0) for row in rows.unique()])
        highest = torch.stack([highest[:, columns == column].amax(1) for column in columns.unique()], dim=1)
        scales = (highest / 448).bfloat16().float()
        spread = scales[rows][:, columns]
        values = (weight / spread).to(torch.float8_e4m3fn)
        stored = scales if block or per_output else scales.view(())
        return {"weight": values, kind: stored, **extra}, values.float() * spread

    return encode


def but(encode: Encode, *names: str) -> Encode:
    """Leaves layers whose names end like that as they are."""
    return lambda name, weight: None if name.endswith(names) else encode(name, weight)


def float_quantized(strategy: str, **weights: Any) -> dict[str, Any]:
    """As compressed-tensors describes it."""
    served = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": served, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


FORMATS = {
    "pack-quantized": Stored(
        quantization_config(GroupQuantization(32, has_zeros=False), []), packed(4, 32, symmetric=True)
    ),
    "pack-quantized, asymmetric": Stored(
        quantization_config(GroupQuantization(64, has_zeros=True), []), packed(4, 64, symmetric=False)
    ),
    "fp8, blocks": Stored(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 24]},
        fp8((16, 24), "weight_scale_inv"),
    ),
    "fp8, tensors": Stored(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8(None, "weight_scale_inv", activation_scale=torch.tensor(0.5)),
    ),
    "float-quantized": Stored(float_quantized("channel"), fp8(None, "weight_scale", per_output=True)),
    "float-quantized, blocks": Stored(
        float_quantized("block", block_structure=[16, 24]), fp8((16, 24), "weight_scale")
    ),
}
