"""What ``config.json`` says of quantized weights: what is served is read, and all else is refused by name."""

from copy import deepcopy
from typing import Any

import pytest

from triptych.checkpoint.config_files import quantization_section
from triptych.errors import CheckpointError
from triptych.layers.stored.compressed_tensors import GroupQuantization, PackQuantized, quantization_config
from triptych.layers.stored.format import StoredFormat
from triptych.layers.stored.fp8 import Fp8
from triptych.layers.stored.registry import read_format

PACKED = ["model.layers.0.mlp.down_proj.weight_packed", "lm_head.weight"]


def read_quantization(config: dict[str, Any], tensors: list[str]) -> StoredFormat | None:
    return read_format(quantization_section(config), tensors)


def section(**changes: Any) -> dict[str, Any]:
    """A served section with changes of its group's weights."""
    found = quantization_config(GroupQuantization(64, has_zeros=True), ["lm_head"])
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_what_is_written_is_read(group: int, has_zeros: bool) -> None:
    quantization = GroupQuantization(group, has_zeros)
    written = quantization_config(quantization, ["lm_head"])
    assert read_quantization({"quantization_config": written}, PACKED) == PackQuantized(quantization)
    assert read_quantization({"text_config": {"quantization_config": written}}, PACKED) == PackQuantized(quantization)


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
        ({"num_bits": 8}, "num_bits 8 is not served; served: 4"),
        ({"num_bits": 4.0}, "num_bits 4.0"),
        ({"type": "float"}, "type 'float'"),
        ({"strategy": "channel"}, "strategy 'channel'"),
        ({"group_size": 48}, "group_size 48 is not served; served: 32, 64, 128"),
        ({"group_size": [32]}, r"group_size \[32\]"),
        ({"group_size": None}, "group_size None"),
        ({"symmetric": 1}, "symmetric 1"),
        ({"dynamic": True}, "dynamic True"),
        ({"actorder": "group"}, "actorder 'group'"),
    ],
)
def test_other_weights_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"quantization_config: {words}"):
        read_quantization({"quantization_config": section(**changes)}, PACKED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq' is not served; served: 'compressed-tensors'"),
        ({"quant_method": None}, "quant_method None"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"config_groups": None}, "config_groups must be objects"),
        ({"config_groups": {}}, "config_groups must be objects"),
        ({"config_groups": {"group_0": 7}}, "config_groups must be objects"),
        ({"config_groups": {"group_0": {"weights": []}}}, "weights must be an object"),
        ({"config_groups": {"group_0": {"weights": {}, "input_activations": {"num_bits": 8}}}}, "input_activations"),
    ],
)
def test_other_formats_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_quantization({"quantization_config": section() | changes}, PACKED)


def test_layers_of_different_groups_are_refused() -> None:
    both = section()
    both["config_groups"]["group_1"] = deepcopy(both["config_groups"]["group_0"])
    expected = PackQuantized(GroupQuantization(64, has_zeros=True))
    assert read_quantization({"quantization_config": both}, PACKED) == expected
    both["config_groups"]["group_1"]["weights"]["group_size"] = 128
    with pytest.raises(CheckpointError, match="config_groups with different weights"):
        read_quantization({"quantization_config": both}, PACKED)


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
    stored = read_format(found, ["a.weight", "a.weight_scale_inv"])
    assert isinstance(stored, Fp8)
    assert stored.block == block
    assert stored.kept_as is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size must be two .*, not \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be two positive"),
        ({"quant_method": "fp8", "weight_block_size": [True, "a"]}, "weight_block_size must be two positive"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt 'e3m4' is not served"),
        (float_quantized(num_bits=4), "num_bits 4 is not served; served: 8"),
        (float_quantized(symmetric=False), "symmetric False"),
        (float_quantized(strategy="tensor_group"), "strategy 'tensor_group'"),
        (float_quantized() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_other_fp8_is_refused(found: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_format(found, ["a.weight_scale_inv"])
