"""The Triton kernels in Triton's interpreter, which runs them with numpy on CPU tensors. ``tests/gpu`` runs the same
cases on a GPU, and those in bf16, whose products the interpreter computes from the bits as if they were integers."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.paged_cases import BATCHES, OPTIONS, SHAPES, Shape, check, make_case, make_options

pytest.importorskip("triton", reason="Triton isn't installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs these on it", allow_module_level=True)

from triptych.layers.attention.base import AttentionOptions
from triptych.layers.attention.triton_backend import TritonAttention, num_splits, tile_tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        pytest.param(shape, batch, marks=[] if shape == SHAPES[0] or batch == "mixed" else pytest.mark.slow)
        for shape in SHAPES
        for batch in BATCHES
    ],
    ids=str,
)
def test_batches(shape: Shape, batch: str) -> None:
    check(make_case(shape, *BATCHES[batch], torch.float32, torch.float32, CPU), TritonAttention(num_processors=8))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(torch.float16, torch.float16), (torch.float32, torch.bfloat16)], ids=str
)
def test_dtypes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check(make_case(SHAPES[0], *BATCHES["mixed"], dtype, cache_dtype, CPU), TritonAttention(num_processors=8))


@pytest.mark.parametrize(
    ("option", "num_processors"),
    [
        ("together", 1),
        *(pytest.param(one, 8, marks=[] if "together" in one else pytest.mark.slow) for one in OPTIONS),
    ],
)
def test_options(option: str, num_processors: int) -> None:
    """With contexts in several parts, and in one."""
    options = make_options(SHAPES[0])[option]
    case = make_case(SHAPES[0], *BATCHES["mixed"], torch.float32, torch.float32, CPU, options=options)
    check(case, TritonAttention(num_processors))


@pytest.mark.parametrize("num_processors", [1, 8])
def test_latents(num_processors: int) -> None:
    """As in DeepSeek: values are most of the keys, and query heads are more than a program has."""
    options = AttentionOptions(scale=0.1, value_dim=64)
    lens = BATCHES["mixed"]
    case = make_case(Shape(40, 1, 80, 16), *lens, torch.float32, torch.float32, CPU, options=options)
    check(case, TritonAttention(num_processors))


@pytest.mark.parametrize(
    "num_processors", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(132, marks=pytest.mark.slow)]
)
def test_a_context_in_any_number_of_parts(num_processors: int) -> None:
    """132: 32 parts of contexts that fill one of them, or a few."""
    check(make_case(SHAPES[1], *BATCHES["decodes"], torch.float32, torch.float32, CPU), TritonAttention(num_processors))


@settings(max_examples=8)
@given(
    lens=st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 20]), st.integers(0, 40)), min_size=1, max_size=5),
    group=st.integers(1, 5),
    dim=st.sampled_from([8, 24, 32]),
    page_size=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_any_batch(lens: list[tuple[int, int]], group: int, dim: int, page_size: int, seed: int) -> None:
    query_lens = [new for new, _ in lens]
    kv_lens = [new + past for new, past in lens]
    shape = Shape(2 * group, 2, dim, page_size)
    check(make_case(shape, query_lens, kv_lens, torch.float32, torch.float32, CPU, seed), TritonAttention(4))


def test_a_tile_that_no_prompt_uses_reads_nothing() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.attend_padding"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_few_programs_split_contexts_and_many_do_not() -> None:
    assert [num_splits(programs, 132) for programs in (1, 8, 64, 256, 10_000)] == [32, 32, 16, 4, 1]


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(8, 8, 64), (16, 8, 32), (6, 2, 16), (64, 4, 4), (80, 1, 4)])
def test_a_tile_has_rows_for_its_tokens_query_heads(heads: int, kv_heads: int, tokens: int) -> None:
    assert tile_tokens(heads, kv_heads, 128, 2) == tokens
    assert tile_tokens(heads, kv_heads, 128, 4) == max(1, tokens // 2)
