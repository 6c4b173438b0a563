"""Layers in 4-bit floating point and in bitsandbytes' formats, made by arithmetic of its own."""

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.quantized import Encode

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.cat((-torch.logspace(0, -1.2, 8), torch.tensor([0.0]), torch.logspace(-1.3, 0, 7)))
"""Any 16 levels in ascending order: files hold the ones that they use."""


def nearest(values: Tensor, levels: Tensor) -> Tensor:
    """The index of each value's nearest level, uint8."""
    return (values[..., None] - levels).abs().argmin(-1).to(torch.uint8)


def grouped(weight: Tensor, group: int) -> Tensor:
    """[out, in] → [out, groups, group]."""
    return weight.unflatten(1, (-1, group))


def nibbles(codes: Tensor) -> Tensor:
    """uint8 [out, in] → [out, in / 2], the first of two in the lower bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def nvfp4(*, modelopt: bool) -> Encode:
    """Layers have unlike global scales, as layers that become one do in published files."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if weight.shape[1] % 16:
            return None
        groups = grouped(weight, 16)
        scales = groups.abs().amax(2, keepdim=True) / 6
        divisor = torch.tensor(300.0) / scales.max()
        rounded = (scales * divisor).to(torch.float8_e4m3fn)
        spread = rounded.float() / divisor
        codes = nearest(groups / spread.clamp(min=1e-9), E2M1)
        value = (E2M1[codes.int()] * spread).flatten(1)
        packed, stored = nibbles(codes.flatten(1)), rounded.squeeze(2)
        if modelopt:
            return {
                "weight": packed,
                "weight_scale": stored,
                "weight_scale_2": 1 / divisor,
                "input_scale": divisor,
            }, value
        single = divisor.view(1)
        return {
            "weight_packed": packed,
            "weight_scale": stored,
            "weight_global_scale": single,
            "input_global_scale": single,
        }, value

    return encode


def mx_exponents(groups: Tensor, largest: float) -> Tensor:
    """127 more than the power of 2 by which each group is scaled, uint8 [..., 1]."""
    return (groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / largest).log2().ceil().add(127).to(torch.uint8)


def mxfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """As compressed-tensors stores it."""
    if weight.shape[1] % 32:
        return None
    groups = grouped(weight, 32)
    exponents = mx_exponents(groups, 6)
    spread = torch.exp2(exponents.float() - 127)
    codes = nearest(groups / spread, E2M1)
    tensors = {"weight_packed": nibbles(codes.flatten(1)), "weight_scale": exponents.squeeze(2)}
    return tensors, (E2M1[codes.int()] * spread).flatten(1)


def mxfp4_blocks(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """As gpt-oss has its experts."""
    if (found := mxfp4(name, weight)) is None or not name.endswith(("gate_up_proj", "down_proj")):
        return None
    tensors, value = found
    return {"blocks": tensors["weight_packed"].unflatten(1, (-1, 16)), "scales": tensors["weight_scale"]}, value


def mxfp8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if weight.shape[1] % 32:
        return None
    groups = grouped(weight, 32)
    exponents = mx_exponents(groups, 448)
    spread = torch.exp2(exponents.float() - 127)
    values = (groups / spread).to(torch.float8_e4m3fn)
    return {"weight": values.flatten(1), "weight_scale": exponents.squeeze(2)}, (values.float() * spread).flatten(1)


def bits4(*, nested: bool, kind: str = "nf4", run: int = 64) -> Encode:
    """The first of two weights stands in the higher bits; runs go on from one output to the next."""
    levels = (NF4 if kind == "nf4" else E2M1 / 6).float()

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        count = weight.numel()
        runs = F.pad(weight.flatten(), (0, -count % run)).view(-1, run)
        absmax = runs.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": run, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {"weight.quant_map": levels}
        if nested:
            offset, steps = absmax.mean(), torch.linspace(-1, 1, 256)
            outer = F.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            highest = outer.abs().amax(1, keepdim=True)
            indices = nearest(outer / highest.clamp(min=1e-9), steps)
            absmax_values = (steps[indices.int()] * highest).flatten()[: len(absmax)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            tensors |= {"weight.nested_absmax": highest.flatten(), "weight.nested_quant_map": steps}
            tensors["weight.absmax"] = indices.flatten()[: len(absmax)]
        else:
            absmax_values = tensors["weight.absmax"] = absmax
        codes = nearest(runs / absmax_values.clamp(min=1e-9)[:, None], levels)
        value = (levels[codes.int()] * absmax_values[:, None]).flatten()[:count].view(weight.shape)
        even = F.pad(codes.flatten()[:count], (0, count % 2)).view(-1, 2)
        tensors["weight"] = (even[:, 0] << 4 | even[:, 1])[:, None]
        text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors | {f"weight.quant_state.bitsandbytes__{kind}": text}, value

    return encode


def bits8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    highest = weight.abs().amax(1)
    values = (weight * (127 / highest[:, None])).round().to(torch.int8)
    tensors = {"weight": values, "SCB": highest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values * (highest / 127)[:, None]
