"""The formats of quantized checkpoints, each as a config describes it and as layers are stored."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.four_bit_floats import bits4, bits8, mxfp4, mxfp8, nvfp4
from tests.support.quantized import Encode, rounded, value, words
from triptych.layers.stored.pack_quantized import GroupQuantization, quantization_config


@dataclass(frozen=True)
class Stored:
    """A format, as a config describes it and as layers are stored."""

    section: dict[str, Any]
    encode: Encode


def groups_of(inputs: int, group: int | None, *, shuffled: bool = False) -> Tensor:
    """Each input's group, int64 [in]: consecutive inputs, or any."""
    order = torch.arange(inputs)
    if shuffled:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    return order // (group or inputs)


def packed(bits: int, group: int | None, *, symmetric: bool, shuffled: bool = False) -> Encode:
    """As compressed-tensors packs weights."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        groups = groups_of(inputs, group, shuffled=shuffled)
        levels, scales, zeros = rounded(weight, bits, groups, symmetric=symmetric)
        tensors = {
            "weight_packed": words(levels, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        if shuffled:
            tensors["weight_g_idx"] = groups.int()
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


def awq(group: int | None) -> Encode:
    """The numbers of a word stand in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = groups_of(weight.shape[1], group)
        levels, scales, zeros = rounded(weight, 4, groups, symmetric=False)
        stored = {"qweight": levels.T, "qzeros": zeros.T}
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        mixed = {kind: one.unflatten(1, (-1, 8))[:, :, order].flatten(1) for kind, one in stored.items()}
        tensors = {kind: words(one, 4) for kind, one in mixed.items()} | {"scales": scales.T.half()}
        return tensors, value(levels, scales, zeros, groups)

    return encode


def gptq(bits: int, group: int | None, *, version: int, symmetric: bool, shuffled: bool = False) -> Encode:
    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = groups_of(weight.shape[1], group, shuffled=shuffled)
        levels, scales, zeros = rounded(weight, bits, groups, symmetric=symmetric)
        zeros = zeros.clamp(min=1)  # version 1 has no zero point 0
        tensors = {
            "qweight": words(levels, bits).T,
            "qzeros": words((zeros - int(version == 1)).T, bits),
            "scales": scales.T.half(),
            "g_idx": groups.int(),
        }
        return tensors, value(levels, scales, zeros, groups)

    return encode


def int8(group: int | None, *, symmetric: bool, of_tensor: bool = False) -> Encode:
    """Scales of a tensor, of outputs or of groups; the lowest number that occurs is -128."""

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = groups_of(weight.shape[1], group)
        levels, scales, zeros = rounded(weight, 8, groups, symmetric=symmetric)
        if of_tensor:
            scales = torch.full_like(scales, (weight.abs().max() / 128).bfloat16().float().item())
            levels = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 255)
        levels[0, 0] = 0
        tensors = {
            "weight": (levels - 128).to(torch.int8),
            "weight_scale": scales[:1, 0] if of_tensor else scales.bfloat16(),
        }
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, value(levels, scales, zeros, groups)

    return encode


def mixed(encode: Encode, other: Encode, *names: str) -> Encode:
    """Layers whose names end like that are as in ``other``."""
    return lambda name, weight: (other if name.endswith(names) else encode)(name, weight)


def but(encode: Encode, *names: str) -> Encode:
    """Leaves layers whose names end like that as they are."""
    return lambda name, weight: None if name.endswith(names) else encode(name, weight)


def float_quantized(strategy: str, **weights: Any) -> dict[str, Any]:
    """As compressed-tensors describes it."""
    served = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": served, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def of_groups(format_name: str, *groups: dict[str, Any]) -> dict[str, Any]:
    """As compressed-tensors describes groups of layers."""
    numbered = {f"group_{number}": group for number, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": numbered}


def group(kind: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    """A group of layers of weights that are integers (``int``) or ``float``, and of activations in 8 bits."""
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
    served = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | weights
    return {"targets": ["Linear"], "weights": served, "input_activations": activations}


def pack_quantized(*schemes: dict[str, Any]) -> dict[str, Any]:
    """As compressed-tensors describes groups of layers with these weights."""
    served = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
    groups = {f"group_{number}": {"weights": served | scheme} for number, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
BITS4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
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
    "pack-quantized, 8 bits by output": Stored(
        pack_quantized({"num_bits": 8, "strategy": "channel", "group_size": None}), packed(8, None, symmetric=True)
    ),
    "pack-quantized, 8 bits, asymmetric": Stored(
        pack_quantized({"num_bits": 8, "group_size": 16, "symmetric": False}), packed(8, 16, symmetric=False)
    ),
    "pack-quantized, ordered": Stored(
        pack_quantized({"actorder": "group", "symmetric": False}), packed(4, 32, symmetric=False, shuffled=True)
    ),
    "pack-quantized, unlike layers": Stored(
        pack_quantized({}, {"num_bits": 8, "strategy": "channel", "group_size": None}, {"group_size": 16}),
        mixed(
            mixed(packed(4, 32, symmetric=True), packed(8, None, symmetric=True), "k_proj", "down_proj"),
            packed(4, 16, symmetric=True),
            "up_proj",
        ),
    ),
    "awq": Stored(AWQ, awq(32)),
    "awq by output": Stored(AWQ | {"group_size": -1}, awq(None)),
    "gptq": Stored(GPTQ, gptq(4, 32, version=1, symmetric=True)),
    "gptq, ordered": Stored(
        GPTQ | {"desc_act": True, "bits": 8, "sym": False}, gptq(8, 32, version=1, symmetric=False, shuffled=True)
    ),
    "gptq, unlike layers": Stored(
        GPTQ | {"dynamic": {"-:.*o_proj": {}, "+:.*(up|q)_proj": {"bits": 8, "group_size": 16}}},
        but(
            mixed(gptq(4, 32, version=1, symmetric=True), gptq(8, 16, version=1, symmetric=True), "up_proj", "q_proj"),
            "o_proj",
        ),
    ),
    "int-quantized": Stored(of_groups("int-quantized", group("int", 8, "channel")), int8(None, symmetric=True)),
    "int-quantized, tensors": Stored(
        of_groups("naive-quantized", group("int", 8, "tensor")), int8(None, symmetric=True, of_tensor=True)
    ),
    "int-quantized, asymmetric": Stored(
        of_groups("int-quantized", group("int", 8, "channel", symmetric=False)), int8(None, symmetric=False)
    ),
    "int-quantized, groups": Stored(
        of_groups("int-quantized", group("int", 8, "group", group_size=32)), int8(32, symmetric=True)
    ),
    "nvfp4-pack-quantized": Stored(
        of_groups("nvfp4-pack-quantized", group("float", 4, "tensor_group", group_size=16)), nvfp4(modelopt=False)
    ),
    "mxfp4-pack-quantized": Stored(of_groups("mxfp4-pack-quantized", group("float", 4, "group", group_size=32)), mxfp4),
    "mxfp8-quantized": Stored(of_groups("mxfp8-quantized", group("float", 8, "group", group_size=32)), mxfp8),
    "mixed-precision": Stored(
        of_groups(
            "mixed-precision",
            group("float", 4, "tensor_group", group_size=16) | {"format": "nvfp4-pack-quantized"},
            group("float", 8, "channel") | {"format": "float-quantized"},
            group("int", 8, "channel") | {"format": "int-quantized"},
            group("int", 4, "group", group_size=32) | {"format": "pack-quantized"},
        ),
        mixed(
            mixed(
                mixed(nvfp4(modelopt=False), packed(4, 32, symmetric=True), "up_proj"),
                int8(None, symmetric=True),
                "q_proj",
                "o_proj",
            ),
            fp8(None, "weight_scale", per_output=True),
            "k_proj",
            "down_proj",
        ),
    ),
    "modelopt": Stored({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(modelopt=True)),
    "modelopt, unlike layers": Stored(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}},
        },
        mixed(nvfp4(modelopt=True), fp8(None, "weight_scale", input_scale=torch.tensor(0.5)), "q_proj", "down_proj"),
    ),
    "bitsandbytes nf4": Stored(BITS4, bits4(nested=False)),
    "bitsandbytes nf4, nested": Stored(BITS4 | {"bnb_4bit_use_double_quant": True}, bits4(nested=True)),
    "bitsandbytes fp4": Stored(BITS4 | {"bnb_4bit_quant_type": "fp4"}, bits4(nested=False, kind="fp4", run=32)),
    "bitsandbytes int8": Stored({"quant_method": "bitsandbytes", "load_in_8bit": True}, bits8),
    "gptq_v2": Stored(GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, gptq(4, 32, version=2, symmetric=False)),
}
