"""The compiled attention kernel, for paged caches and for towers."""

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from triptych.models import native
from triptych.models.attention.base import AttentionBatch
from triptych.models.attention.tables import PagedTables

MAX_GROUP, MAX_DIM = 16, 256
"""Query heads for one kv head, and the size of a head, that the kernel has room for."""
NO_WINDOW = 2**30


class Step(ctypes.Structure):
    """The kernel's operands, as ``kernels/attention.c`` says."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "output", "slots")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "query_lens", "kv_lens", "page_starts")),
        *((name, ctypes.c_void_p) for name in ("decodes", "tiles", "pages")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sequences", "num_decodes", "num_tiles")),
        *((name, ctypes.c_int64) for name in ("num_entries", "heads", "kv_heads", "dim", "num_pages", "page_size")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("keys_stride", "values_stride", "window", "causal")),
        ("scale", ctypes.c_float),
    )


class PagedAttention:
    """The kernel in ``kernels/attention.c``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.paged_attention
        self._run.argtypes, self._run.restype = [ctypes.POINTER(Step)], ctypes.c_int
        self._rows = int(library.rows())

    def suits(self, query: Tensor, cache: Tensor) -> bool:
        """Whether the kernel is made for these dtypes and shapes."""
        _, heads, dim = query.shape
        in_float32 = query.dtype == cache.dtype == torch.float32 and query.device.type == "cpu"
        return in_float32 and heads // cache.shape[2] <= MAX_GROUP and dim <= MAX_DIM

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
        tables that go beyond them."""
        group = query.shape[1] // key.shape[1]
        scale = query.shape[2] ** -0.5
        return self._launch(
            (query, key, value, key_cache, value_cache, batch.slots), batch.paged(self._rows // group), scale,
            window=NO_WINDOW if window is None else window, causal=True,
        )  # fmt: skip

    def unmasked(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of each of B sequences' tokens to all T of them: [B, T, heads, d] each. Returns the same shape."""
        batch, tokens, heads, _ = query.shape
        packed = (tensor.flatten(0, 1) for tensor in (query, key, value))
        query, key, value = (_with_dense_heads(tensor) for tensor in packed)
        tables = _whole(batch, tokens, self._rows * key.shape[1] // heads)
        caches = (tensor.unflatten(0, (batch, tokens)) for tensor in (key, value))  # each sequence is a page of its own
        no_slots = tables.pages[:0]
        operands = (query, key, value, *caches, no_slots)
        return self._launch(operands, tables, scale, window=NO_WINDOW, causal=False).unflatten(0, (batch, tokens))

    def _launch(
        self, operands: tuple[Tensor, ...], tables: PagedTables, scale: float, *, window: int, causal: bool
    ) -> Tensor:
        """``operands`` are query, key, value, the caches and the slots that are written."""
        query, key, value, key_cache, value_cache, slots = operands
        query, key, value = (_with_dense_heads(tensor) for tensor in (query, key, value))
        _, heads, dim = query.shape
        num_pages, page_size, kv_heads, _ = key_cache.shape
        cache_strides = (cache.flatten(0, 1).stride(0) for cache in (key_cache, value_cache))
        output = query.new_empty(query.shape)
        tensors = [
            *(query, key, value, key_cache, value_cache, output, slots),
            *(tables.query_starts, tables.query_lens, tables.kv_lens, tables.page_starts),
            *(tables.decodes, tables.tiles, tables.pages),
        ]
        step = Step(
            *(tensor.data_ptr() for tensor in tensors), len(slots), len(tables.kv_lens), len(tables.decodes),
            len(tables.tiles), len(tables.pages), heads, kv_heads, dim, num_pages, page_size, query.stride(0),
            key.stride(0), value.stride(0), *cache_strides, window, causal, scale,
        )  # fmt: skip
        if not self._run(step):
            raise IndexError(f"a slot or page table goes beyond the {num_pages} pages of the KV cache")
        return output


@lru_cache(maxsize=64)
def _whole(batch: int, tokens: int, tile: int) -> PagedTables:
    """So many sequences, each of which is a page by itself."""
    return PagedTables.on_host([tokens] * batch, [tokens] * batch, list(torch.arange(batch).split(1)), tile)


@cache
def paged_attention() -> PagedAttention | None:
    """The kernel; None where there are no compiled ones."""
    return None if (library := native.library()) is None else PagedAttention(library)


def _with_dense_heads(tokens: Tensor) -> Tensor:
    """[T, heads, d] of which each token's values are contiguous; tokens may lie apart."""
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()
