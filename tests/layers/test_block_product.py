"""Products with weights in the blocks of GGUF files: by the compiled kernel, built for this and for narrower
processors, and without it."""

import ctypes

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tests.support.block_weights import random_blocks
from triptych.layers import native
from triptych.layers.block_product import blocks_product
from triptych.layers.block_weight import BlockType, BlockWeight, concatenate_blocks
from triptych.layers.linear import WEIGHT_FORMATS, ConcatenatedLinear, PackedLinear
from triptych.layers.products import Product
from triptych.layers.stored.linears import linear_of
from triptych.layers.stored.memory import MeasuringFormat

CPU = torch.device("cpu")
TYPES = list(BlockType)
NAMES = [kind.name for kind in TYPES]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def whole(tokens: int, width: int) -> Tensor:
    """Tokens that rounding doesn't change."""
    values = torch.randint(-127, 128, (tokens, width))
    values[:, ::32] = 127
    return values * 2.0 ** torch.arange(tokens)[:, None]


def product_of(*parts: BlockWeight, bias: Tensor | None = None) -> Product:
    product = blocks_product(parts, bias)
    assert product is not None
    return product


@pytest.mark.parametrize("kind", TYPES, ids=NAMES)
def test_dequantized_as_the_library_does(kind: BlockType) -> None:
    weight = random_blocks(kind, 7, 512)
    expected = torch.from_numpy(dequantize(weight.raw.numpy(), GGMLQuantizationType[kind.name]))
    assert torch.equal(weight.dequantized(), expected)
    rows = torch.tensor([5, 0])
    assert torch.equal(weight.rows(rows).dequantized(), expected[rows])
    for part in (slice(0, 256), slice(256, 512), slice(32, 64), slice(8, 500)):
        some = weight.columns(part)
        assert torch.equal(some.dequantized(), expected[:, part])
        assert some.shape == (7, part.stop - part.start)
        assert (some.part is None) == (part.start % kind.inputs == 0 == part.stop % kind.inputs)
    pair = concatenate_blocks([weight, weight.rows(slice(2, 4))])
    assert torch.equal(pair.dequantized(), torch.cat((expected, expected[2:4])))


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _library(self, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: kernels)

    @pytest.mark.parametrize("shape", [(70, 512), (32, 256), (3, 1024)])
    @pytest.mark.parametrize("kind", TYPES, ids=NAMES)
    def test_the_product_of_what_is_rounded(self, kind: BlockType, shape: tuple[int, int]) -> None:
        weight, bias, tokens = random_blocks(kind, *shape), torch.randn(shape[0]), whole(9, shape[1])
        product = product_of(weight, bias=bias)
        output, expected = product(tokens), tokens.double() @ weight.dequantized().double().T + bias
        assert (output - expected).norm() < 1e-6 * expected.norm()
        for size in (1, 2, 4):
            assert torch.equal(torch.cat([product(some) for some in tokens.split(size)]), output)

    @pytest.mark.parametrize("kind", TYPES, ids=NAMES)
    def test_a_token_comes_to_the_same_in_any_batch(self, kind: BlockType) -> None:
        """Whether it is multiplied by vectors or by tiles, in whole and partial parts of the inputs."""
        inputs = 768 if kind.inputs > 32 else 544
        product = product_of(random_blocks(kind, 70, inputs), bias=torch.randn(70))
        tokens = torch.randn(300, inputs) * torch.rand(300, 1) * 100
        alone = torch.cat([product(row[None]) for row in tokens])
        for number in (*range(2, 41, 3), 300):
            assert torch.equal(product(tokens[:number]), alone[:number])

    def test_extremes_fit_the_sums(self) -> None:
        """The largest numbers with activations of one sign."""
        tokens = torch.full((3, 512), 127.0)
        tokens[1] *= -1
        for kind in TYPES:
            weight = random_blocks(kind, 40, 512)
            halves = weight.raw.view(40, -1, kind.num_bytes)
            sizes = {"Q6_K": slice(0, 192), "Q4_K": slice(16, None), "Q5_K": slice(16, None)}
            for byte in (0, 255):
                ends = 4 if kind.name.endswith("_1") else 2
                halves[:, :, sizes.get(kind.name, slice(ends, None))] = byte if kind != BlockType.Q8_0 else byte ^ 128
                expected = tokens.double() @ weight.dequantized().double().T
                assert (product_of(weight)(tokens) - expected).norm() <= 1e-6 * expected.norm(), (kind, byte)

    def test_a_scale_for_each_32_inputs_of_a_token(self) -> None:
        weight, tokens = random_blocks(BlockType.Q6_K, 40, 256), torch.randn(6, 256)
        tokens[:, 70] = 1000.0
        blocks = tokens.unflatten(1, (-1, 32))
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        expected = ((blocks / scales).round() * scales).flatten(1).double() @ weight.dequantized().double().T
        assert (product_of(weight)(tokens) - expected).norm() < 1e-4 * expected.norm()

    def test_a_token_that_is_not_finite_is_nan_alone(self) -> None:
        product, tokens = product_of(random_blocks(BlockType.Q4_K, 33, 256)), torch.randn(5, 256)
        expected = product(tokens)
        for strange in (torch.nan, torch.inf):
            tokens[2, 5] = strange
            found = product(tokens)
            assert found[2].isnan().all()
            assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])

    def test_unlike_types_are_one_product(self) -> None:
        parts = [random_blocks(kind, 64, 256) for kind in TYPES] + [random_blocks(BlockType.Q5_K, 5, 256)]
        bias, tokens = torch.randn(8 * 64 + 5), torch.randn(40, 256)
        apart = [product_of(one, bias=some)(tokens) for one, some in zip(parts, bias.split(64), strict=True)]
        assert torch.equal(product_of(*parts, bias=bias)(tokens), torch.cat(apart, dim=1))

    def test_layers_of_parts(self) -> None:
        """Types, and parts that the kernels don't take together, or at all."""
        weights, tokens = WEIGHT_FORMATS["float32"], whole(3, 512)
        parts = [random_blocks(kind, 64, 512) for kind in (BlockType.Q4_K, BlockType.Q4_K, BlockType.Q6_K)]
        expected = tokens @ torch.cat([one.dequantized() for one in parts]).T
        joined = linear_of(parts, None, weights, CPU)
        assert isinstance(joined, PackedLinear)
        assert (joined(tokens) - expected).norm() < 1e-5 * expected.norm()
        uneven = linear_of([parts[0].rows(slice(0, 9)), parts[2]], torch.randn(73), weights, CPU)
        assert isinstance(uneven, ConcatenatedLinear)
        assert uneven(tokens).shape == (3, 73)
        cut = linear_of([one.columns(slice(8, 500)) for one in parts], None, weights, CPU)
        expected = tokens[:, 8:500] @ torch.cat([one.dequantized()[:, 8:500] for one in parts]).T
        assert (cut(tokens[:, 8:500]) - expected).norm() < 1e-5 * expected.norm()


def test_without_a_compiler_weights_are_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    weight, bias, tokens = random_blocks(BlockType.Q5_K, 41, 256), torch.randn(41), torch.randn(6, 256)
    expected = tokens @ weight.dequantized().T + bias
    assert (product_of(weight, bias=bias)(tokens) - expected).norm() < 1e-3 * expected.norm()


def test_memory_is_measured_as_the_file_takes() -> None:
    measuring = MeasuringFormat(WEIGHT_FORMATS["float16"])
    parts = [random_blocks(kind, 32, 256) for kind in (BlockType.Q4_K, BlockType.Q6_K)]
    measuring.blocks(parts, None, CPU)
    assert measuring.num_bytes == 32 * (144 + 210)
