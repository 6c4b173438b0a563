"""A layer in two calls of the compiled kernels against the same layer module by module, which other tests compare with
transformers."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.forward import Pool, Prompt, Running, Wanted, layers_of, step
from tests.support.tiny import TINY, make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.layers import native, pointwise
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.blocks import DecoderLayer
from triptych.layers.decoder import Decoder
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS, PlainFormat, WeightFormat
from triptych.layers.mlp import GatedMLP

CPU = torch.device("cpu")
Folders = Callable[[str], Path]

FORMATS = {
    "float16": WEIGHT_FORMATS["float16"],
    "float32": WEIGHT_FORMATS["float32"],
    "bfloat16": WEIGHT_FORMATS["bfloat16"],
    "int8": QUANTIZED_FORMATS["int8"],
    "int4": QUANTIZED_FORMATS["int4"],
}


@pytest.fixture(autouse=True)
def backend(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> CpuAttention:
    """Use the same kernels everywhere."""
    library = pointwise.declared(kernels)
    monkeypatch.setattr(native, "library", lambda: kernels)
    monkeypatch.setattr(pointwise, "compiled_kernels", lambda: library)
    return CpuAttention(PagedAttention(kernels))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Make a checkpoint folder of a family, or of one whose later layers have windows."""

    def make(name: str) -> Path:
        family, _, window = name.partition(" ")
        tiny = BACKBONES.get(family, family)
        return make_tiny(tmp_path_factory.mktemp("tiny"), tiny, config={"use_sliding_window": bool(window)})

    return cache(make)


def load(folder: Path, weights: WeightFormat, backend: CpuAttention | None = None) -> Decoder:
    """Use ``backend``'s kernels instead of those that the process has built."""
    decoder = load_adapter(folder).load_decoder(Checkpoint(folder), weights, CPU)
    for layer in layers_of(decoder):
        layer.mixer.backend = backend or layer.mixer.backend
        layer.compiled_attend, layer.compiled_finish = layer.in_compiled_calls()
    return decoder


def is_compiled(layer: DecoderLayer) -> tuple[bool, bool]:
    return layer.compiled_attend is not None, layer.compiled_finish is not None


def answers(decoder: Decoder, cache_dtype: torch.dtype) -> list[Tensor]:
    """Return the logits of a few steps that mix chunks of prompts and single tokens, and then the whole cache."""
    generator = torch.Generator().manual_seed(0)
    nothing = torch.arange(0), torch.zeros(0, decoder.config.hidden_size * (1 + decoder.config.num_deepstack_layers))
    sequences = [
        Running(
            Prompt(
                torch.randint(3, 200, (length,), generator=generator),
                torch.arange(length, dtype=torch.float64).expand(3, -1),
                *nothing,
            )
        )
        for length in (60, 45, 20)
    ]
    pool = Pool(decoder, dtype=cache_dtype)
    for tensor in pool.cache.tensors:
        tensor.zero_()
    steps = [(37, 1, 19), (1, 40, 1), (1, 1, 0), (1, 0, 0), (20, 3, 0)]
    kinds: tuple[Wanted, ...] = ("all", "odd", "last", "all", "last")
    found = [
        step(pool, [(sequence, count) for sequence, count in zip(sequences, counts, strict=True) if count], wanted)
        for counts, wanted in zip(steps, kinds, strict=True)
    ]
    assert [sequence.left for sequence in sequences] == [0, 0, 0]
    return [*found, *pool.cache.tensors]


@pytest.mark.parametrize("name", [*TINY, "qwen2 window"])
@pytest.mark.parametrize(
    ("weights", "cache_dtype"),
    [
        ("float16", torch.float16),
        ("float16", torch.float32),
        ("float32", torch.float32),
        ("bfloat16", torch.float16),
        ("int8", torch.float16),
        ("int4", torch.float16),
    ],
)
def test_compiled_layer_is_bit_identical(
    folders: Folders, name: str, weights: str, cache_dtype: torch.dtype, backend: CpuAttention
) -> None:
    """Families differ in biases, norms of heads, windows and experts."""
    decoder = load(folders(name), FORMATS[weights], backend)
    has_windows = "window" in name or name.startswith("gemma")
    assert any(layer.mixer.options.window for layer in layers_of(decoder)) == has_windows
    for layer in layers_of(decoder):
        assert is_compiled(layer) == (True, isinstance(layer.mlp, GatedMLP))
    found = answers(decoder, cache_dtype)
    for layer in layers_of(decoder):
        layer.compiled_attend = layer.compiled_finish = None
    assert all(torch.equal(one, other) for one, other in zip(found, answers(decoder, cache_dtype), strict=True))
    torch.set_num_threads(3)
    again = answers(load(folders(name), FORMATS[weights], backend), cache_dtype)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize(
    ("name", "weights"),
    [("gemma4-e", "float16"), *(pytest.param("gemma4-e", one, marks=pytest.mark.slow) for one in FORMATS)],
)
def test_layers_with_more_parts_are_bit_identical(
    folders: Folders, name: str, weights: str, backend: CpuAttention
) -> None:
    """Norms of outputs, embeddings per layer and caches of earlier layers."""
    test_compiled_layer_is_bit_identical(folders, name, weights, torch.float16, backend)


def test_unsupported_layers_run_module_by_module(
    folders: Folders, backend: CpuAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("qwen2")
    decoder = load(folder, PlainFormat(torch.bfloat16), backend)
    assert {is_compiled(layer) for layer in layers_of(decoder)} == {(False, False)}
    decoder = load(folder, FORMATS["float32"], CpuAttention(None))
    assert {is_compiled(layer) for layer in layers_of(decoder)} == {(False, True)}
    monkeypatch.setattr(native, "library", lambda: None)
    assert {is_compiled(layer) for layer in layers_of(load(folder, FORMATS["float16"], backend))} == {(False, False)}


def test_pages_beyond_the_cache_are_rejected(folders: Folders, backend: CpuAttention) -> None:
    decoder = load(folders("qwen2"), FORMATS["float32"], backend)
    pool = Pool(decoder, num_pages=2)
    prompt = Prompt(
        torch.arange(5), torch.arange(5, dtype=torch.float64).expand(3, -1), torch.arange(0),
        torch.zeros(0, decoder.config.hidden_size),
    )  # fmt: skip
    pool.free = [0, 2]
    with pytest.raises(IndexError, match="beyond the 2 pages"):
        step(pool, [(Running(prompt), 5)])
