"""Single quantized layers: which of its checkpoint's formats each one has, and the values that it keeps."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.four_bit_floats import mxfp8, nvfp4
from tests.support.quantized import Encode
from tests.support.stored_formats import FORMATS, fp8, group, int8, of_groups
from triptych.checkpoint.reader import Checkpoint
from triptych.errors import CheckpointError
from triptych.layers.grouped_weight import GroupedWeight
from triptych.layers.linear import PlainFormat
from triptych.layers.stored.linears import ScaledWeight, StoredLinear
from triptych.layers.stored.reader import StoredReader

OUTPUTS, INPUTS = 200, 320
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5)) * 0.1


def tensors_of(encode: Encode) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors, by the last parts of their names, and its weight."""
    found = encode("layer", WEIGHT)
    assert found is not None
    return found


def loaded(folder: Path, section: dict[str, Any], tensors: dict[str, Tensor]) -> StoredLinear:
    save_file({f"layer.{kind}": one.contiguous() for kind, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return StoredReader(Checkpoint(folder), str, PlainFormat(torch.float32), torch.device("cpu")).stored(
        "layer", OUTPUTS, INPUTS
    )


def by_blocks_of_modelopt(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks' scales are [rows, 1, columns, 1]."""
    tensors, value = tensors_of(fp8((128, 128), "weight_scale"))
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None]}, value


def modelopt(algorithms: tuple[str, ...]) -> dict[str, Any]:
    layers = {f"layer{number}": {"quant_algo": one} for number, one in enumerate(algorithms)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


ALGORITHMS: dict[str, Encode] = {
    "FP8": fp8(None, "weight_scale"),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8(None, "weight_scale", per_output=True),
    "MXFP8": mxfp8,
    "FP8_PB_WO": by_blocks_of_modelopt,
}
FLOAT_GROUPS = (group("float", 8, "channel"), group("float", 8, "block", block_structure=[64, 48]))
INT_GROUPS = (
    group("int", 8, "channel"),
    group("int", 8, "group", group_size=64),
    group("int", 8, "group", group_size=32),
)
UNLIKE = [
    *((modelopt(some), ALGORITHMS[one]) for some in permutations(("FP8", "MXFP8", "FP8_PB_WO")) for one in some),
    (modelopt(("MXFP8", "FP8_PER_CHANNEL_PER_TOKEN")), ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"]),
    *(
        (of_groups("float-quantized", *some), encode)
        for some in permutations(FLOAT_GROUPS)
        for encode in (fp8(None, "weight_scale", per_output=True), fp8((64, 48), "weight_scale"))
    ),
    *(
        (of_groups("int-quantized", *some), int8(size, symmetric=True))
        for some in permutations(INT_GROUPS)
        for size in (None, 64, 32)
    ),
]


@pytest.mark.parametrize(("section", "encode"), UNLIKE)
def test_layers_with_unlike_scales_are_told_apart_by_them(
    tmp_path: Path, section: dict[str, Any], encode: Encode
) -> None:
    tensors, value = tensors_of(encode)
    assert (loaded(tmp_path, section, tensors).dequantized() - value).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("section", "encode"),
    [
        (modelopt(("FP8", "MXFP8")), mxfp8),
        (of_groups("float-quantized", *FLOAT_GROUPS), fp8((64, 48), "weight_scale")),
        (of_groups("int-quantized", *INT_GROUPS), int8(64, symmetric=True)),
    ],
)
def test_scales_that_no_format_has_are_refused_by_name(tmp_path: Path, section: dict[str, Any], encode: Encode) -> None:
    tensors, _ = tensors_of(encode)
    tensors["weight_scale"] = tensors["weight_scale"][:, :-1]
    with pytest.raises(CheckpointError, match=r"layer\.weight_scale' has shape"):
        loaded(tmp_path, section, tensors)


def test_scales_of_nvfp4_are_divided_by_the_tensors(tmp_path: Path) -> None:
    """As the library does it: a product with the inverse is rounded twice."""
    section = FORMATS["nvfp4-pack-quantized"].section
    tensors, _ = tensors_of(nvfp4(modelopt=False))
    divisor = torch.tensor(3.0)
    levels = loaded(tmp_path, section, tensors | {"weight_global_scale": torch.ones(1)})
    divided = loaded(tmp_path, section, tensors | {"weight_global_scale": divisor})
    assert isinstance(levels, ScaledWeight) and isinstance(divided, ScaledWeight)
    assert torch.equal(divided.scales, levels.scales / divisor)
    assert not torch.equal(divided.scales, levels.scales * (1 / divisor))


def scaled(name: str, factor: float, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    tensors, value = tensors_of(FORMATS[name].encode)
    kind = next(kind for kind in tensors if kind.endswith(("scales", "weight_scale")))
    return tensors | {kind: (tensors[kind].double() * factor).to(dtype)}, value.double() * factor


@pytest.mark.parametrize("name", ["pack-quantized", "pack-quantized, asymmetric", "awq", "gptq"])
def test_scales_that_float16_does_not_represent_keep_their_values(tmp_path: Path, name: str) -> None:
    for factor, dtype in ((2.0**-20, torch.bfloat16), (2.0**30, torch.bfloat16), (1 / 3, torch.float32)):
        tensors, value = scaled(name, factor, dtype)
        weight = loaded(tmp_path, FORMATS[name].section, tensors)
        assert not isinstance(weight, GroupedWeight)
        assert (weight.dequantized() / factor - value / factor).abs().max() < 1e-6
    for factor, dtype in ((1.0, torch.bfloat16), (0.5, torch.float32)):
        tensors, value = scaled(name, factor, dtype)
        weight = loaded(tmp_path, FORMATS[name].section, tensors)
        assert isinstance(weight, GroupedWeight)
        assert (weight.dequantized() - value).abs().max() < 1e-6
