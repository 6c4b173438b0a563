"""Products with 4-bit weights: by the compiled kernel, built for this and for narrower processors, and without it."""

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.grouped_weight import (
    GroupedWeight,
    concatenate_grouped,
    quantize_groups,
    quantize_with_offsets,
)
from triptych.layers.int4 import grouped_product, int4_product
from triptych.layers.linear import QUANTIZED_FORMATS
from triptych.layers.stored.memory import MeasuringFormat
from triptych.layers.stored.pack_quantized import stored_tensors

SHAPES = [(64, 64), (41, 37), (5, 3), (1, 1), (100, 1024), (33, 1030)]
"""[out, in]: whole and partial panels, groups and words."""


KINDS = ["middle", "zeros", "offsets"]
"""Where groups have their zero."""


def random_weight(shape: tuple[int, int], group: int, kind: str) -> GroupedWeight:
    """All numbers, with the extremes, of scales that are powers of two: sums are exact in float32."""
    outputs, inputs = shape
    groups = -(-inputs // group)
    words = torch.randint(-(2**31), 2**31, (outputs, -(-inputs // 8)), dtype=torch.int64).to(torch.int32)
    words[0] = -1
    scales = 2.0 ** torch.randint(-8, -5, (outputs, groups)) * (1 - 2 * torch.randint(0, 2, (outputs, groups)))
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if kind == "zeros" else None
    offsets = (torch.randint(-64, 65, (outputs, groups)) / 256).half() if kind == "offsets" else None
    return GroupedWeight(words, scales.half(), zeros, inputs, group, offsets)


def quantized(weight: Tensor, kind: str) -> GroupedWeight:
    return quantize_with_offsets(weight) if kind == "offsets" else quantize_groups(weight, has_zeros=kind == "zeros")


def reference(weight: GroupedWeight) -> Tensor:
    """The weight in float64, number by number."""
    words, scales = weight.words.numpy().view(np.uint32), weight.scales.double().numpy()
    columns = np.arange(weight.inputs)
    levels = (words[:, columns // 8] >> (4 * (columns % 8)).astype(np.uint32) & 15).astype(np.float64)
    groups = columns // weight.group
    if weight.offsets is not None:
        return torch.from_numpy(levels * scales[:, groups] + weight.offsets.double().numpy()[:, groups])
    zeros = np.float64(8) if weight.zeros is None else weight.zeros.numpy()[:, groups]
    return torch.from_numpy((levels - zeros) * scales[:, groups])


def whole(tokens: int, width: int) -> Tensor:
    """Tokens that rounding doesn't change."""
    values = torch.randint(-127, 128, (tokens, width))
    values[:, ::32] = 127
    return values * 2.0 ** torch.arange(tokens)[:, None]


class Product:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("group", [32, 64, 128])
    @pytest.mark.parametrize("kind", KINDS)
    def test_exactly_the_product_of_what_is_rounded(self, shape: tuple[int, int], group: int, kind: str) -> None:
        torch.manual_seed(0)
        weight, bias = random_weight(shape, group, kind), torch.randn(shape[0])
        for tokens, some in ((1, None), (3, bias), (8, bias), (13, bias), (37, None)):
            activations = whole(tokens, shape[1])
            expected = activations.double() @ reference(weight).T + (0 if some is None else some)
            output = grouped_product(weight, some)(activations)
            assert output.dtype == torch.float32
            assert torch.equal(output, expected.float())

    @pytest.mark.parametrize("sign", [-1, 1])
    @pytest.mark.parametrize("word", [0, -1])
    def test_the_largest_sums(self, sign: int, word: int) -> None:
        """Some processors add the products of a block in 16 bits."""
        weight = GroupedWeight(
            torch.full((40, 128), word, dtype=torch.int32), torch.ones(40, 8, dtype=torch.float16), None, 1024, 128
        )
        level = 7 if word else -8
        activations = torch.full((9, 1024), sign * 127.0)
        assert torch.equal(grouped_product(weight, None)(activations), torch.full((9, 40), sign * level * 1024.0 * 127))

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_token_comes_to_the_same_in_any_batch(self, kind: str) -> None:
        torch.manual_seed(0)
        product = grouped_product(quantized(torch.randn(70, 200), kind), torch.randn(70))
        activations = torch.randn(300, 200) * torch.rand(300, 1) * 100
        alone = torch.cat([product(row[None]) for row in activations])
        torch.set_num_threads(3)
        for tokens in (*range(1, 41), 300):
            assert torch.equal(product(activations[:tokens]), alone[:tokens])
        assert torch.equal(product(activations.flip(0)), alone.flip(0))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("place", [0, 36])
    def test_what_is_not_a_number_shows_in_its_own_token(self, value: float, place: int) -> None:
        torch.manual_seed(0)
        product = int4_product(torch.randn(41, 37), torch.randn(41))
        activations = torch.randn(12, 37)
        expected = product(activations)
        activations[2, place] = value
        output = product(activations)
        assert output[2].isnan().all()
        others = [0, 1, *range(3, 12)]
        assert torch.equal(output[others], expected[others])

    @pytest.mark.parametrize("group", [32, 64, 128])
    @pytest.mark.parametrize("kind", KINDS)
    def test_rounding_is_to_the_nearest_of_a_scale_of_each_block(self, group: int, kind: str) -> None:
        """An input that is much larger than others costs precision in its own block alone."""
        torch.manual_seed(0)
        weight, activations = random_weight((40, 256), group, kind), torch.randn(6, 256)
        activations[:, 70] = 1000.0
        blocks = activations.unflatten(1, (-1, min(group, 64)))
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        rounded = ((blocks / scales).round() * scales).flatten(1)
        output = grouped_product(weight, None)(activations)
        expected = rounded.double() @ reference(weight).T
        assert (output - expected).norm() < 1e-5 * expected.norm()

    def test_zeros_and_all_but_zeros_come_to_the_bias(self) -> None:
        weight, bias = torch.randn(41, 37), torch.randn(41)
        weight[3] = 0
        activations = torch.zeros(3, 37)
        activations[1] = 1e-42
        activations[2] = -1e-35
        assert torch.equal(int4_product(weight, bias)(activations), bias.expand(3, -1))
        assert torch.equal(int4_product(torch.zeros(5, 37), None)(torch.randn(2, 37)), torch.zeros(2, 5))

    def test_tokens_that_lie_apart_and_none(self) -> None:
        torch.manual_seed(0)
        product, activations = int4_product(torch.randn(41, 37), None), torch.randn(9, 80)[:, 3:40]
        assert torch.equal(product(activations), product(activations.contiguous()))
        assert product(torch.empty(0, 37)).shape == (0, 41)


class TestCompiled(Product):
    @pytest.fixture(autouse=True)
    def _library(self, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: kernels)

    def test_another_width_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="38 inputs for a layer of 37"):
            int4_product(torch.randn(41, 37), None)(torch.randn(2, 38))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler_the_product_is_nearly_the_same(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch.manual_seed(0)
    weight, bias, activations = quantized(torch.randn(41, 96), kind), torch.randn(41), torch.randn(6, 96)
    monkeypatch.setattr(native, "library", lambda: None)
    output = grouped_product(weight, bias)(activations)
    blocks = activations.unflatten(1, (-1, 32))
    scales = blocks.abs().amax(dim=2, keepdim=True) / 127
    expected = ((blocks / scales).round() * scales).flatten(1) @ reference(weight).float().T + bias
    assert (output - expected).norm() < 1e-3 * expected.norm()
    activations[2, 5] = torch.inf
    found = grouped_product(weight, bias)(activations)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4, 5]], output[[0, 1, 3, 4, 5]])


class TestQuantization:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("has_zeros", [False, True])
    def test_dequantized_is_the_nearest_of_a_groups_levels(self, shape: tuple[int, int], has_zeros: bool) -> None:
        torch.manual_seed(0)
        weight = torch.randn(shape) + 0.5
        quantized = quantize_groups(weight, has_zeros=has_zeros)
        found = quantized.dequantized()
        assert torch.equal(found.double(), reference(quantized))
        scales = quantized.scales.float().repeat_interleave(32, dim=1)[:, : shape[1]]
        zeros = 8 if quantized.zeros is None else quantized.zeros.float().repeat_interleave(32, dim=1)[:, : shape[1]]
        low, high = ((level - zeros) * scales for level in (0, 15))
        nearest = weight.clamp(torch.minimum(low, high), torch.maximum(low, high))
        assert ((found - nearest).abs() <= 0.5001 * scales.abs()).all()

    def test_what_4_bits_represent_stays(self) -> None:
        levels = torch.arange(-8, 8.0).repeat(5, 8) * torch.tensor([1, -0.25, 0, 2**-8, 100])[:, None]
        assert torch.equal(quantize_groups(levels).dequantized(), levels)
        shifted = torch.arange(-3, 13.0).repeat(2, 8) * torch.tensor([[1], [2**-6]])
        assert torch.equal(quantize_groups(shifted, has_zeros=True).dequantized(), shifted)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_with_offsets_each_weight_has_the_nearest_level(self, shape: tuple[int, int]) -> None:
        torch.manual_seed(0)
        weight = torch.randn(shape) + 0.5
        found = quantize_with_offsets(weight)
        torch.testing.assert_close(found.dequantized().double(), reference(found), rtol=1e-6, atol=1e-6)
        assert found.offsets is not None
        scales, offsets = (one.float().repeat_interleave(32, 1)[:, : shape[1]] for one in (found.scales, found.offsets))
        ends = offsets, offsets + 15 * scales
        nearest = weight.clamp(torch.minimum(*ends), torch.maximum(*ends))
        assert ((found.dequantized() - nearest).abs() <= 0.501 * scales.abs()).all()

    def test_what_4_bits_and_an_offset_represent_stays(self) -> None:
        scales, offsets = torch.tensor([[1], [0.25], [2**-8], [0]]), torch.tensor([[-3.5], [2], [0], [7]])
        lines = torch.arange(16.0).repeat(4, 6) * scales + offsets
        assert torch.equal(quantize_with_offsets(lines).dequantized(), lines)

    def test_zero_points_and_small_groups_are_more_accurate(self) -> None:
        weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
        errors = [
            (quantize_groups(weight, group, has_zeros=has_zeros).dequantized() - weight).norm() / weight.norm()
            for group, has_zeros in ((32, True), (32, False), (64, False), (128, False))
        ]
        errors.insert(0, (quantize_with_offsets(weight).dequantized() - weight).norm() / weight.norm())
        assert errors == sorted(errors)
        assert errors[-1] < 0.1

    def test_scales_and_offsets_are_finite(self) -> None:
        for magnitude in (1e-9, 1e-4, 1, 1e7):
            found = quantize_with_offsets(torch.randn(8, 64) * magnitude)
            assert found.offsets is not None
            assert found.scales.isfinite().all()
            assert found.offsets.isfinite().all()

    def test_scales_are_numbers_of_bfloat16(self) -> None:
        for magnitude in (1e-9, 1e-6, 1e-4, 1, 1e7):
            quantized = quantize_groups(torch.randn(8, 64) * magnitude, has_zeros=True)
            assert torch.equal(quantized.scales.bfloat16().half(), quantized.scales)
            assert quantized.scales.isfinite().all()

    def test_nan_stays_in_its_output(self) -> None:
        weight = torch.randn(6, 64)
        weight[2, 40] = torch.nan
        for kind in KINDS:
            found = grouped_product(quantized(weight, kind), None)(torch.randn(1, 64))
            assert found.isnan().tolist() == [[row == 2 for row in range(6)]]

    @pytest.mark.parametrize("kind", KINDS)
    def test_smaller_groups_are_the_same_weight(self, kind: str) -> None:
        weight = random_weight((20, 300), 128, kind)
        for part in (slice(0, 64), slice(32, 300), slice(192, 256)):
            found = weight.columns(part)
            assert found.group < 128
            assert torch.equal(found.dequantized(), weight.dequantized()[:, part])

    def test_weights_with_offsets_are_not_concatenated_with_others(self) -> None:
        pair = [random_weight((8, 64), 32, kind) for kind in ("offsets", "middle")]
        for weights in (pair, pair[::-1]):
            with pytest.raises(ValueError, match="weights with offsets can't be concatenated with others"):
                concatenate_grouped(weights)

    def test_weights_with_offsets_have_no_stored_form(self) -> None:
        with pytest.raises(ValueError, match="pack-quantized has no offsets"):
            stored_tensors(random_weight((8, 64), 32, "offsets"), torch.bfloat16)

    @pytest.mark.parametrize("kind", KINDS)
    def test_memory_is_measured_as_it_is_taken(self, kind: str) -> None:
        dense = torch.randn(64, 96)
        weight = quantized(dense, kind)
        tensors = (weight.words, weight.scales, weight.zeros, weight.offsets)
        taken = sum(one.nbytes for one in tensors if one is not None)
        measuring = MeasuringFormat(QUANTIZED_FORMATS["int4"])
        measuring.grouped(weight, None, torch.device("cpu"))
        assert measuring.num_bytes == taken
        if kind == "offsets":  # of weights that are quantized when they are loaded
            measuring.linear(dense, None, torch.device("cpu"))
            assert measuring.num_bytes == 2 * taken

    @pytest.mark.parametrize("kind", KINDS)
    def test_parts_are_parts_of_the_whole(self, kind: str) -> None:
        weight = quantized(torch.randn(20, 150), kind)
        whole = weight.dequantized()
        halves = weight.rows(slice(0, 7)), weight.rows(slice(7, 20))
        assert torch.equal(concatenate_grouped(halves).dequantized(), whole)
        for part in (slice(0, 64), slice(64, 150), slice(32, 96)):
            assert torch.equal(weight.columns(part).dequantized(), whole[:, part])
            activations = torch.randn(2, part.stop - part.start)
            alone = grouped_product(weight.columns(part), None)(activations)
            torch.testing.assert_close(alone, activations @ whole[:, part].T, rtol=0.1, atol=0.2)
        for part in (slice(0, 40), slice(40, 150)):
            with pytest.raises(ConfigError, match="aren't whole groups of 32"):
                weight.columns(part)


def test_too_many_inputs_for_int4_are_rejected() -> None:
    with pytest.raises(ConfigError, match="65536 inputs, not 65537"):
        int4_product(torch.zeros(1, 2**16 + 1), None)
