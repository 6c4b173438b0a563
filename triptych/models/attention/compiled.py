"""The compiled attention kernel."""

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from triptych.models import native
from triptych.models.attention.base import AttentionBatch
from triptych.models.attention.tables import PagedTables

NO_WINDOW = 2**30
"""More tokens than any context has."""


class Step(ctypes.Structure):
    """The kernel's operands, as ``kernels/attention.c`` says."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "output", "slots")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "query_lens", "kv_lens", "page_starts")),
        *((name, ctypes.c_void_p) for name in ("decodes", "tiles", "pages")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sequences", "num_decodes", "num_tiles")),
        *((name, ctypes.c_int64) for name in ("num_entries", "heads", "kv_heads", "dim", "num_pages", "page_size")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("cache_stride", "window", "causal", "is_half")),
        ("scale", ctypes.c_float),
    )


class PagedAttention:
    """The kernel in ``kernels/attention.c``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.paged_attention
        self._run.argtypes, self._run.restype = [ctypes.POINTER(Step)], ctypes.c_int
        self._rows, self._max_group, self._max_dim = (
            ctypes.c_int.in_dll(library, f"attention_{name}").value for name in ("rows", "group", "dim")
        )

    def suits(self, query: Tensor, cache: Tensor) -> bool:
        """Whether the kernel is made for these dtypes and shapes."""
        _, heads, dim = query.shape
        kv_heads = cache.shape[2]
        knows_dtypes = query.dtype == torch.float32 and cache.dtype in {torch.float32, torch.float16}
        in_groups = heads % kv_heads == 0 and heads // kv_heads <= self._max_group
        return knows_dtypes and query.device.type == "cpu" and in_groups and dim <= self._max_dim

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
        """See ``AttentionBackend``. Of caches, a token's heads are contiguous. Raises IndexError for slots and page
        tables that go beyond them, and MemoryError."""
        new = _with_dense_heads(key), _with_dense_heads(value), batch.slots
        tables = batch.paged(self._tile(query, key_cache))
        return self._attend(query, (key_cache, value_cache), new, tables, window=window or NO_WINDOW)

    def over_all(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Attention of each of ``query`` [N, heads, head_dim] to all of ``key``, ``value`` [M, kv_heads, head_dim],
        M > 0, by default scaled by ``head_dim ** -0.5``. Returns [N, heads, head_dim]. Raises MemoryError."""
        if key.stride() != value.stride() or key.stride()[1:] != (key.shape[2], 1):
            key, value = key.contiguous(), value.contiguous()
        pages = key[None], value[None]
        tables = _one_page(len(query), len(key), self._tile(query, pages[0]))
        nothing = key[:0], value[:0], tables.pages[:0]
        return self._attend(query, pages, nothing, tables, causal=False, scale=scale)

    def _tile(self, query: Tensor, cache: Tensor) -> int:
        return self._rows // (query.shape[1] // cache.shape[2])

    def _attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor, Tensor],
        tables: PagedTables,
        *,
        window: int = NO_WINDOW,
        causal: bool = True,
        scale: float | None = None,
    ) -> Tensor:
        """``caches`` are pages of keys and of values; ``new`` are keys and values to be written, and to which slots."""
        query = _with_dense_heads(query)
        num_new, (_, heads, dim), (num_pages, page_size, kv_heads, _) = len(new[2]), query.shape, caches[0].shape
        output = query.new_empty(query.shape)
        tensors = [
            *(query, new[0], new[1], *caches, output, new[2]),
            *(tables.query_starts, tables.query_lens, tables.kv_lens, tables.page_starts),
            *(tables.decodes, tables.tiles, tables.pages),
        ]
        step = Step(
            *(tensor.data_ptr() for tensor in tensors), num_new, len(tables.kv_lens), len(tables.decodes),
            len(tables.tiles), len(tables.pages), heads, kv_heads, dim, num_pages, page_size, query.stride(0),
            new[0].stride(0), new[1].stride(0), caches[0].flatten(0, 1).stride(0),
            min(window, NO_WINDOW), causal, caches[0].dtype == torch.float16, dim**-0.5 if scale is None else scale,
        )  # fmt: skip
        done = self._run(step)
        if done < 0:
            raise MemoryError(f"no memory to attend from {len(query)} tokens")
        if not done:
            raise IndexError(f"a slot or page table goes beyond the {num_pages} pages of the KV cache")
        return output


@cache
def paged_attention() -> PagedAttention | None:
    """The kernel; None where there are no compiled ones."""
    return None if (library := native.library()) is None else PagedAttention(library)


def _with_dense_heads(tokens: Tensor) -> Tensor:
    """[T, heads, d] of which each token's values are contiguous; tokens may lie apart."""
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()


@lru_cache(64)
def _one_page(num_queries: int, num_keys: int, tile: int) -> PagedTables:
    """For one sequence, all of whose keys are on one page; the windows of a tower's layers are alike."""
    return PagedTables.on_host([num_queries], [num_keys], [torch.zeros(1, dtype=torch.int64)], tile)
