"""Every variant of the kernels that this processor supports: products and attention. The tests of each kernel say more,
with fewer variants."""

import ctypes

import pytest
import torch

from tests.layers.conftest import load_variant, usable_variants
from tests.support.paged_cases import BATCHES, SHAPES, check, make_case
from triptych.layers import native
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.float_product import bf16_product, float_product, half_product
from triptych.layers.int8 import int8_product
from triptych.layers.kernel_variants import Variant

ERRORS = {float_product: 1e-6, half_product: 2**-11, bf16_product: 2**-7, int8_product: 2**-6}
"""Largest relative error of outputs, from rounding of both operands."""


@pytest.fixture(params=usable_variants(), ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    given: Variant = request.param
    library = load_variant(given)
    monkeypatch.setattr(native, "library", lambda: library)
    return library


@pytest.mark.usefixtures("variant")
def test_products_are_near_and_the_same_in_any_batch() -> None:
    torch.manual_seed(0)
    weight, bias, activations = torch.randn(70, 300), torch.randn(70), torch.randn(50, 300)
    exact = activations.double() @ weight.double().T + bias
    for pack, bound in ERRORS.items():
        product = pack(weight, bias)
        output = product(activations)
        assert (output - exact).norm() < bound * exact.norm(), pack
        assert torch.equal(output, torch.cat([product(rows) for rows in activations.split(7)])), pack


def test_attention(variant: ctypes.CDLL) -> None:
    for dtype in (torch.float32, torch.float16):
        check(
            make_case(SHAPES[0], *BATCHES["mixed"], torch.float32, dtype, torch.device("cpu")), PagedAttention(variant)
        )
