"""What ``config.json`` says of quantized weights: what is served is read, and all else is refused by name."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from triptych.checkpoint.config_files import quantization_section
from triptych.errors import CheckpointError
from triptych.layers.stored.fp8 import Fp8
from triptych.layers.stored.pack_quantized import GroupQuantization, PackQuantized, quantization_config
from triptych.layers.stored.registry import StoredFormats, read_formats

PACKED = ["model.layers.0.mlp.down_proj.weight_packed", "lm_head.weight"]


def read_quantization(config: dict[str, Any], tensors: list[str]) -> StoredFormats | None:
    return read_formats(quantization_section(config), tensors)


def section(**changes: Any) -> dict[str, Any]:
    """A served section with changes of its group's weights."""
    found = quantization_config(GroupQuantization(64, has_zeros=True), ["lm_head"])
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_what_is_written_is_read(group: int, has_zeros: bool) -> None:
    written = quantization_config(GroupQuantization(group, has_zeros), ["lm_head"])
    expected = StoredFormats("compressed-tensors", [PackQuantized(4, group, has_zeros)])
    assert read_quantization({"quantization_config": written}, PACKED) == expected
    assert read_quantization({"text_config": {"quantization_config": written}}, PACKED) == expected


def test_dense_weights() -> None:
    assert read_quantization({}, ["model.layers.0.mlp.down_proj.weight"]) is None
    assert read_quantization({"quantization_config": None, "text_config": 3}, []) is None


def test_config_and_tensors_that_contradict_each_other() -> None:
    with pytest.raises(CheckpointError, match=r"has a quantization_config .*, .* has no tensor \*.weight_packed"):
        read_quantization({"quantization_config": section()}, ["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"has no quantization_config, .* has a tensor .*down_proj.weight_packed"):
        read_quantization({}, PACKED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bits": 3}, "num_bits 3 is not served; served: 4, 8"),
        ({"num_bits": 4.0}, "num_bits 4.0"),
        ({"type": "float"}, "type 'float'"),
        ({"strategy": "tensor"}, "strategy 'tensor'"),
        ({"strategy": "channel"}, "group_size 64 contradicts strategy 'channel'"),
        ({"group_size": 0}, "group_size must be a positive integer, not 0"),
        ({"group_size": True}, "group_size must be a positive integer, not True"),
        ({"group_size": [32]}, r"group_size must be a positive integer, not \[32\]"),
        ({"group_size": None}, "group_size None contradicts strategy 'group'"),
        ({"symmetric": 1}, "symmetric 1"),
        ({"dynamic": True}, "dynamic True"),
        ({"actorder": "random"}, "actorder 'random'"),
    ],
)
def test_other_weights_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"quantization_config: {words}"):
        read_quantization({"quantization_config": section(**changes)}, PACKED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not served; served: 'compressed-tensors'"),
        ({"quant_method": None}, "quant_method None"),
        ({"quant_method": {"deep": [[[[1] * 10**6]]]}}, r"quant_method .{1,60} is not served"),
        ({"format": "marlin-24"}, "format 'marlin-24' is not served; served: 'pack-quantized'"),
        ({"format": "mixed-precision"}, "format None is not served"),
        ({"config_groups": None}, "config_groups must be objects"),
        ({"config_groups": {}}, "config_groups must be objects"),
        ({"config_groups": {"group_0": 7}}, "config_groups must be objects"),
        ({"config_groups": {"group_0": {"weights": []}}}, "weights must be an object"),
        ({"config_groups": {"group_0": {"weights": {}}}}, "num_bits None is not served"),
    ],
)
def test_other_formats_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_quantization({"quantization_config": section() | changes}, PACKED)


def test_layers_of_different_groups() -> None:
    both = section()
    both["config_groups"]["group_1"] = deepcopy(both["config_groups"]["group_0"])
    one = PackQuantized(4, 64, has_zeros=True)
    for groups, expected in ((64, [one]), (128, [one, replace(one, group=128)])):
        both["config_groups"]["group_1"]["weights"]["group_size"] = groups
        found = read_quantization({"quantization_config": both}, PACKED)
        assert found == StoredFormats("compressed-tensors", expected)


@pytest.mark.parametrize("wrong", [7, [], "compressed-tensors", True])
def test_a_section_that_is_no_object_is_refused(wrong: object) -> None:
    with pytest.raises(CheckpointError, match="quantization_config must be an object"):
        read_quantization({"quantization_config": wrong}, PACKED)


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}


def float_quantized(**changes: Any) -> dict[str, Any]:
    group = {"weights": FLOAT8 | {"dynamic": False} | changes, "input_activations": {"num_bits": 8}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("found", "block"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "static"}, (128, 64)),
        ({"quant_method": "fp8", "weight_block_size": None, "fmt": "e4m3"}, None),
        ({"quant_method": "fp8"}, None),
        (float_quantized(), (128, 128)),
        (float_quantized(strategy="channel", block_structure=None), None),
    ],
)
def test_fp8_is_read(found: dict[str, Any], block: tuple[int, int] | None) -> None:
    stored = read_formats(found, ["a.weight", "a.weight_scale_inv"])
    assert stored is not None
    [only] = stored.formats
    assert isinstance(only, Fp8)
    assert only.block == block
    assert stored.kept_as == ()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size must be two .*, not \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be two positive"),
        ({"quant_method": "fp8", "weight_block_size": [True, "a"]}, "weight_block_size must be two positive"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "weight_block_size must be two positive"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt 'e3m4' is not served"),
        (float_quantized(num_bits=4), "num_bits 4 is not served; served: 8"),
        (float_quantized(symmetric=False), "symmetric False"),
        (float_quantized(strategy="tensor_group"), "strategy 'tensor_group'"),
    ],
)
def test_other_fp8_is_refused(found: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_formats(found, ["a.weight_scale_inv"])


AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("found", "kept", "words"),
    [
        (AWQ, "int4", "AWQ gemm, 4 bits in groups of 128"),
        (AWQ | {"group_size": -1}, "int4", "AWQ gemm, 4 bits by output"),
        (AWQ | {"group_size": 16}, None, "AWQ gemm, 4 bits in groups of 16"),
        (GPTQ, "int4", "GPTQ version 1, 4 bits in groups of 128"),
        (GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8}, None, "GPTQ version 2, 8 bits in groups of 128"),
        (GPTQ | {"desc_act": True}, None, "GPTQ version 1, 4 bits in groups of 128, in any order"),
        (GPTQ | {"dynamic": {"-:.*visual.*": {}}}, "int4", "GPTQ version 1, 4 bits in groups of 128"),
        (section(group_size=96), "int4", "compressed-tensors pack-quantized, 4 bits in groups of 96, with zero points"),
        (section(num_bits=8, symmetric=True), None, "compressed-tensors pack-quantized, 8 bits in groups of 64"),
    ],
)
def test_what_is_kept_in_4_bits(found: dict[str, Any], kept: str | None, words: str) -> None:
    stored = read_formats(found, ["a.qweight", "a.weight_packed"])
    assert stored is not None
    assert (stored.kept_as, stored.described) == (() if kept is None else (kept,), words)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (AWQ | {"version": "gemv"}, "version 'gemv' is not served"),
        (AWQ | {"bits": 8}, "bits 8 is not served; served: 4"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"group_size": -2}, "group_size must be a positive integer, not -2"),
        (GPTQ | {"bits": 3}, "bits 3 is not served; served: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"desc_act": "yes"}, "desc_act 'yes'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 3}}}, "bits 3 is not served"),
        (GPTQ | {"dynamic": {"+:.*": 5}}, "dynamic must hold objects, not .*5"),
        (GPTQ | {"dynamic": 5}, "dynamic must hold objects, not 5"),
        (GPTQ | {"format": "gptq_p"}, "format 'gptq_p'"),
    ],
)
def test_other_awq_and_gptq_is_refused(found: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"quantization_config: {words}"):
        read_formats(found, ["a.qweight"])


def test_what_can_be_done_is_said() -> None:
    for found in ({"quant_method": "hqq"}, AWQ | {"version": "gemv"}, section(num_bits=3)):
        with pytest.raises(
            CheckpointError, match=r"is not served; served: .*; serve the model's files that aren't quant"
        ):
            read_formats(found, ["a.qweight"])
