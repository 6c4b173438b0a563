"""Every variant of the kernels that this processor supports: products and attention. The tests of each kernel say more,
with fewer variants."""

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.layers.conftest import load_variant
from tests.support.block_weights import random_blocks
from tests.support.paged_cases import BATCHES, SHAPES, check, make_case, make_options
from triptych.layers import native
from triptych.layers.attention.base import PLAIN
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.block_product import blocks_product
from triptych.layers.block_weight import BlockType
from triptych.layers.float_product import bf16_product, float_product, half_product
from triptych.layers.int4 import int4_product
from triptych.layers.int8 import int8_product
from triptych.layers.kernel_variants import Variant, processor_features

ERRORS = {float_product: 1e-6, half_product: 2**-11, bf16_product: 2**-7, int8_product: 2**-6, int4_product: 2**-3}
"""Largest relative error of outputs, from rounding of both operands."""


def variants() -> list[Any]:
    """The first one and the last one in every run, since compiling each takes long; all in the slow suite."""
    usable = native.usable_variants()
    others = [pytest.param(one, marks=pytest.mark.slow) for one in usable[1:-1]]
    return [*usable[:1], *others, *usable[1:][-1:]]


@pytest.fixture(params=variants(), ids=lambda variant: variant.name)
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


@pytest.mark.usefixtures("variant")
def test_products_with_blocks() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(40, 512)
    for kind in BlockType:
        weight = random_blocks(kind, 70, 512)
        product, exact = blocks_product([weight], None), tokens.double() @ weight.dequantized().double().T
        assert product is not None
        assert (product(tokens) - exact).norm() < 2**-6 * exact.norm(), kind
        assert torch.equal(product(tokens), torch.cat([product(rows) for rows in tokens.split(1)])), kind


def test_attention(variant: ctypes.CDLL) -> None:
    shape, cpu = SHAPES[0], torch.device("cpu")
    for dtype in (torch.float32, torch.float16):
        for options in (PLAIN, make_options(shape)["together"]):
            case = make_case(shape, *BATCHES["mixed"], torch.float32, dtype, cpu, options=options)
            check(case, PagedAttention(variant))


REFUSED = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
code = lambda *instructions: b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
filters = code(
    (0x20, 0, 0, 0),  # load the number of the system call
    (0x15, 0, 1, 158),  # unless it is arch_prctl,
    (0x06, 0, 0, 0x50001),  # fail with EPERM;
    (0x06, 0, 0, 0x7FFF0000),  # allow it
)
program = struct.pack("HxxxxxxQ", len(filters) // 8, ctypes.addressof(buffer := ctypes.create_string_buffer(filters)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0

import torch
from triptych.layers import native
from triptych.layers.float_product import bf16_product, half_product
from triptych.layers.int4 import int4_product
from triptych.layers.int8 import int8_product

torch.manual_seed(0)
assert "amx needs amx_tile" in native.kernels().description, native.kernels().description
weight, tokens = torch.randint(-9, 9, (70, 130)).float(), torch.randint(-9, 9, (40, 130)).float()
expected = tokens @ weight.T
assert torch.equal(bf16_product(weight, None)(tokens), expected)
assert torch.equal(half_product(weight, None)(tokens), expected)
assert (int8_product(weight, None)(tokens) - expected).norm() < 2**-6 * expected.norm()
assert (int4_product(weight, None)(tokens) - expected).norm() < 0.125 * expected.norm()
"""
"""Loads the kernels where a filter of system calls refuses the tiles."""


@pytest.mark.skipif("amx_tile" not in processor_features(), reason="this processor has no AMX")
def test_without_permission_for_tiles_vectors_are_used() -> None:
    if native.library() is None:
        pytest.skip("there is no C compiler")
    subprocess.run([sys.executable, "-c", REFUSED], check=True, env=os.environ.copy(), timeout=120)
