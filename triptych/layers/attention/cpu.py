"""Attention on CPUs: the compiled kernel, or PyTorch's fused attention, sequence by sequence."""

from torch import Tensor
from torch.nn import functional as F

from triptych.layers.attention.base import AttentionBatch, PageRun, pages_needed
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.rounding import saturating_cast


class CpuAttention:
    """``AttentionBackend`` for CPUs. Allocates in proportion to one sequence at a time, never to the pool.

    In float32, over a cache in float32 or float16, where the machine has a C compiler, all sequences go through the
    compiled kernel at once, which reads pages in place. Otherwise a sequence whose pages are consecutive is read in
    place, unless the cache has another dtype than the query; another one's pages are gathered.
    """

    takes_windows = True

    def __init__(self, kernel: PagedAttention | None) -> None:
        """``kernel`` as ``compiled.paged_attention`` returns it; None does without."""
        self.kernel = kernel

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        window: int | None = None,
    ) -> Tensor:
        """See ``AttentionBackend``."""
        if self.kernel is not None and self.kernel.suits(query, key_cache):
            return self.kernel(query, key, value, key_cache, value_cache, batch, window)
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache.flatten(0, 1).index_copy_(0, batch.slots, saturating_cast(new, cache.dtype))
        output = query.new_empty(query.shape)
        parts = zip(query.split(batch.query_lens), output.split(batch.query_lens), strict=True)
        for index, (sequence_query, sequence_output) in enumerate(parts):
            where = batch.kv_lens[index], batch.page_tables[index], batch.page_runs[index]
            seen = slice(batch.first_seen(index, window), None)
            keys, values = (read_pages(cache, *where)[seen].to(query.dtype) for cache in (key_cache, value_cache))
            sequence_output.copy_(attend(sequence_query, keys, values, batch.mask(index, query.dtype, window)))
        return output


def read_pages(cache: Tensor, kv_len: int, page_table: Tensor, run: PageRun) -> Tensor:
    """A sequence's ``kv_len`` rows [kv_len, kv_heads, head_dim]; a view when its pages are consecutive."""
    num_pages = pages_needed(kv_len, cache.shape[1])
    if num_pages <= run.length:
        pages = cache.narrow(0, run.first, num_pages)
    else:
        pages = cache.index_select(0, page_table[:num_pages])
    return pages.flatten(0, 1)[:kv_len]


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """One sequence's last ``query.shape[0]`` tokens attending to its keys and values.

    ``query`` [q, heads, d]; ``keys``, ``values`` [kv, kv_heads, d]; ``mask`` as ``AttentionBatch.mask`` returns it.
    Returns [q, heads, d].
    """
    query_len, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, kv_heads, kv, d]
    if query_len == 1:
        # The query heads that share a kv head take the place of query positions: keys are read once per group.
        grouped = query.reshape(1, num_kv_heads, group, head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values).reshape(1, num_heads, head_dim)
    # The group takes the place of the batch, over which keys and values are broadcast without being copied.
    grouped = query.reshape(query_len, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)  # [group, kv_heads, q, d]
    keys, values = (tensor.expand(group, -1, -1, -1) for tensor in (keys, values))
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
    return output.permute(2, 1, 0, 3).reshape(query_len, num_heads, head_dim)
