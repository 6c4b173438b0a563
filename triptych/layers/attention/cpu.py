"""Attention on CPUs: by the compiled kernel, or by PyTorch's fused attention, one sequence at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers.attention.base import PLAIN, AttentionBatch, AttentionOptions, PageRun, pages_needed
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.attention.kv_format import from_stored, to_stored


class CpuAttention:
    """``AttentionBackend`` for CPUs. Allocates in proportion to one sequence, never to the cache.

    For float32 queries and a float32, float16 or int8 cache, the compiled kernel processes all sequences at once and
    reads pages in place. Without it, PyTorch processes them one by one: consecutive pages of the query's dtype are read
    in place, others are gathered or converted first.
    """

    def __init__(self, kernel: PagedAttention | None) -> None:
        """``kernel`` is the result of ``compiled.paged_attention``; None uses PyTorch only."""
        self.kernel = kernel

    def __call__(  # noqa: PLR0917 (a kernel's operands)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor | None,
        batch: AttentionBatch,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """See ``AttentionBackend``."""
        if self.kernel is not None and self.kernel.suits(query, key_cache):
            return self.kernel(query, key, value, key_cache, value_cache, batch, options)
        parts = [(key, key_cache)]
        if value is not None and value_cache is not None:
            parts.append((value, value_cache))
        for new, cache in parts:
            cache.flatten(0, 1).index_copy_(0, batch.slots[: len(new)], to_stored(new, cache.dtype))
        output = query.new_empty((*query.shape[:2], options.value_dim or query.shape[2]))
        sequences = zip(query.split(batch.query_lens), output.split(batch.query_lens), strict=True)
        for index, (sequence_query, sequence_output) in enumerate(sequences):
            where = batch.kv_lens[index], batch.page_tables[index], batch.page_runs[index]
            visible = slice(batch.first_visible(index, options.window), None)
            read = [from_stored(read_pages(cache, *where)[visible], query.dtype) for _, cache in parts]
            keys, values = read[0], read[-1][..., : options.value_dim]
            mask = batch.mask(index, query.dtype, options.window, spans=options.spans)
            sequence_output.copy_(attend(sequence_query, keys, values, mask, options))
        return output


def read_pages(cache: Tensor, kv_len: int, page_table: Tensor, run: PageRun) -> Tensor:
    """Return a sequence's keys or values [kv_len, kv_heads, stored_dim]: a view if its pages are consecutive."""
    num_pages = pages_needed(kv_len, cache.shape[1])
    if num_pages <= run.length:
        pages = cache.narrow(0, run.first, num_pages)
    else:
        pages = cache.index_select(0, page_table[:num_pages])
    return pages.flatten(0, 1)[:kv_len]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions = PLAIN
) -> Tensor:
    """Attend from a sequence's last q tokens to its keys and values.

    ``query`` [q, heads, d]; ``keys`` [kv, kv_heads, d], ``values`` [kv, kv_heads, v]; ``mask`` from
    ``AttentionBatch.mask``, by ``options.window``. Returns [q, heads, v].
    """
    if options.softcap is not None or options.sinks is not None:
        return attend_written_out(query, keys, values, mask, options)
    query_len, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, kv_heads, kv, d]
    if query_len == 1:
        # the query heads of a kv head take the place of query positions, so that keys are read once per group
        grouped = query.reshape(1, num_kv_heads, group, head_dim)
        output = F.scaled_dot_product_attention(grouped, keys, values, scale=options.scale)
        return output.reshape(1, num_heads, -1)
    # the group takes the place of the batch, over which keys and values are broadcast without a copy
    grouped = query.reshape(query_len, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)  # [group, kv_heads, q, d]
    keys, values = (tensor.expand(group, -1, -1, -1) for tensor in (keys, values))
    output = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=options.scale
    )
    return output.permute(2, 1, 0, 3).reshape(query_len, num_heads, -1)


def attend_written_out(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attend like ``attend``, head by head: PyTorch's fused attention has neither soft caps nor sinks."""
    query_len, num_heads, head_dim = query.shape
    if mask is None and query_len > 1:
        mask = torch.full((query_len, len(keys)), -torch.inf, device=query.device).triu_(1)
    output = query.new_empty((query_len, num_heads, values.shape[2]))
    for head in range(num_heads):
        kv_head = head * keys.shape[1] // num_heads
        scores = (query[:, head] @ keys[:, kv_head].T).float() * options.scale_for(head_dim)  # [q, kv]
        if options.softcap is not None:
            scores = (scores / options.softcap).tanh_() * options.softcap
        if mask is not None:
            scores += mask
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks[head].expand(query_len, 1)), dim=1)
        weights = scores.softmax(dim=1)[:, : len(keys)]
        output[:, head] = weights.to(values.dtype) @ values[:, kv_head]
    return output
