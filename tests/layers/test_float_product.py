"""Products with weights in fp16, bfloat16 and float32: by the compiled kernels, built for this and for narrower
processors, and by FBGEMM and oneDNN."""

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers import native
from triptych.layers.float_product import bf16_product, float_product, half_product, has_bf16
from triptych.layers.kernel_variants import processor_maker
from triptych.layers.products import CompiledProduct, PanelLayout, Product, WeightKind, in_panels

SHAPES = [(64, 64), (41, 37), (5, 3), (1, 1), (100, 1024), (32, 1030), (2000, 700)]
"""[out, in]: whole and partial panels, several per thread and several threads."""
PACKS = [half_product, bf16_product, float_product]

Pack = Callable[[Tensor, Tensor | None], Product]


def rounded(pack: Pack, activations: Tensor) -> Tensor:
    """What the product takes activations as."""
    return activations.bfloat16().float() if pack is bf16_product else activations


def tolerance(pack: Pack) -> float:
    """Relative error of outputs whose sums are exact: oneDNN's bfloat16 ones are rounded."""
    return 2**-8 if pack is bf16_product and native.library() is None else 0


def left_out(product: Product) -> float:
    """What AMX leaves out of products with halves, as a part of the whole: the product of both smaller parts."""
    is_split = isinstance(product, CompiledProduct) and product.operands.kind == WeightKind.SPLIT_HALF
    return 2.0**-16 if is_split else 0


def whole(*shape: int) -> Tensor:
    """Small integers, whose products sum exactly in any order."""
    return torch.randint(-60, 61, shape).float()


def check_what_is_not_a_number(pack: Pack, tokens: int) -> None:
    torch.manual_seed(0)
    product = pack(torch.randn(41, 37), torch.randn(41))
    activations = torch.randn(tokens, 37)
    expected = product(activations)
    activations[2, 5] = torch.nan
    output = product(activations)
    assert output[2].isnan().all()
    others = [token for token in range(tokens) if token != 2]
    assert torch.equal(output[others], expected[others])


@pytest.mark.parametrize("pack", PACKS)
class Products:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_exact_where_sums_are(self, pack: Pack, shape: tuple[int, int], with_bias: bool) -> None:
        torch.manual_seed(0)
        weight, bias = whole(*shape) / 16, whole(shape[0]) / 8 if with_bias else None
        product = pack(weight, bias)
        for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25, 100):
            activations = whole(tokens, shape[1]) / 4
            output = product(activations)
            assert output.dtype == torch.float32
            expected = F.linear(activations, weight, bias)
            assert torch.allclose(output, expected, rtol=tolerance(pack), atol=0), tokens

    def test_as_near_as_float32_gets(self, pack: Pack) -> None:
        torch.manual_seed(0)
        weight, activations = torch.randn(70, 3000).bfloat16().float(), torch.randn(20, 3000)
        exact = rounded(pack, activations).double() @ weight.double().T
        product = pack(weight, None)
        error = (product(activations) - exact).norm() / exact.norm()
        assert error < 1e-6 + tolerance(pack) + left_out(product)

    def test_what_is_not_a_number_shows_in_its_own_token(self, pack: Pack) -> None:
        check_what_is_not_a_number(pack, 6)

    def test_tokens_that_lie_apart_and_none(self, pack: Pack) -> None:
        torch.manual_seed(0)
        product, activations = pack(torch.randn(41, 37), None), torch.randn(7, 80)[:, 3:40]
        assert torch.equal(product(activations), product(activations.contiguous()))
        columns = torch.randn(37, 7).T
        assert torch.equal(product(columns), product(columns.contiguous()))
        assert product(torch.empty(0, 37)).shape == (0, 41)

    def test_another_width_is_an_error(self, pack: Pack) -> None:
        product = pack(torch.randn(41, 37), None)
        with pytest.raises((ValueError, RuntimeError)):
            product(torch.randn(2, 38))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_weights_in_other_dtypes(self, pack: Pack, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        weight, bias, activations = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype), torch.randn(3, 32)
        assert torch.equal(pack(weight, bias)(activations), pack(weight.float(), bias.float())(activations))

    def test_a_weight_of_which_nothing_is_contiguous(self, pack: Pack) -> None:
        weight, activations = torch.randn(74, 96)[::2, ::3], torch.randn(3, 32)
        assert torch.equal(pack(weight, None)(activations), pack(weight.contiguous(), None)(activations))


class TestCompiled(Products):
    @pytest.fixture(autouse=True)
    def _by_these_kernels(self, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: kernels)

    @pytest.mark.parametrize("tokens", [7, 129, 600])
    @pytest.mark.parametrize("shape", [(70, 130), (3000, 65), (40, 3000), (40, 9000)])
    def test_a_token_comes_to_the_same_in_any_batch(self, pack: Pack, tokens: int, shape: tuple[int, int]) -> None:
        torch.manual_seed(0)
        product, activations = pack(torch.randn(shape), torch.randn(shape[0])), torch.randn(tokens, shape[1])
        torch.set_num_threads(3)
        together = product(activations)
        torch.set_num_threads(1)
        assert torch.equal(together, torch.cat([product(row[None]) for row in activations]))
        assert torch.equal(together.flip(0), product(activations.flip(0)))

    def test_what_is_not_a_number_shows_in_its_own_token_of_many(self, pack: Pack) -> None:
        check_what_is_not_a_number(pack, 40)

    def test_every_half_is_widened_exactly(self, pack: Pack) -> None:
        """Zeros of both signs, the subnormal, and those that aren't finite."""
        if pack is bf16_product:
            pytest.skip("these weights are no halves")
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
        found = pack(halves[:, None], None)(torch.ones(1, 1))[0]
        assert torch.equal(found.isnan(), halves.isnan())
        assert torch.equal(found[~found.isnan()], halves[~halves.isnan()].float())

    @pytest.mark.parametrize("tokens", [1, 16, 40])
    def test_halves_below_128_are_exact(self, pack: Pack, tokens: int) -> None:
        """These have codes where there is AMX: zeros, and the subnormal too, in each place of a tile."""
        if pack is bf16_product:
            pytest.skip("these weights are no halves")
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
        halves = halves[halves.abs() < 128]
        halves = halves[: len(halves) // 70 * 70].view(-1, 70)
        found = pack(halves, None)(torch.eye(70)[:tokens])
        assert torch.equal(found, halves.float().T[:tokens])

    @pytest.mark.parametrize("inputs", [1, 31, 130, 3000])
    def test_error_is_bounded(self, pack: Pack, inputs: int) -> None:
        if pack is bf16_product:
            pytest.skip("see TestBf16")
        torch.manual_seed(0)
        weight, activations = torch.randn(70, inputs).half(), torch.randn(70, inputs) * torch.rand(inputs).mul(9).exp()
        exact = activations.double() @ weight.double().T
        magnitude = activations.double().abs() @ weight.double().abs().T
        product = pack(weight, None)
        bound = 2 * left_out(product) + (inputs + 32) * 2.0**-24  # parts are rounded, too
        assert ((product(activations) - exact).abs() <= bound * magnitude).all()

    def test_what_fp16_does_not_hold_saturates(self, pack: Pack) -> None:
        weight = torch.tensor([[1e6], [-1e6], [torch.inf], [1 + 2**-12]])
        kept: dict[Pack, list[float]] = {
            half_product: [65504, -65504, 65504, 1],
            bf16_product: weight[:, 0].bfloat16().tolist(),
            float_product: weight[:, 0].tolist(),
        }
        assert pack(weight, None)(torch.ones(1, 1)).tolist() == [kept[pack]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("largest", [127.94, -127.94, 128, -128, torch.inf, torch.nan])
def test_halves_are_multiplied_by_amx_up_to_its_limit(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, largest: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(native, "library", lambda: kernels)
    weight = torch.randn(41, 37)
    weight[20, 5] = largest
    weight = weight.to(dtype)
    product = half_product(weight, None)
    assert isinstance(product, CompiledProduct)
    fits = kernels.halves_are_tiled() and weight.half().abs().max() < 128
    assert product.operands.kind == (WeightKind.SPLIT_HALF if fits else WeightKind.HALF)


def all_float_patterns() -> Tensor:
    """float32 [N]: every exponent and sign, with the fractions that are hard to round to bfloat16."""
    fractions = torch.tensor(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x18001, 0x7F8000, 0x7FFFFF]
    )
    bits = (torch.arange(-256, 256)[:, None] << 23) | fractions
    return bits.flatten().to(torch.int32).view(torch.float32)


class TestBf16:
    @pytest.fixture(autouse=True)
    def _by_these_kernels(self, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: kernels)

    def test_activations_are_rounded_to_the_nearest(self) -> None:
        """Numbers below the smallest normal one count as zero."""
        given = all_float_patterns()
        expected = given.bfloat16().float()
        expected[given.abs() < torch.finfo(torch.float32).tiny] = 0
        found = bf16_product(torch.ones(1, 1), None)(given[:, None])[:, 0]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found[~found.isnan()], expected[~found.isnan()])

    def test_every_weight_is_exact(self) -> None:
        weights = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
        weights = weights[weights.isnan() | (weights == 0) | (weights.abs() >= torch.finfo(torch.float32).tiny)]
        found = bf16_product(weights[:, None], None)(torch.ones(1, 1))[0]
        assert torch.equal(found.isnan(), weights.isnan())
        assert torch.equal(found[~weights.isnan()], weights[~weights.isnan()].float())

    @pytest.mark.parametrize("inputs", [2, 37, 3000])
    def test_error_of_sums_is_bounded(self, inputs: int) -> None:
        """Also where large terms cancel: the bound is that of one rounding in float32 per term, relative to the sum of
        magnitudes."""
        torch.manual_seed(0)
        weight, activations = (
            torch.randn(70, inputs).bfloat16(),
            torch.randn(20, inputs) * torch.rand(inputs).mul(9).exp(),
        )
        terms = activations.bfloat16().double()
        exact, magnitude = terms @ weight.double().T, terms.abs() @ weight.double().abs().T
        error = (bf16_product(weight, None)(activations) - exact).abs()
        assert (error <= (inputs + 2) * 2.0**-24 * magnitude).all()


def test_instructions_for_bf16_are_used_where_they_are_faster() -> None:
    if native.library() is None:
        pytest.skip("there is no C compiler")
    features, maker = native.usable_features(), processor_maker()
    assert has_bf16() == ("avx512_bf16" in features and ("amx_tile" in features or maker != "GenuineIntel"))


def test_without_kernels_there_is_no_fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    assert not has_bf16()


class TestLibraries(Products):
    @pytest.fixture(autouse=True)
    def _without_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "library", lambda: None)


@pytest.mark.parametrize("shape", [(64, 64), (41, 37), (5, 3), (70_000, 20)])
@pytest.mark.parametrize(("outputs", "inputs", "multiple"), [(32, 1, 1), (16, 4, 4), (32, 2, 32)])
def test_in_panels(shape: tuple[int, int], outputs: int, inputs: int, multiple: int) -> None:
    weight = torch.randn(shape)
    panels = in_panels(weight, PanelLayout(outputs, inputs, multiple, torch.float32))
    depth = math.ceil(shape[1] / multiple) * multiple
    assert panels.shape == (math.ceil(shape[0] / outputs), depth // inputs, outputs, inputs)
    full = panels.transpose(1, 2).flatten(2).flatten(0, 1)
    assert torch.equal(full[: shape[0], : shape[1]], weight)
    assert full[shape[0] :].count_nonzero() == full[:, shape[1] :].count_nonzero() == 0
