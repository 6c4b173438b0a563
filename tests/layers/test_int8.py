"""Products with int8 weights: by the compiled kernel, built for this and for narrower processors, and by oneDNN."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from triptych.errors import ConfigError
from triptych.layers import native
from triptych.layers.int8 import BLOCK, Int8Weight, int8_product, rotated, stored_int8_product

SHAPES = [(64, 64), (41, 37), (5, 3), (1, 1), (100, 1024), (32, 1030), (700, 64)]
"""[out, in]: whole and partial panels, and few enough inputs for exact sums in float32."""


def whole(rows: int, width: int, largest: int, scale: float) -> Tensor:
    """Rows that quantization doesn't change: rotated, they are integers up to ``largest`` times a power of two. Of the
    last block, if it isn't whole, one value isn't zero."""
    values = torch.randint(-largest, largest + 1, (rows, width // BLOCK * BLOCK))
    values[:, :1] = largest
    rest = torch.zeros(rows, width % BLOCK)
    if rest.numel():
        rest[torch.arange(rows), torch.randint(rest.shape[1], (rows,))] = largest * BLOCK**0.5
    return torch.cat((rotated(values), rest * (1 - 2 * torch.randint(2, (rows, 1)))), dim=1) * scale


class Product:
    """``largest`` is the largest quantized activation."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 13])
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_exactly_the_product_of_what_is_rounded(
        self, largest: int, shape: tuple[int, int], tokens: int, with_bias: bool
    ) -> None:
        torch.manual_seed(0)
        weight, bias = whole(*shape, 127, 2**-10), torch.randn(shape[0]) if with_bias else None
        activations = whole(tokens, shape[1], largest, 0.25) * 2.0 ** torch.arange(tokens)[:, None]
        expected = activations.double() @ weight.double().T + (0 if bias is None else bias)
        output = int8_product(weight, bias)(activations)
        assert output.dtype == torch.float32
        assert torch.equal(output, expected.float())

    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_stored_weight_is_multiplied_as_it_is(self, largest: int, shape: tuple[int, int]) -> None:
        torch.manual_seed(0)
        values, scales = torch.randint(-127, 128, shape, dtype=torch.int8), 2.0 ** torch.randint(-9, 0, shape[:1])
        for tokens in (1, 5, 13):
            activations = torch.randint(-largest, largest + 1, (tokens, shape[1])).float()
            activations[:, 0] = largest
            expected = activations.double() @ (values * scales[:, None]).double().T
            output = stored_int8_product(Int8Weight(values, scales), None)(activations)
            assert torch.equal(output, expected.float())

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_the_largest_sums(self, largest: int, sign: int) -> None:
        """Also in adjacent inputs, whose products some processors add in 16 bits."""
        weight, activations = rotated(torch.full((40, 1024), 127)), rotated(torch.full((9, 1024), sign * largest))
        assert torch.equal(int8_product(weight, None)(activations), torch.full((9, 40), sign * 1024.0 * 127 * largest))

    def test_pairs_around_what_16_bits_hold(self, largest: int) -> None:
        """Neighbours whose magnitudes together are from 120 on, with the largest weights: some fit and some don't."""
        first, together = torch.meshgrid(torch.arange(largest + 1), torch.arange(120, 140), indexing="ij")
        second = (together - first).clamp(-largest, largest)
        pairs = torch.stack([first, second], dim=-1).reshape(largest + 1, -1).float()
        activations = torch.cat([torch.full((len(pairs), 2), float(largest)), pairs], dim=1)
        activations[::2] *= -1
        weight = torch.full((3, activations.shape[1]), 127.0) * torch.tensor([1, -1, 1])[:, None]
        weight[2, ::3] = -127.0
        assert torch.equal(int8_product(rotated(weight), None)(rotated(activations)), activations @ weight.T)

    def test_rounding_is_to_the_nearest_of_a_scale_of_each_token(self, largest: int) -> None:
        torch.manual_seed(0)
        activations = torch.randn(6, 256) * torch.tensor([1e-20, 1e-3, 1, 1e3, 1e20, 1])[:, None]
        expected = rotated(activations)
        error = (int8_product(rotated(torch.eye(256)), None)(activations) - expected).abs()
        scales = expected.abs().amax(dim=1) / largest
        assert (error <= 0.5001 * scales[:, None]).all()
        assert (error.amax(dim=1) > 0.4 * scales).all()

    def test_a_large_activation_costs_others_little_precision(self, largest: int) -> None:
        """One scale of a token that isn't rotated would leave these others 3 steps."""
        torch.manual_seed(0)
        weight, activations = torch.randn(64, 1024), torch.randn(5, 1024).clamp(-3, 3)
        activations[:, 500] = largest
        weight[:, 500] = 0
        expected = activations @ weight.T
        assert (int8_product(weight, None)(activations) - expected).norm() < 0.08 * expected.norm()

    @pytest.mark.parametrize("tokens", [7, 64, 345])
    def test_a_token_comes_to_the_same_in_any_batch(self, tokens: int) -> None:
        torch.manual_seed(0)
        product = int8_product(torch.randn(70, 130), torch.randn(70))
        activations = torch.randn(tokens, 130) * torch.rand(tokens, 1) * 100
        torch.set_num_threads(3)
        together = product(activations)
        torch.set_num_threads(1)
        assert torch.equal(together, torch.cat([product(row[None]) for row in activations]))
        assert torch.equal(together.flip(0), product(activations.flip(0)))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("place", [0, 36])
    def test_what_is_not_a_number_shows_in_its_own_token(self, value: float, place: int) -> None:
        torch.manual_seed(0)
        product = int8_product(torch.randn(41, 37), torch.randn(41))
        activations = torch.randn(6, 37)
        expected = product(activations)
        activations[2, place] = value
        output = product(activations)
        assert output[2].isnan().all()
        others = [0, 1, 3, 4, 5]
        assert torch.equal(output[others], expected[others])

    def test_zeros_and_all_but_zeros_come_to_the_bias(self) -> None:
        weight, bias = torch.randn(41, 37), torch.randn(41)
        weight[3] = 0
        activations = torch.zeros(3, 37)
        activations[1] = 1e-42
        activations[2] = -1e-35
        assert torch.equal(int8_product(weight, bias)(activations), bias.expand(3, -1))
        assert torch.equal(int8_product(weight, None)(activations[:1]), torch.zeros(1, 41))

    def test_tokens_that_lie_apart_and_none(self) -> None:
        torch.manual_seed(0)
        product, activations = int8_product(torch.randn(41, 37), None), torch.randn(7, 80)[:, 3:40]
        assert torch.equal(product(activations), product(activations.contiguous()))
        columns = torch.randn(37, 7).T
        assert torch.equal(product(columns), product(columns.contiguous()))
        assert product(torch.empty(0, 37)).shape == (0, 41)

    def test_another_width_is_an_error(self) -> None:
        product = int8_product(torch.randn(41, 37), None)
        with pytest.raises(ValueError, match="38 inputs for a layer of 37"):
            product(torch.randn(2, 38))

    def test_a_weight_in_bfloat16_and_a_bias(self) -> None:
        torch.manual_seed(0)
        weight, bias, activations = torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16(), torch.randn(3, 32)
        output = int8_product(weight, bias)(activations)
        assert torch.equal(output, int8_product(weight.float(), bias.float())(activations))


class TestCompiled(Product):
    @pytest.fixture(autouse=True)
    def largest(self, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr(native, "library", lambda: kernels)
        return 127


class TestOneDnn(Product):
    @pytest.fixture(autouse=True)
    def largest(self, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr(native, "library", lambda: None)
        return 63

    def test_onednn_is_exact_on_processors_without_vnni(self) -> None:
        code = """
import torch
from triptych.layers.int8 import Int8Weight, OneDnnInt8Product
product = OneDnnInt8Product(Int8Weight(torch.full((40, 1024), 127, dtype=torch.int8), torch.ones(40)), None)
for sign in (1, -1):
    assert torch.equal(product(torch.full((9, 1024), sign * 63.0)), torch.full((9, 40), sign * 1024.0 * 127 * 63))
"""
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"})


@pytest.mark.parametrize("width", [1, 63, 64, 200])
def test_rotated_twice_is_as_before_and_products_stay(width: int) -> None:
    torch.manual_seed(0)
    one, other = torch.randn(3, width), torch.randn(4, width)
    assert rotated(one).shape == (3, -(-width // BLOCK) * BLOCK)
    torch.testing.assert_close(rotated(rotated(one))[:, :width], one)
    torch.testing.assert_close(rotated(one) @ rotated(other).T, one @ other.T, rtol=0, atol=1e-4)


def test_too_many_inputs_for_int8_are_rejected() -> None:
    with pytest.raises(ConfigError, match="65536 inputs, not 65537"):
        int8_product(torch.zeros(1, 2**16 + 1), None)
