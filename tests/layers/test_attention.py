"""The CPU attention backend against attention written out in full."""

import ctypes
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.paged_cases import (
    BATCHES,
    OPTIONS,
    SHAPES,
    TOLERANCES,
    Shape,
    check,
    make_case,
    make_options,
    unwritten,
    written_out,
)
from triptych.layers import native
from triptych.layers.attention import compiled
from triptych.layers.attention.base import PLAIN, AttentionBatch, AttentionOptions, PageRun, leading_run
from triptych.layers.attention.cpu import CpuAttention, read_pages
from triptych.layers.attention.kv_format import from_stored, to_stored
from triptych.layers.rounding import saturating_cast

PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM = 4, 2, 6, 8
CPU = torch.device("cpu")


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("heads", [slice(0, KV_HEADS), slice(KV_HEADS, 2 * KV_HEADS)])
def test_packed_sequences(cache_dtype: torch.dtype, by_kernel: bool, heads: slice) -> None:
    """A whole prompt, a chunk in the middle of one, and single tokens; pages consecutive, scattered and reversed. The
    cache holds other ranks' heads too."""
    torch.manual_seed(0)
    query_lens, kv_lens = [5, 3, 1, 1], [5, 11, 9, 1]
    tables = [torch.tensor(pages) for pages in ([3, 4], [9, 1, 6], [12, 11, 10], [0, 7, 7])]
    everybodys = unwritten((2, 14, PAGE_SIZE, 2 * KV_HEADS), HEAD_DIM, cache_dtype)
    caches = everybodys[..., heads, :]
    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM)
    slots, expected, new = [], [], []
    for q, query_len, kv_len, table in zip(query.split(query_lens), query_lens, kv_lens, tables, strict=True):
        stored = to_stored(torch.randn(2, kv_len, KV_HEADS, HEAD_DIM), cache_dtype)
        rows = from_stored(stored, torch.float32)
        all_slots = table.repeat_interleave(PAGE_SIZE)[:kv_len] * PAGE_SIZE + torch.arange(kv_len) % PAGE_SIZE
        past = kv_len - query_len
        caches.flatten(1, 2)[:, all_slots[:past]] = stored[:, :past]
        slots.append(all_slots[past:])
        new.append(rows[:, past:])
        expected.append(written_out(q, *rows))
    key, value = torch.cat(new, dim=1)
    batch = AttentionBatch(query_lens, kv_lens, tables, torch.cat(slots))
    kernel = compiled.paged_attention() if by_kernel else None
    if by_kernel and kernel is None:
        pytest.skip("there is no C compiler")
    output = CpuAttention(kernel)(query, key, value, caches[0], caches[1], batch)
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-5, rtol=1e-5)
    caches.copy_(unwritten(caches.shape[:-1], HEAD_DIM, cache_dtype))
    assert from_stored(everybodys, torch.float32).isnan().all(), "nothing is written to heads that aren't ours"


@pytest.fixture
def kernel(kernels: ctypes.CDLL) -> compiled.PagedAttention:
    return compiled.PagedAttention(kernels)


WIDE = [Shape(16, 8, 128, 16), Shape(16, 1, 256, 40), Shape(16, 1, 256, 16)]

cache_dtypes = pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.int8], ids=str)


@cache_dtypes
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
def test_the_compiled_kernel(
    kernel: compiled.PagedAttention, shape: Shape, batch: str, cache_dtype: torch.dtype
) -> None:
    check(make_case(shape, *BATCHES[batch], torch.float32, cache_dtype, CPU), kernel)


@cache_dtypes
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE], ids=str)
def test_the_compiled_kernel_in_bf16(kernels: ctypes.CDLL, shape: Shape, batch: str, cache_dtype: torch.dtype) -> None:
    """As near as rounded operands allow; in float32 for decodes and on processors without bfloat16."""
    case = make_case(shape, *BATCHES[batch], torch.float32, cache_dtype, CPU)
    check(case, compiled.PagedAttention(kernels, in_bf16=True), TOLERANCES[torch.bfloat16])
    brief, whole = (
        compiled.PagedAttention(kernels, in_bf16)(
            case.query, case.key, case.value, case.caches[0], case.caches[1], case.batch
        )
        for in_bf16 in (True, False)
    )
    assert (brief - whole).norm() < 2**-7 * whole.norm()
    several = any(query_len > 1 for query_len in BATCHES[batch][0])
    can = bool(ctypes.c_int.in_dll(kernels, "attention_has_bf16").value)
    assert torch.equal(brief, whole) == (not (several and can))


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch_over_a_narrow_cache(shape: Shape, cache_dtype: torch.dtype) -> None:
    for lengths in BATCHES.values():
        check(make_case(shape, *lengths, torch.float32, cache_dtype, CPU), CpuAttention(None))


def numbers() -> Tensor:
    """All fp16 values, the midpoints between them, the float32 values next to each, and random float32 values."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    middles = (halves + halves.roll(1)) / 2
    bits = torch.cat([halves, middles]).view(torch.int32)
    other = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    found = torch.cat([bits, bits + 1, bits - 1, other.to(torch.int32)]).view(torch.float32)
    return found[: len(found) // 80 * 80]


def test_values_are_rounded_to_fp16(kernel: compiled.PagedAttention) -> None:
    """Values round to nearest and saturate at 65504; with a single key, the output is its value."""
    values = numbers().view(-1, 2, 40)
    ones, nothing = [1] * len(values), torch.zeros_like(values)
    batch = AttentionBatch(ones, ones, list(torch.arange(len(values)).split(1)), torch.arange(len(values)))
    expected = saturating_cast(values, torch.float16)
    assert not expected.isinf().any()
    assert torch.equal(expected.isnan(), values.isnan())
    for attend in (kernel, CpuAttention(None)):
        caches = torch.empty(2, len(values), 1, 2, 40, dtype=torch.float16)
        attend(nothing, values, nothing, caches[0], caches[1], batch)
        torch.testing.assert_close(caches[0, :, 0], expected, atol=0, rtol=0, equal_nan=True)
        attended = attend(nothing, nothing, values, caches[0], caches[1], batch)
        torch.testing.assert_close(caches[1, :, 0], expected, atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(attended, expected.float(), atol=0, rtol=0, equal_nan=True)


def heads_to_quantize(dim: int) -> Tensor:
    """Heads [n, 2, dim] of all magnitudes, with ties between whole numbers, zeros, and values that aren't finite."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(800, dim, generator=generator) * 2.0 ** torch.arange(-126, 74).repeat(4)[:, None]
    ties = torch.randint(-127, 127, (64, dim), generator=generator) + 0.5
    ties[:, 0] = 127
    odd = torch.randn(8, dim, generator=generator)
    odd[0] = 0
    odd[1] = -odd[1].abs()
    odd[2, 3], odd[3, dim - 1], odd[4, 0], odd[5] = torch.nan, torch.inf, -torch.inf, torch.nan
    odd[6, 1], odd[7, 2] = 3.4e38, 1e-45
    return torch.cat((heads, ties, odd)).view(-1, 2, dim)


@pytest.mark.parametrize("dim", [40, 128])
def test_heads_are_quantized_alike(kernel: compiled.PagedAttention, dim: int) -> None:
    """To the nearest of 255 steps of a head's own size, by kernel and PyTorch to the bit; with a single key, the output
    is its value. A head that isn't finite is NaN as a whole."""
    values = heads_to_quantize(dim)
    ones, nothing = [1] * len(values), torch.zeros_like(values)
    batch = AttentionBatch(ones, ones, list(torch.arange(len(values)).split(1)), torch.arange(len(values)))
    expected = to_stored(values, torch.int8)
    read = from_stored(expected, torch.float32)
    finite = values.isfinite().all(dim=-1)
    assert torch.equal(read.isnan().any(dim=-1), ~finite)
    largest = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    assert ((read - values).abs() <= largest * (0.5 + 1e-4) / 127)[finite].all()
    for attend in (kernel, CpuAttention(None)):
        caches = torch.empty(2, len(values), 1, 2, dim + 4, dtype=torch.int8)
        attend(nothing, values, nothing, caches[0], caches[1], batch)
        assert torch.equal(caches[0, :, 0], expected)
        attended = attend(nothing, nothing, values, caches[0], caches[1], batch)
        assert torch.equal(caches[1, :, 0], expected)
        torch.testing.assert_close(attended, read, atol=0, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("option", "cache_dtype"),
    [*((option, torch.float32) for option in OPTIONS), ("together", torch.float16), ("together", torch.int8)],
)
@pytest.mark.parametrize("in_bf16", [False, True])
def test_options(kernels: ctypes.CDLL, option: str, in_bf16: bool, cache_dtype: torch.dtype) -> None:
    kernel, tolerance = compiled.PagedAttention(kernels, in_bf16), TOLERANCES[torch.bfloat16] if in_bf16 else None
    for shape, lengths in zip([*SHAPES, SHAPES[0]], [*BATCHES.values(), BATCHES["mixed"]], strict=True):
        case = make_case(shape, *lengths, torch.float32, cache_dtype, CPU, options=make_options(shape)[option])
        check(case, kernel, tolerance)


@cache_dtypes
@pytest.mark.parametrize("heads", [40, 17])
@pytest.mark.parametrize("in_bf16", [False, True])
def test_latents(kernels: ctypes.CDLL, heads: int, in_bf16: bool, cache_dtype: torch.dtype) -> None:
    """Of DeepSeek's size, with more query heads than are processed together: in groups of ten, and one by one."""
    shape, options = Shape(heads, 1, 576, 16), AttentionOptions(scale=0.04, value_dim=512)
    case = make_case(shape, *BATCHES["mixed"], torch.float32, cache_dtype, CPU, options=options)
    check(case, compiled.PagedAttention(kernels, in_bf16), TOLERANCES[torch.bfloat16] if in_bf16 else None)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_by_pytorch(option: str) -> None:
    for dtype, lengths in itertools.product((torch.float32, torch.bfloat16), BATCHES.values()):
        case = make_case(SHAPES[0], *lengths, dtype, dtype, CPU, options=make_options(SHAPES[0])[option])
        check(case, CpuAttention(None))


@pytest.mark.parametrize(("size", "bound"), [(0.1, 1e-6), (10.0, 2e-6), (300.0, 1e-5)])
def test_soft_caps_are_exact_near_and_far_from_zero(kernel: compiled.PagedAttention, size: float, bound: float) -> None:
    """Two keys, whose values tell their weights apart."""
    scores = torch.linspace(-size, size, 64)
    query, key, value = torch.zeros(3, 128, 1, 8)
    query[1::2, 0, 0] = 1
    key[1::2, 0, 0] = scores
    value[1::2] = 1
    twos, slots = [2] * 64, torch.arange(128)
    batch = AttentionBatch(twos, twos, list(slots.split(2)), slots)
    caches = torch.empty(2, 128, 1, 1, 8)
    found = kernel(query, key, value, caches[0], caches[1], batch, AttentionOptions(scale=1.0, softcap=50.0))
    expected = (50 * (scores.double() / 50).tanh()).sigmoid().float()
    torch.testing.assert_close(found[1::2, 0, 0], expected, atol=0, rtol=bound)


def test_large_scores(kernel: compiled.PagedAttention) -> None:
    """Exponentials of these scores would overflow, and those of most others underflow."""
    for lengths in BATCHES.values():
        case = make_case(SHAPES[1], *lengths, torch.float32, torch.float32, CPU)
        case.query.mul_(30)
        attended = kernel(case.query, case.key, case.value, case.caches[0], case.caches[1], case.batch)
        expected = CpuAttention(None)(case.query, case.key, case.value, case.caches[0], case.caches[1], case.batch)
        torch.testing.assert_close(attended, expected, atol=1e-4, rtol=1e-4)


@cache_dtypes
@pytest.mark.parametrize("option", ["", "together", "values in keys", "chunks"])
@pytest.mark.parametrize("in_bf16", [False, True])
def test_output_depends_only_on_the_tokens_own_sequence(
    kernels: ctypes.CDLL, in_bf16: bool, option: str, cache_dtype: torch.dtype
) -> None:
    """Bit-identical whatever the token's chunk, also if it is alone there, and whatever else is in the step."""
    kernel = compiled.PagedAttention(kernels, in_bf16)
    shape, length = Shape(16, 8, 128, 16), 90
    options = make_options(shape).get(option, PLAIN)
    case = make_case(shape, [length, 40, 1], [length, 77, 9], torch.float32, cache_dtype, CPU, options=options)
    whole = kernel(case.query, case.key, case.value, case.caches[0], case.value_cache, case.batch, options)[:length]
    ends = case.batch.ends
    is_cut = [ends is None or ends[at - 1] == at for at in range(1, length + 1)]
    cuts = {cut + is_cut[cut - 1 :].index(True) for cut in (1, 33, 50, 88, 89)}  # spans are computed whole
    for begin, end in itertools.pairwise(sorted({0, *cuts, length})):
        part = slice(begin, end)
        some = None if ends is None else ends[part]
        own = case.batch.page_tables[:1], case.batch.slots[part]
        batch = AttentionBatch([end - begin], [end], *own, some, generated=[False])
        new = case.query[part], case.key[part], None if case.value is None else case.value[part]
        chunk = kernel(*new, case.caches[0], case.value_cache, batch, options)
        torch.testing.assert_close(chunk, whole[part], atol=0, rtol=0)


@cache_dtypes
def test_only_tokens_that_decode_have_sums_of_their_own(kernels: ctypes.CDLL, cache_dtype: torch.dtype) -> None:
    """A batch that doesn't say what decodes is one whose single tokens do."""
    kernel, shape = compiled.PagedAttention(kernels), Shape(16, 8, 128, 16)
    case = make_case(shape, [1, 1], [90, 77], torch.float32, cache_dtype, CPU)

    def attended(generated: list[bool] | None) -> tuple[Tensor, ...]:
        batch = replace(case.batch, generated=generated)
        return kernel(case.query, case.key, case.value, case.caches[0], case.caches[1], batch).unbind()

    decodes, prompts, mixed = attended([True, True]), attended([False, False]), attended([False, True])
    assert all(map(torch.equal, attended(None), decodes))
    assert all(map(torch.equal, mixed, (prompts[0], decodes[1])))
    assert not torch.equal(prompts[0], decodes[0])


LONG = [1024, 3000, 1, 1025, 3072]


@cache_dtypes
@pytest.mark.parametrize("options", [{}, {"window": 1500, "softcap": 2.0, "sinks": True}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in (Shape(16, 8, 128, 16), Shape(40, 40, 64, 16))),
        Shape(6, 2, 80, 4),
    ],
    ids=str,
)
def test_long_contexts(
    kernel: compiled.PagedAttention, shape: Shape, options: dict[str, Any], cache_dtype: torch.dtype
) -> None:
    """A single token's history is processed in spans, which depend neither on the other sequences nor on the number of
    threads."""
    sinks = torch.linspace(-4, 6, shape.heads) if options.get("sinks") else None
    given = AttentionOptions(**options | {"sinks": sinks})
    case = make_case(shape, [1] * len(LONG), LONG, torch.float32, cache_dtype, CPU)
    query, key, value = case.query, case.key, case.value
    assert value is not None
    together = kernel(query, key, value, case.caches[0], case.caches[1], case.batch, given)
    expected = CpuAttention(None)(query, key, value, case.caches[0], case.caches[1], case.batch, given)
    torch.testing.assert_close(together, expected, atol=2e-5, rtol=2e-5)
    torch.set_num_threads(3)
    for index, length in enumerate(LONG):
        part = slice(index, index + 1)
        batch = AttentionBatch([1], [length], case.batch.page_tables[part], case.batch.slots[part])
        alone = kernel(query[part], key[part], value[part], case.caches[0], case.caches[1], batch, given)
        torch.testing.assert_close(alone, together[part], atol=0, rtol=0)


@cache_dtypes
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("in_bf16", [False, True])
def test_nan_propagates_to_attending_tokens_only(
    kernels: ctypes.CDLL, batch: str, in_bf16: bool, cache_dtype: torch.dtype
) -> None:
    """NaN appears in all new tokens of the first sequence, which attend to it, and in no others."""
    kernel = compiled.PagedAttention(kernels, in_bf16)
    case = make_case(SHAPES[1], *BATCHES[batch], torch.float32, cache_dtype, CPU)
    case.key[:1] = torch.nan
    attended = kernel(case.query, case.key, case.value, case.caches[0], case.caches[1], case.batch)
    first, others = attended.tensor_split([case.batch.query_lens[0]])
    assert first.isnan().all()
    assert not others.isnan().any()


@pytest.mark.parametrize(
    ("slots", "table"),
    [([12, 13], [2, 3]), ([-1, 13], [2, 3]), ([10, 11], [2, 5]), ([10, 11], [2, -1]), ([10, 11], [2])],
)
def test_slots_and_pages_beyond_the_cache_are_rejected(
    kernel: compiled.PagedAttention, slots: list[int], table: list[int]
) -> None:
    caches, query = torch.zeros(2, 3, 4, 2, 8), torch.ones(2, 4, 8)
    batch = AttentionBatch([2], [8], [torch.tensor(table)], torch.tensor(slots))
    with pytest.raises(IndexError, match="beyond the 3 pages"):
        kernel(query, query[:, :2], query[:, :2], caches[0], caches[1], batch)
    assert not caches.any()


def test_unsupported_shapes_do_not_suit_the_kernel(kernel: compiled.PagedAttention) -> None:
    query, cache = torch.zeros(1, 33, 8), torch.zeros(1, 4, 2, 8)
    assert not kernel.suits(query, cache)
    assert not kernel.suits(torch.zeros(1, 2, 577), torch.zeros(1, 4, 2, 577))
    assert not kernel.suits(query[:, :4], cache.bfloat16())
    assert not kernel.suits(query[:, :4].half(), cache.half())
    assert kernel.suits(query[:, :4], cache.half())
    assert kernel.suits(query[:, :4], cache)


def test_without_a_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler in ("no-such-compiler", "false"):
        monkeypatch.setenv("CC", compiler)
        assert native.kernels.__wrapped__().library is None


def test_consecutive_pages_are_read_in_place() -> None:
    cache = torch.randn(8, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    table = torch.tensor([2, 3, 4, 7])
    run = leading_run(table)
    assert read_pages(cache, 10, table, run).data_ptr() == cache[2].data_ptr()
    scattered = read_pages(cache, 13, table, run)
    assert scattered.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr()
    torch.testing.assert_close(scattered, cache[[2, 3, 4, 7]].flatten(0, 1)[:13])


@pytest.mark.parametrize(
    ("table", "run"), [([], (0, 0)), ([5], (5, 1)), ([5, 6, 7], (5, 3)), ([5, 6, 9, 10], (5, 2)), ([5, 4], (5, 1))]
)
def test_leading_run(table: list[int], run: tuple[int, int]) -> None:
    assert leading_run(torch.tensor(table, dtype=torch.int64)) == PageRun(*run)


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "num_tables", "num_slots"),
    [([1], [1, 2], 1, 1), ([1], [1], 2, 1), ([2], [2], 1, 1), ([3], [2], 1, 3)],
)
def test_contradictory_batch(query_lens: list[int], kv_lens: list[int], num_tables: int, num_slots: int) -> None:
    with pytest.raises(ValueError, match="len"):
        AttentionBatch(query_lens, kv_lens, [torch.zeros(1)] * num_tables, torch.zeros(num_slots))


@pytest.mark.parametrize("generated", [[], [True]])
def test_a_sequence_decodes_one_token(generated: list[bool]) -> None:
    with pytest.raises(ValueError, match="decode"):
        AttentionBatch([2], [2], [torch.zeros(1)], torch.zeros(2), generated=generated)
