"""The compiled attention kernel, ``kernels/cpu/attention.c``."""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from triptych.layers import native
from triptych.layers.attention.base import PLAIN, AttentionBatch, AttentionOptions, group_size
from triptych.layers.attention.tables import PagedTables
from triptych.layers.cache_spec import ChunkWindow

FORMATS = {torch.float32: 0, torch.float16: 1, torch.int8: 2}
"""The caches' dtypes that the kernel supports, as named in ``kernels/cpu/kv_cache.h``."""
NO_WINDOW = 2**30
"""More tokens than any context has."""


class AttentionOperands(ctypes.Structure):
    """The kernel's operands: ``Step`` in ``kernels/cpu/attention.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "output", "slots")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "query_lens", "kv_lens", "page_starts")),
        *((name, ctypes.c_void_p) for name in ("decodes", "tiles", "pages", "sinks", "ends")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sequences", "num_decodes", "num_tiles")),
        *((name, ctypes.c_int64) for name in ("num_entries", "heads", "kv_heads", "dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("num_pages", "page_size", "groups")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("cache_stride", "window", "chunked", "causal", "format", "in_bf16")),
        ("spans", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class PagedAttention:
    """Attention over a paged KV cache on CPUs, by the compiled kernel."""

    def __init__(self, library: ctypes.CDLL, in_bf16: bool = False) -> None:
        """``in_bf16`` lets tokens multiply in bfloat16, where the processor can; those that decode multiply in
        float32."""
        self.library = library
        self._in_bf16 = in_bf16
        self._run = library.paged_attention
        self._run.argtypes, self._run.restype = [ctypes.POINTER(AttentionOperands)], ctypes.c_int
        self._rows, self._max_group, self._max_dim = (
            ctypes.c_int.in_dll(library, f"attention_{name}").value for name in ("rows", "group", "dim")
        )

    def suits(self, query: Tensor, cache: Tensor) -> bool:
        """Return whether the kernel supports these dtypes and shapes."""
        _, heads, dim = query.shape
        on_cpu = query.dtype == torch.float32 and query.device.type == "cpu"
        return on_cpu and self.takes(cache.dtype) and self.suits_heads(heads, cache.shape[2], dim)

    def suits_heads(self, heads: int, kv_heads: int, dim: int) -> bool:
        return heads % kv_heads == 0 and dim <= self._max_dim

    def takes(self, cache: torch.dtype) -> bool:
        """Return whether the kernel supports caches of this dtype."""
        return cache in FORMATS

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
        """See ``AttentionBackend``. A token's heads must be contiguous in the caches. Raises IndexError for slots and
        page tables beyond the caches, and MemoryError."""
        new = _with_dense_heads(key), None if value is None else _with_dense_heads(value), batch.slots[: len(key)]
        tables = batch.paged(self._tile(query.shape[1], key_cache.shape[2]))
        return self._attend(query, (key_cache, value_cache), new, tables, options)

    def over_segments(  # noqa: PLR0917 (a kernel's operands)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        scale: float | None = None,
        value_dim: int | None = None,
    ) -> Tensor:
        """Attend from each token to all tokens of its segment, T > 0 tokens in total.

        ``query`` [T, heads, head_dim]; ``key``, ``value`` [T, kv_heads, head_dim]. ``lengths`` are those of the
        consecutive segments; ``scale`` is by default ``head_dim ** -0.5``. Of values only the first ``value_dim`` are
        read, by default all. Returns [T, heads, value_dim]. Raises ValueError if the segments don't add up to T tokens,
        and MemoryError.
        """
        if not len(query) == len(key) == len(value) == sum(lengths) > 0:
            raise ValueError(f"segments of {sum(lengths)} tokens for {len(query)} queries and {len(key)} keys")
        if key.stride() != value.stride() or key.stride()[1:] != (key.shape[2], 1):
            key, value = key.contiguous(), value.contiguous()
        pages = [tensor.unflatten(0, (-1, gcd(*lengths))) for tensor in (key, value)]
        tables = _of_segments(tuple(lengths), self._tile(query.shape[1], key.shape[1]))
        nothing_new = key[:0], value[:0], tables.pages[:0]
        options = AttentionOptions(scale=scale, value_dim=value_dim)
        return self._attend(query, (pages[0], pages[1]), nothing_new, tables, options, causal=False)

    def segment_operands(
        self, num_tokens: int, lengths: Sequence[int], shape: tuple[int, int, int], scale: float
    ) -> tuple[AttentionOperands, PagedTables]:
        """Return the operands of attention within segments, except for queries, keys, values and output, and the tables
        to which they point.

        ``lengths`` and ``scale`` are as in ``over_segments``, ``shape`` as in ``shared_operands``. Raises ValueError if
        the segments don't add up to ``num_tokens`` > 0.
        """
        if not num_tokens == sum(lengths) > 0:
            raise ValueError(f"segments of {sum(lengths)} tokens for {num_tokens} tokens")
        tables = _of_segments(tuple(lengths), self._tile(*shape[:2]))
        step = self._operands(tables, tables.pages[:0], shape, causal=False)
        step.scale = scale
        step.page_size = gcd(*lengths)
        step.num_pages = num_tokens // step.page_size
        step.window = NO_WINDOW
        return step, tables

    def shared_operands(self, batch: AttentionBatch, shape: tuple[int, int, int]) -> AttentionOperands:
        """Return a copy of the operands that all layers of a step share, valid as long as ``batch`` exists.

        ``shape`` is (heads, kv heads, head_dim).
        """
        if (self, shape) not in batch.prepared:
            tables = batch.paged(self._tile(*shape[:2]))
            batch.prepared[self, shape] = self._operands(tables, batch.slots, shape)
        return AttentionOperands.from_buffer_copy(batch.prepared[self, shape])

    def _tile(self, heads: int, kv_heads: int) -> int:
        """Return the number of tokens per tile."""
        return self._rows // group_size(heads, kv_heads, self._max_group)

    def _attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor | None],
        new: tuple[Tensor, Tensor | None, Tensor],
        tables: PagedTables,
        options: AttentionOptions,
        *,
        causal: bool = True,
    ) -> Tensor:
        """``caches`` are pages of keys and of values; ``new`` are the keys and values to write, and their slots."""
        query, (key, value, slots) = _with_dense_heads(query), new
        num_tokens, heads, dim = query.shape
        step = self._operands(tables, slots, (heads, caches[0].shape[2], dim), causal=causal)
        set_layer(step, *caches, options, dim)
        step.value_dim = options.value_dim or dim
        output = query.new_empty((num_tokens, heads, step.value_dim))
        step.query, step.key, step.output = (tensor.data_ptr() for tensor in (query, key, output))
        step.query_stride, step.key_stride = query.stride(0), key.stride(0)
        if value is not None:
            step.value, step.value_stride = value.data_ptr(), value.stride(0)
        raise_failure(self._run(step), step)
        return output

    def _operands(
        self, tables: PagedTables, slots: Tensor, shape: tuple[int, int, int], *, causal: bool = True
    ) -> AttentionOperands:
        """``shape`` is (heads, kv heads, head_dim)."""
        step = AttentionOperands(num_tokens=len(slots), causal=causal, in_bf16=self._in_bf16)
        step.slots, step.query_starts, step.query_lens = (
            tensor.data_ptr() for tensor in (slots, tables.query_starts, tables.query_lens)
        )
        step.kv_lens, step.page_starts, step.decodes, step.tiles, step.pages = (
            tensor.data_ptr()
            for tensor in (tables.kv_lens, tables.page_starts, tables.decodes, tables.tiles, tables.pages)
        )
        if len(tables.ends):
            step.ends = tables.ends.data_ptr()
        step.num_sequences, step.num_decodes = len(tables.kv_lens), len(tables.decodes)
        step.num_tiles, step.num_entries = len(tables.tiles), len(tables.pages)
        step.heads, step.kv_heads, step.dim = shape
        step.groups = step.heads // group_size(step.heads, step.kv_heads, self._max_group)
        step.value_dim = step.dim
        return step


class LayerOptions(Protocol):
    """The operands that differ between layers."""

    keys: int | None
    values: int | None
    sinks: int | None
    num_pages: int
    page_size: int
    cache_stride: int
    window: int
    chunked: int
    format: int
    spans: int
    scale: float
    cap: float


def set_layer(step: LayerOptions, keys: Tensor, values: Tensor | None, options: AttentionOptions, dim: int) -> None:
    """Set the operands that differ between layers; ``options`` must outlive ``step``, and ``dim`` is a key's."""
    step.keys = step.values = keys.data_ptr()
    if values is not None:
        step.values = values.data_ptr()
    step.num_pages, step.page_size = keys.shape[:2]
    step.format, step.spans = FORMATS[keys.dtype], options.spans
    step.cache_stride = keys.itemsize * (keys.stride(1) if step.page_size > 1 else keys.stride(0))
    window, step.chunked = options.window, isinstance(options.window, ChunkWindow)
    step.window = min(window.length if isinstance(window, ChunkWindow) else window or NO_WINDOW, NO_WINDOW)
    step.scale, step.cap = options.scale_for(dim), options.softcap or 0
    step.sinks = None if options.sinks is None else options.sinks.data_ptr()


def raise_failure(done: int, step: AttentionOperands) -> None:
    """Raise IndexError or MemoryError for the return value ``done`` of a kernel with attention, if it failed."""
    if done < 0:
        raise MemoryError(f"no memory to attend from {step.num_tokens} tokens")
    if not done:
        raise IndexError(f"a slot or page table goes beyond the {step.num_pages} pages of the KV cache")


@cache
def paged_attention(in_bf16: bool = False) -> PagedAttention | None:
    """Return the kernel; None if there are no compiled kernels. ``in_bf16`` is as in ``PagedAttention``."""
    return None if (library := native.library()) is None else PagedAttention(library, in_bf16)


def _with_dense_heads(tokens: Tensor) -> Tensor:
    """Return [T, heads, d] with each token's values contiguous; there may be gaps between tokens."""
    return tokens if tokens.stride()[1:] == (tokens.shape[2], 1) else tokens.contiguous()


@lru_cache(8)
def _of_segments(lengths: tuple[int, ...], tile: int) -> PagedTables:
    """Return tables of consecutive sequences, on pages of the greatest common divisor of their lengths.

    Cached, because a tower's layers use only one or two sets of segments.
    """
    counts = [length // gcd(*lengths) for length in lengths]
    return PagedTables.on_cpu(list(lengths), list(lengths), list(torch.arange(sum(counts)).split(counts)), tile)
