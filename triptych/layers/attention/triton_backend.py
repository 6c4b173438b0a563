"""Attention on GPUs: launches the Triton kernels. On CPU tensors they run in Triton's interpreter, for tests."""

import math

import torch
import triton
from torch import Tensor

from triptych.layers.attention.base import PLAIN, AttentionBatch, AttentionOptions, group_size
from triptych.layers.attention.tables import PagedTables
from triptych.layers.attention.triton_kernels import decode_kernel, prefill_kernel, reduce_kernel, write_kernel
from triptych.layers.cache_spec import ChunkWindow

BLOCK_BYTES = 16 * 2**10
"""Size of a prefill tile's queries, and the maximum of a block of keys or values. Both, and the prefetched next block,
fit any GPU's shared memory and registers (``tests/layers/test_triton_compiles.py``)."""
MIN_ROWS, MAX_ROWS = 16, 64
"""Rows of the smallest matrix that tensor cores multiply, and of the largest one used here."""
MAX_SPLITS = 32
MAX_GROUP = 16
"""Query heads of a program, at most."""
PROGRAMS_PER_PROCESSOR = 4
"""Target number of decode programs per multiprocessor, so that each always has loads in flight."""


class TritonAttention:
    """``AttentionBackend`` for CUDA devices and, under TRITON_INTERPRET=1, for CPUs.

    Supports fp16, bf16 and fp32, also different ones for query and cache, and any head_dim and page_size; caches must
    be contiguous. One launch of the decode kernel handles all sequences with one new token, one launch of the prefill
    kernel all others.
    """

    def __init__(self, num_processors: int) -> None:
        """``num_processors`` is the device's number of multiprocessors, by which decode splits contexts."""
        self._num_processors = num_processors

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
        num_tokens, heads, dim = query.shape
        _, page_size, kv_heads, _ = key_cache.shape
        if value is None or value_cache is None:
            value, value_cache = key, key_cache
        query, key, value = map(_dense_rows, (query, key, value))
        shape = constants(heads, kv_heads, dim, page_size, query.itemsize, options.value_dim)
        if len(key):
            write_kernel[(num_tokens,)](
                key, value, key_cache, value_cache, batch.slots, key.stride(0), value.stride(0),
                WIDTH=kv_heads * dim, BLOCK=triton.next_power_of_2(kv_heads * dim), SHARED=shape["SHARED"],
            )  # fmt: skip
        tile = tile_tokens(heads, kv_heads, shape["DIM"], query.itemsize)
        tables = batch.paged(tile)
        output = torch.empty((num_tokens, heads, shape["DIM"]), dtype=query.dtype, device=query.device)
        scale = options.scale_for(dim) * math.log2(math.e)
        if len(tables.decodes):
            self._decode(query, key_cache, value_cache, output, tables, scale, shape, options)
        if len(tables.tiles):
            prefill_kernel[(len(tables.tiles), shape["GROUPS"])](
                query, key_cache, value_cache, options.sinks, output, tables.ends, tables.tiles, tables.query_starts,
                tables.query_lens, tables.kv_lens, tables.page_starts, tables.pages, query.stride(0), scale, **shape,
                **option_constants(options), GROUP_BLOCK=triton.next_power_of_2(heads // shape["GROUPS"]),
                TILE=tile, SPANS=options.spans and len(tables.ends) > 0, num_warps=4, num_stages=2,
            )  # fmt: skip
        return output

    def _decode(  # noqa: PLR0917 (a kernel's operands)
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor,
        tables: PagedTables, scale: float, shape: dict[str, int], options: AttentionOptions,
    ) -> None:  # fmt: skip
        _, heads, dim = output.shape
        groups, num_decodes = shape["GROUPS"], len(tables.decodes)
        splits = num_splits(num_decodes * groups, self._num_processors)
        parts = num_decodes * heads * splits if splits > 1 else 0
        sums, maxima, totals = (
            torch.empty(size, dtype=torch.float32, device=query.device) for size in (parts * dim, parts, parts)
        )
        decode_kernel[(num_decodes, groups, splits)](
            query, key_cache, value_cache, options.sinks, output, sums, maxima, totals, tables.decodes,
            tables.query_starts, tables.kv_lens, tables.page_starts, tables.pages, query.stride(0), scale, **shape,
            **option_constants(options), GROUP_BLOCK=max(MIN_ROWS, triton.next_power_of_2(heads // groups)),
            SPLITS=splits, num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            reduce_kernel[(num_decodes, heads)](
                output, sums, maxima, totals, tables.decodes, tables.query_starts,
                HEADS=heads, DIM=dim, DIM_BLOCK=shape["DIM_BLOCK"], SPLITS=splits,
            )  # fmt: skip


def constants(  # noqa: PLR0917 (a kernel's shape)
    heads: int, kv_heads: int, dim: int, page_size: int, itemsize: int, value_dim: int | None = None
) -> dict[str, int]:
    """Return the compile-time constants that both kernels share; ``itemsize`` is the query's, and ``value_dim`` as in
    ``AttentionOptions``."""
    main = value_dim or dim
    keys = _rows(main, itemsize)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "GROUPS": heads // group_size(heads, kv_heads, MAX_GROUP),
        "PAGE_SIZE": page_size,
        "DIM": main,
        "DIM_BLOCK": _dim_block(main),
        "REST": dim - main,
        "REST_BLOCK": _dim_block(dim - main),
        "SHARED": value_dim is not None,
        "KEYS": keys if itemsize < 4 else max(MIN_ROWS, keys // 2),  # fp32 is kept in parts as well
    }


def option_constants(options: AttentionOptions) -> dict[str, float]:
    """Return the compile-time constants of a layer's attention."""
    window, cap = options.window or 0, options.softcap or 0.0
    is_chunked = isinstance(window, ChunkWindow)
    length = window.length if isinstance(window, ChunkWindow) else window
    return {"WINDOW": length, "CHUNKED": is_chunked, "CAP": cap, "SINKS": options.sinks is not None}


def tile_tokens(heads: int, kv_heads: int, dim: int, itemsize: int) -> int:
    """Return the number of new tokens per prefill tile, whose rows are the tokens times the query heads of a group;
    ``dim`` is a value's."""
    group = group_size(heads, kv_heads, MAX_GROUP)
    return max(1, _rows(dim, itemsize) // triton.next_power_of_2(group))


def _dim_block(dim: int) -> int:
    return max(MIN_ROWS, triton.next_power_of_2(dim))


def _rows(dim: int, itemsize: int) -> int:
    return min(MAX_ROWS, max(MIN_ROWS, BLOCK_BYTES // (_dim_block(dim) * itemsize)))


def num_splits(programs: int, num_processors: int) -> int:
    """Return the number of parts, a power of two, into which decode divides each context, given the number of programs
    without a split."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // programs)
    return min(MAX_SPLITS, triton.next_power_of_2(wanted))


def _dense_rows(heads: Tensor) -> Tensor:
    """Return [T, heads, head_dim] with each token's values contiguous; copies only if they aren't already."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()
