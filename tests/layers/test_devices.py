"""Discovery of devices and their capabilities, with simulated GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.checkpoint.safetensors_header import TensorInfo
from triptych.config import EngineConfig
from triptych.errors import ConfigError, StartError
from triptych.layers import devices
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.devices import (
    attention_for,
    check_ranks,
    find_device,
    free_bytes,
    kv_dtype,
    stored_dtype,
    tower_format,
    used_bytes,
    weight_format,
)
from triptych.layers.linear import PackedFormat, PlainFormat

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def tensors(**num_bytes: int) -> dict[str, TensorInfo]:
    return {dtype: TensorInfo(Path(), dtype, (size,), size) for dtype, size in num_bytes.items()}


@pytest.mark.parametrize(
    ("name", "count", "device"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_device_setting_resolves_to_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert find_device(name) == torch.device(device)


@pytest.mark.parametrize(("name", "count", "words"), [("cuda", 0, "finds no GPU"), ("cuda:2", 2, "last one is cuda:1")])
def test_missing_device_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, count: int, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(StartError, match=f"--device {name}: .*{words}"):
        find_device(name)


def test_auto_on_a_gpu_is_the_checkpoints_dtype() -> None:
    assert weight_format(EngineConfig(), GPU, tensors(BF16=100, F32=10)) == PlainFormat(torch.bfloat16)
    assert weight_format(EngineConfig(), GPU, tensors(F32=100)) == PlainFormat(torch.float32)
    assert weight_format(EngineConfig(dtype="float16"), GPU, tensors(BF16=1)) == PlainFormat(torch.float16)
    with pytest.raises(ConfigError, match="F64"):
        stored_dtype(tensors(F64=3, BF16=2))


@pytest.mark.parametrize(
    ("settings", "stored", "has_bf16", "names"),
    [
        ({}, "BF16", True, ("bfloat16", "bfloat16")),
        ({}, "BF16", False, ("float16", "float16")),
        ({}, "F16", True, ("float16", "float16")),
        ({}, "F32", True, ("float16", "float16")),
        ({}, "F8_E4M3", True, ("float16", "float16")),
        ({"quantization": "int8"}, "BF16", True, ("int8", "bfloat16")),
        ({"quantization": "int8"}, "BF16", False, ("int8", "float16")),
        ({"quantization": "int4"}, "BF16", True, ("int4", "bfloat16")),
        ({"dtype": "float16"}, "BF16", True, ("float16", "float16")),
        ({"dtype": "bfloat16"}, "F32", False, ("bfloat16", "bfloat16")),
        ({"dtype": "float32"}, "BF16", True, ("float32", "float32")),
    ],
)
def test_formats_of_cpus(
    settings: dict[str, Any],
    stored: str,
    has_bf16: bool,
    names: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "has_bf16", lambda: has_bf16)
    weights = weight_format(EngineConfig(**settings), CPU, tensors(**{stored: 100, "I32": 10}))
    assert isinstance(weights, PackedFormat)
    assert (weights.linear_dtype, weights.high_precision_dtype) == names


@pytest.mark.parametrize(
    ("settings", "towers", "decoder"),
    [
        ({}, ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        ({"quantization": "int8"}, ("bfloat16", "bfloat16"), ("int8", "bfloat16")),
        ({"encoder_quantization": "int8"}, ("int8", "bfloat16"), ("bfloat16", "bfloat16")),
        ({"encoder_quantization": "int8", "dtype": "float32"}, ("int8", "float32"), ("float32", "float32")),
        ({"encoder_quantization": "int8", "quantization": "int8"}, ("int8", "bfloat16"), ("int8", "bfloat16")),
    ],
)
def test_towers_and_decoder_have_formats_of_their_own(
    settings: dict[str, Any], towers: tuple[str, str], decoder: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_bf16", lambda: True)
    for choose, names in ((tower_format, towers), (weight_format, decoder)):
        chosen = choose(EngineConfig(**settings), CPU, tensors(BF16=1))
        assert (chosen.linear_dtype, chosen.high_precision_dtype) == names
        assert chosen.bf16_attention == (names[1] == "bfloat16")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_is_for_cpus(quantization: str) -> None:
    message = f"--quantization {quantization} is for CPUs only; this instance runs on cuda:0"
    with pytest.raises(ConfigError, match=message):
        weight_format(EngineConfig(quantization=quantization), GPU, tensors(BF16=1))


def test_int8_towers_are_for_cpus() -> None:
    with pytest.raises(ConfigError, match="--encoder-quantization int8 is for CPUs only; this instance runs on cuda:0"):
        tower_format(EngineConfig(encoder_quantization="int8"), GPU, tensors(BF16=1))
    assert tower_format(EngineConfig(), GPU, tensors(BF16=1)) == PlainFormat(torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float16),
        ({"dtype": "float16"}, torch.float16),
        ({"quantization": "int8"}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16"}, torch.float16),
        ({"kv_cache_dtype": "float32"}, torch.float32),
        ({"dtype": "float32", "kv_cache_dtype": "float16"}, torch.float16),
        ({"quantization": "int8", "kv_cache_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, torch.int8),
    ],
)
def test_kv_cache_on_cpus_defaults_to_fp16_unless_weights_are_wider(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    engine = EngineConfig(**settings)
    assert kv_dtype(engine, CPU, weight_format(engine, CPU, tensors(BF16=1))) == dtype


def test_kv_cache_on_gpus_has_the_dtype_of_activations() -> None:
    weights = weight_format(EngineConfig(), GPU, tensors(BF16=1))
    for name in ("auto", "bfloat16"):
        assert kv_dtype(EngineConfig(kv_cache_dtype=name), GPU, weights) == torch.bfloat16
    for name in ("float16", "int8"):
        with pytest.raises(ConfigError, match=rf"--kv-cache-dtype {name}: on cuda:0 .* of activations, bfloat16"):
            kv_dtype(EngineConfig(kv_cache_dtype=name), GPU, weights)


def test_cpu_attention_and_memory() -> None:
    assert isinstance(attention_for(CPU), CpuAttention)
    assert free_bytes(CPU) > 0
    assert used_bytes(CPU) > 0


def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_ranks(CPU, 8)
    check_ranks(GPU, 4)
    check_ranks(torch.device("cuda", 2), 2)
    with pytest.raises(StartError, match="--tensor-parallel-size 3 on cuda:2 takes the GPUs cuda:2 to cuda:4"):
        check_ranks(torch.device("cuda", 2), 3)
