"""The Triton kernels on a GPU: the cases that run in the interpreter elsewhere, in all dtypes, and larger ones."""

from dataclasses import replace

import pytest
import torch

from tests.support.paged_cases import BATCHES, OPTIONS, SHAPES, Shape, check, make_case, make_options
from triptych.layers.devices import attention_for

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LARGE = {
    "a long context": ([1], [20_000]),
    "decodes of a service": ([1] * 32, [100 + 61 * index for index in range(32)]),
    "a long prompt": ([700], [700]),
    "a chunk of a long prompt": ([300], [2500]),
    "a full step": ([1] * 12 + [200, 90], [10 + 150 * index for index in range(12)] + [200, 1000]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
def test_batches(gpu: torch.device, dtype: torch.dtype, shape: Shape, lens: tuple[list[int], list[int]]) -> None:
    check(make_case(shape, *lens, dtype, dtype, gpu), attention_for(gpu))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("shape", [Shape(32, 8, 128, 16), Shape(64, 4, 128, 16), Shape(16, 16, 256, 32)], ids=str)
def test_sizes_of_real_models(
    gpu: torch.device, dtype: torch.dtype, shape: Shape, lens: tuple[list[int], list[int]]
) -> None:
    check(make_case(shape, *lens, dtype, dtype, gpu), attention_for(gpu))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(gpu: torch.device, dtype: torch.dtype, option: str) -> None:
    for shape in SHAPES:
        options = make_options(shape)[option]
        sinks = None if options.sinks is None else options.sinks.to(gpu)
        for lens in (*BATCHES.values(), LARGE["a chunk of a long prompt"], LARGE["decodes of a service"]):
            check(make_case(shape, *lens, dtype, dtype, gpu, options=replace(options, sinks=sinks)), attention_for(gpu))


def test_cache_in_another_dtype(gpu: torch.device) -> None:
    check(make_case(SHAPES[0], *BATCHES["mixed"], torch.float32, torch.bfloat16, gpu), attention_for(gpu))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16, 20])
def test_groups(gpu: torch.device, group: int) -> None:
    shape = Shape(2 * group, 2, 64, 16)
    check(make_case(shape, *BATCHES["mixed"], torch.bfloat16, torch.bfloat16, gpu), attention_for(gpu))
