"""Layers in one or two calls of the compiled kernels against the same layers module by module, which other tests
compare with transformers."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.backbones import BACKBONES
from tests.support.checkpoints import load_adapter
from tests.support.families import PLAIN
from tests.support.forward import Pool, Prompt, Running, Wanted, layers_of, step
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.layers import native, pointwise
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.attention.cpu import CpuAttention
from triptych.layers.blocks import DecoderLayer, layers_in_one_call
from triptych.layers.compiled_layer import FinishLayer
from triptych.layers.compiled_layers import RunLayers
from triptych.layers.decoder import Decoder
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS, PlainFormat, RMSNorm, WeightFormat
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import Activation, gate_and_mul
from triptych.layers.products import CompiledProduct
from triptych.layers.tower_layer import MLP

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
    decoder.run_layers = layers_in_one_call(decoder.layers, decoder.config.cache_groups.of_layer)
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


WITH_CACHES = [
    ("float16", torch.float16),
    ("float32", torch.float32),
    ("bfloat16", torch.float16),
    ("int8", torch.float16),
    ("int4", torch.float16),
    ("float16", torch.float32),
]
IN_ALL_FORMATS = ("qwen2", "qwen3_moe", "glm4v")
"""In every run, but for a cache of another format. Layers of other families differ in what no format changes: they are
compared in float16."""


@pytest.mark.parametrize(
    ("name", "weights", "cache_dtype"),
    [
        pytest.param(
            name, *one, marks=[] if one in WITH_CACHES[: 5 if name in IN_ALL_FORMATS else 1] else pytest.mark.slow
        )
        for name in (*PLAIN, "qwen2 window")
        for one in WITH_CACHES
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
    are_plain = all(isinstance(layer.mlp, GatedMLP) and layer.per_layer is None for layer in layers_of(decoder))
    assert (decoder.run_layers is not None) == are_plain
    decoder.run_layers = None
    assert all(torch.equal(one, other) for one, other in zip(found, answers(decoder, cache_dtype), strict=True))
    for layer in layers_of(decoder):
        layer.compiled_attend = layer.compiled_finish = None
    assert all(torch.equal(one, other) for one, other in zip(found, answers(decoder, cache_dtype), strict=True))
    torch.set_num_threads(3)
    again = answers(load(folders(name), FORMATS[weights], backend), cache_dtype)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


SHAPES_OF_MLP = ((96, 64), (40, 96))
"""Outputs and inputs of the two products."""


@pytest.mark.parametrize("format_name", ["bfloat16", "int8"])
@pytest.mark.parametrize(("inner", "is_gated"), [(96, True), (80, True), (80, False)])
def test_mlp_of_many_tokens_is_bit_identical(format_name: str, inner: int, is_gated: bool) -> None:
    """In one tile or several, incomplete ones among them, and in more than one block; widths in whole panels or not."""
    generator, pack = torch.Generator().manual_seed(0), FORMATS[format_name].pack_linear

    def product(outputs: int, inputs: int) -> CompiledProduct:
        made = pack(torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator))
        assert isinstance(made, CompiledProduct)
        return made

    norm = RMSNorm(torch.rand(64, generator=generator), 1e-6)
    output, up, down = product(64, 48), product(inner * (1 + is_gated), 64), product(64, inner)
    layer = FinishLayer(norm, output, up, down, Activation.GELU_TANH)
    for tokens in (16, 17, 49, 600):
        hidden, attended = torch.randn(tokens, 64, generator=generator), torch.randn(tokens, 48, generator=generator)
        between = hidden + output(attended)
        first = up(norm(between))
        activated = gate_and_mul(first, Activation.GELU_TANH) if is_gated else Activation.GELU_TANH(first)
        assert torch.equal(layer(hidden, attended), between + down(activated))


@pytest.mark.parametrize("format_name", FORMATS)
def test_mlp_by_itself_is_bit_identical(format_name: str) -> None:
    """Of tokens between which there may be gaps."""
    torch.manual_seed(0)
    up, down = (FORMATS[format_name].linear(torch.randn(shape), torch.randn(shape[0]), CPU) for shape in SHAPES_OF_MLP)
    mlp = MLP(up, Activation.GELU, down)
    assert mlp.compiled is not None
    for tokens in (0, 1, 16, 17, 300):
        hidden = torch.randn(tokens, 80)[:, :64]
        assert torch.equal(mlp(hidden), down(Activation.GELU(up(hidden))))
    with pytest.raises(ValueError, match="65 inputs"):
        mlp(torch.randn(3, 65))


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


def test_layers_run_in_one_call_unless_something_is_in_between(
    checkpoint_folder: Callable[..., Path], backend: CpuAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deepstack features come between the first layers; a new cache has other addresses."""
    decoder = load(checkpoint_folder(), FORMATS["float32"], backend)
    last, deep, width = len(decoder.layers), decoder.config.num_deepstack_layers, decoder.config.hidden_size
    assert decoder.run_layers is not None
    together: list[range] = []
    run = RunLayers.__call__

    def recorded(self: RunLayers, some: range, *given: Any) -> Tensor:
        together.append(some)
        return run(self, some, *given)

    monkeypatch.setattr(RunLayers, "__call__", recorded)
    text = Prompt(
        torch.arange(5), torch.arange(5, dtype=torch.float64).expand(3, -1), torch.arange(0),
        torch.zeros(0, width * (1 + deep)),
    )  # fmt: skip
    media = replace(text, media_index=torch.arange(2), media_embeddings=torch.ones(2, width * (1 + deep)))
    cases: list[tuple[Prompt, Wanted, range]] = [
        (text, "all", range(last)),
        (text, "last", range(last - 1)),
        (media, "all", range(deep, last)),
    ]
    for prompt, wanted, expected in cases:
        found = step(Pool(decoder), [(Running(prompt), 5)], wanted)
        assert together == [expected]
        decoder.run_layers, kept = None, decoder.run_layers
        assert torch.equal(found, step(Pool(decoder), [(Running(prompt), 5)], wanted))
        decoder.run_layers = kept
        together.clear()
