"""Writes one small layer in each format of quantized checkpoints, made by the format's own library, and the weight that
the library takes it for: what ``tests/layers/test_library_samples.py`` reads.

``pip install --no-deps`` of compressed-tensors, bitsandbytes, nvidia-modelopt and what they import; the sources of
AutoAWQ and GPTQModel in folders, named after their versions, since they can't be installed beside a current PyTorch.
Usage: ``quantized_samples.py AUTOAWQ GPTQMODEL OUT``.
"""

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUTPUTS, INPUTS, GROUP = 32, 96, 32
Sample = tuple[str, dict[str, Any], dict[str, Tensor], Tensor]
"""A name, the config's section, tensors by the last parts of their names, and the weight [out, in]."""


def extremes(weight: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and highest weight of each group, [out, groups]; ``groups`` is each input's group."""
    shape = len(weight), int(groups.max()) + 1
    index = groups.expand_as(weight)
    low, high = (torch.zeros(shape).scatter_reduce_(1, index, weight, kind) for kind in ("amin", "amax"))
    return low, high


def asymmetric(weight: Tensor, groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points [out, groups], the latter at least 1."""
    low, high = extremes(weight, groups)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, (-low / scales).round().clamp(1, 2**bits - 1)


def symmetric(weight: Tensor, groups: Tensor, largest: float) -> Tensor:
    """Scales [out, groups]."""
    low, high = extremes(weight, groups)
    return (torch.maximum(-low, high) / largest).bfloat16().float()


def compressed_tensors(weight: Tensor) -> Iterator[Sample]:
    schemes = importlib.import_module("compressed_tensors.quantization.quant_scheme")
    compressors = importlib.import_module("compressed_tensors.compressors.base").BaseCompressor
    every = torch.arange(INPUTS)
    for preset, kind, changes in (
        ("W4A16", "pack-quantized", {"group_size": GROUP}),
        ("W4A16_ASYM", "pack-quantized", {"group_size": GROUP}),
        ("W8A16", "pack-quantized", {"strategy": "channel", "group_size": None}),
        ("W8A8", "int-quantized", {}),
        ("FP8", "float-quantized", {}),
        ("FP8_DYNAMIC", "float-quantized", {}),
        ("FP8_BLOCK", "float-quantized", {"block_structure": [24, 40]}),
        ("NVFP4A16", "nvfp4-pack-quantized", {}),
        ("MXFP4A16", "mxfp4-pack-quantized", {}),
        ("MXFP8A16", "mxfp8-quantized", {}),
    ):
        scheme = schemes.preset_name_to_scheme(preset, ["Linear"])
        scheme.weights = type(scheme.weights)(**(scheme.weights.model_dump() | changes))
        arguments = scheme.weights
        groups = every // (arguments.group_size or INPUTS)
        state: dict[str, Tensor] = {"weight": weight.clone()}
        largest = {"pack-quantized": 2 ** (arguments.num_bits - 1) - 1, "int-quantized": 127}.get(kind, 448)
        if not arguments.symmetric:
            scales, zeros = asymmetric(weight, groups, arguments.num_bits)
            state |= {"weight_scale": scales, "weight_zero_point": (zeros - 8).to(torch.int8)}
        elif kind == "nvfp4-pack-quantized":
            divisor = 448 * 6 / weight.abs().max()
            scales = (symmetric(weight, groups, 6) * divisor).to(torch.float8_e4m3fn).float()
            state |= {"weight_scale": scales, "weight_global_scale": divisor.view(1)}
        elif kind.startswith("mxfp"):
            state["weight_scale"] = torch.exp2(symmetric(weight, groups, 6 if "4" in kind else 448).log2().ceil())
        elif arguments.block_structure:
            height, width = arguments.block_structure
            blocks = [[part.abs().max() for part in row.split(width, 1)] for row in weight.split(height)]
            state["weight_scale"] = torch.tensor(blocks) / 448
        else:
            state["weight_scale"] = symmetric(weight, groups, largest)
            if arguments.strategy == "tensor":
                state["weight_scale"] = state["weight_scale"].max().view(1)
        compressor = compressors.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        value = compressor.decompress(dict(stored), scheme)["weight"]
        group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json())}
        section = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
        yield preset, section, stored, value


def bitsandbytes(weight: Tensor) -> Iterator[Sample]:
    library = importlib.import_module("bitsandbytes")
    whole, uneven = (torch.randn(OUTPUTS, inputs) * 0.05 for inputs in (128, 100))
    for name, dense, kind, nested in (
        ("nf4", whole, "nf4", False),
        ("nf4 nested", whole, "nf4", True),
        ("fp4", whole, "fp4", False),
        # in release 0.50 the library's own dequantization on CPUs is wrong for 96 inputs, but not for 100
        ("nf4 uneven", uneven, "nf4", False),
        ("fp4 nested uneven", uneven, "fp4", True),
    ):
        packed, state = library.functional.quantize_4bit(
            dense, blocksize=64, quant_type=kind, compress_statistics=nested
        )
        tensors = {f"weight.{part}": one for part, one in state.as_dict(packed=True).items()} | {"weight": packed}
        section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        yield name, section, tensors, library.functional.dequantize_4bit(packed, state)
    layer = library.nn.Linear8bitLt(INPUTS, OUTPUTS, bias=False, has_fp16_weights=False)
    layer.load_state_dict({"weight": weight})
    state = layer.to("cpu").state_dict()
    value = library.functional.int8_vectorwise_dequant(state["weight"], state["SCB"])
    yield "LLM.int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, state, value


def gptq(weight: Tensor) -> Iterator[Sample]:
    linears = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
    convert = importlib.import_module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    dense = nn.Linear(INPUTS, OUTPUTS, bias=False)
    dense.weight.data = weight.clone()
    for bits, ordered, v2 in ((4, False, False), (4, True, False), (8, True, True), (4, False, True)):
        groups = (torch.arange(INPUTS).flip(0) if ordered else torch.arange(INPUTS)) // GROUP
        scales, zeros = asymmetric(weight, groups, bits)
        packed = linears.TorchLinear(bits, GROUP, False, ordered, INPUTS, OUTPUTS)
        packed.pack_original(dense, scales, zeros, groups.int())
        value = ((packed_levels(packed, bits) - zeros.T[groups]) * scales.half().float().T[groups]).T
        if not v2:
            convert(packed, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        section = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": False}
        section["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
        yield f"{section['checkpoint_format']} {bits} bits{' desc_act' * ordered}", section, tensors, value


def packed_levels(packed: Any, bits: int) -> Tensor:
    """The levels [in, out] that a layer of GPTQModel unpacks."""
    shifts = torch.arange(0, 32, bits)
    words = packed.qweight.long() & 0xFFFFFFFF
    return ((words[:, None, :] >> shifts[None, :, None]) & (2**bits - 1)).flatten(0, 1).float()


def awq(weight: Tensor, source: Path) -> Iterator[Sample]:
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):  # the package imports more than it needs
        module = types.ModuleType(name)
        module.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = module
    library = importlib.import_module("awq.modules.linear.gemm")
    groups = torch.arange(INPUTS) // GROUP
    scales, zeros = asymmetric(weight, groups, 4)
    dense = nn.Linear(INPUTS, OUTPUTS, bias=False)
    dense.weight.data = weight.clone()
    packed = library.WQLinear_GEMM.from_linear(
        dense, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    value = dequantize(*(tensors[name] for name in ("qweight", "qzeros", "scales")), 4, GROUP).T
    section = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
    yield "AutoAWQ gemm", section, tensors, value


def modelopt(weight: Tensor) -> Iterator[Sample]:
    library = importlib.import_module("modelopt.torch.quantization.qtensor")
    packed, scales, factor = library.NVFP4QTensor.quantize(weight, 16)
    tensors = {"weight": packed._quantized_data, "weight_scale": scales, "weight_scale_2": factor}
    value = packed.dequantize(dtype=torch.float32, scale=scales, double_scale=factor, block_sizes={-1: 16})
    yield "ModelOpt NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors, value


def main(autoawq: Path, gptqmodel: Path, out: Path) -> None:
    sys.path.insert(0, str(gptqmodel))
    torch.manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS) * 0.05
    makers: list[tuple[str, Callable[[Tensor], Iterator[Sample]]]] = [
        ("compressed-tensors", compressed_tensors),
        ("bitsandbytes", bitsandbytes),
        ("nvidia-modelopt", modelopt),
    ]
    tensors: dict[str, Tensor] = {}
    sections: dict[str, Any] = {}
    libraries = {name: version(name) for name, _ in makers}
    for name, section, stored, value in (
        *(sample for _, make in makers for sample in make(weight)),
        *gptq(weight),
        *awq(weight, autoawq),
    ):
        sections[name] = section
        tensors |= {f"{name}.{kind}": one.contiguous().clone() for kind, one in stored.items()}
        tensors[f"{name}:value"] = value.float().contiguous().clone()
    metadata = {
        "sections": json.dumps(sections),
        "libraries": json.dumps(libraries | {"sources": [autoawq.name, gptqmodel.name]}),
    }
    save_file(tensors, out, metadata=metadata)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
