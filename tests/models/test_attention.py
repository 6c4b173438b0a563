"""The CPU attention backend against attention written out in full."""

import pytest
import torch
from torch import Tensor

from triptych.models.attention.base import AttentionBatch, PageRun, leading_run
from triptych.models.attention.cpu import CpuAttention, read_pages

PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM = 4, 2, 6, 8


def written_out(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last tokens, in fp64: query [q, heads, d], keys and values [kv, kv_heads, d]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * query.shape[-1] ** -0.5
    query_len, kv_len = scores.shape[1:]
    position = torch.arange(kv_len - query_len, kv_len)
    scores = scores.masked_fill(torch.arange(kv_len) > position[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).float()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences(cache_dtype: torch.dtype) -> None:
    """A whole prompt, a chunk in the middle of one, and single tokens; pages consecutive, scattered and reversed."""
    torch.manual_seed(0)
    query_lens, kv_lens = [5, 3, 1, 1], [5, 11, 9, 1]
    tables = [torch.tensor(pages) for pages in ([3, 4], [9, 1, 6], [12, 11, 10], [0, 7, 7])]
    caches = torch.full((2, 14, PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=cache_dtype)
    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM)
    slots, expected, new = [], [], []
    for q, query_len, kv_len, table in zip(query.split(query_lens), query_lens, kv_lens, tables, strict=True):
        rows = torch.randn(2, kv_len, KV_HEADS, HEAD_DIM).to(cache_dtype).float()
        all_slots = table.repeat_interleave(PAGE_SIZE)[:kv_len] * PAGE_SIZE + torch.arange(kv_len) % PAGE_SIZE
        past = kv_len - query_len
        caches.flatten(1, 2)[:, all_slots[:past]] = rows[:, :past].to(cache_dtype)
        slots.append(all_slots[past:])
        new.append(rows[:, past:])
        expected.append(written_out(q, *rows))
    key, value = torch.cat(new, dim=1)
    batch = AttentionBatch(query_lens, kv_lens, tables, torch.cat(slots))
    output = CpuAttention()(query, key, value, caches[0], caches[1], batch)
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-5, rtol=1e-5)


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
