"""The interface between the decoder and an attention backend, and the paged KV cache they share."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from triptych.layers.attention.kv_format import dtype_of
from triptych.layers.attention.tables import PagedTables
from triptych.layers.cache_spec import CacheGroups, CacheSpec, Window, first_read
from triptych.layers.huge_pages import HugePages
from triptych.layers.pinned import to_device
from triptych.layers.state_tensors import StateTensors


@dataclass(frozen=True)
class PageRun:
    """The run of consecutive page ids with which a page table starts."""

    first: int
    """First page id."""
    length: int
    """Number of pages."""


@dataclass(frozen=True)
class AttentionBatch:
    """One step's packed tokens: T tokens of S sequences, each sequence's tokens contiguous and in order.

    Raises ValueError if the fields contradict each other.
    """

    query_lens: list[int]
    """[S]: new tokens of each sequence, T in total."""
    kv_lens: list[int]
    """[S]: tokens of each sequence in the cache after this step, so at least its ``query_lens``."""
    page_tables: list[Tensor]
    """[S] of int64 [pages]: page ids of each sequence, at least ``ceil(kv_len / page_size)``; more are ignored."""
    slots: Tensor
    """int64 [T]: where each new token's key and value are written, ``page * page_size + offset in the page``."""
    ends: Tensor | None = None
    """int64 [T], in host memory: where the keys end that a new token attends to in layers that read spans whole
    (``AttentionOptions.spans``), never descending within a sequence. None: each token attends up to itself."""
    generated: list[bool] | None = None
    """[S]: which sequences have one new token that was generated. Compiled kernels sum differently for these. A
    prompt's token has the same sums in a chunk of any length. None: all sequences with one new token."""
    tables: PagedTables | None = None
    """Lengths and page tables if they are on the device already; otherwise ``paged`` uploads them."""
    _masks: dict[tuple[int, Window | None, bool], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _paged: dict[int, PagedTables] = field(default_factory=dict, init=False, repr=False, compare=False)
    prepared: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A backend's own data about the batch, computed once for all layers."""

    def __post_init__(self) -> None:
        if not len(self.query_lens) == len(self.kv_lens) == len(self.page_tables):
            raise ValueError(
                f"{len(self.query_lens)} query lengths, {len(self.kv_lens)} kv lengths, {len(self.page_tables)} tables"
            )
        if sum(self.query_lens) != self.slots.shape[0]:
            raise ValueError(f"query lengths add up to {sum(self.query_lens)}, but there are {len(self.slots)} slots")
        if self.ends is not None and len(self.ends) != len(self.slots):
            raise ValueError(f"{len(self.ends)} ends of keys for {len(self.slots)} new tokens")
        if self.generated is not None and len(self.generated) != len(self.query_lens):
            raise ValueError(f"{len(self.generated)} flags of decodes for {len(self.query_lens)} query lengths")
        if any(flag and length != 1 for flag, length in zip(self.generated or [], self.query_lens, strict=False)):
            raise ValueError(f"sequences of query lengths {self.query_lens} can't decode as {self.generated} say")
        if any(query_len > kv_len for query_len, kv_len in zip(self.query_lens, self.kv_lens, strict=True)):
            raise ValueError(f"query lengths {self.query_lens} exceed kv lengths {self.kv_lens}")

    def first_visible(self, index: int, window: Window | None) -> int:
        """Return the first of a sequence's tokens that any of its new tokens attends to."""
        return first_read(window, self.kv_lens[index] - self.query_lens[index])

    def mask(
        self, index: int, dtype: torch.dtype, window: Window | None = None, *, spans: bool = False
    ) -> Tensor | None:
        """Return a sequence's attention mask over its tokens from ``first_visible`` on: [q, kv - first], 0 or -inf.

        It is computed once per step rather than once per layer. None if no mask, or PyTorch's causal mask, suffices:
        for a single new token, and for a prompt's first chunk unless a window begins inside it, or, with ``spans``, it
        has one.
        """
        query_len, kv_len = self.query_lens[index], self.kv_lens[index]
        if query_len == 1:
            return None
        ends = self._ends_of(index) if spans else None
        if ends is None and query_len == kv_len and first_read(window, kv_len - 1) == 0:
            return None
        name = (index, window, ends is not None)
        if name not in self._masks:
            first = self.first_visible(index, window)
            before = kv_len - query_len - first
            everything = torch.full((query_len, kv_len - first), -torch.inf, dtype=dtype, device=self.slots.device)
            # in place: with a long context the mask is the largest tensor of a step
            mask = self._masks[name] = everything.triu_(before + 1)
            if ends is not None:
                is_seen = torch.arange(first, kv_len) < ends[:, None]
                mask.masked_fill_(is_seen.to(mask.device), 0)
            if window is not None:
                firsts = [first_read(window, position) - first for position in range(kv_len - query_len, kv_len)]
                is_early = torch.arange(kv_len - first) < torch.tensor(firsts)[:, None]
                mask.masked_fill_(is_early.to(mask.device), -torch.inf)
        return self._masks[name]

    def _ends_of(self, index: int) -> Tensor | None:
        """Return where the keys of a sequence's new tokens end, int64 [q]; None if each attends up to itself."""
        if self.ends is None:
            return None
        start, query_len, kv_len = sum(self.query_lens[:index]), self.query_lens[index], self.kv_lens[index]
        ends = self.ends[start : start + query_len]
        return ends if (ends > torch.arange(kv_len - query_len + 1, kv_len + 1)).any() else None

    def paged(self, tile: int) -> PagedTables:
        """Return lengths and page tables on the device of ``slots``, uploaded once per step rather than once per layer.

        A tile holds ``tile`` new tokens of a sequence.
        """
        if self.tables is not None:
            return self.tables
        if tile not in self._paged:
            lengths = self.query_lens, self.kv_lens
            on_cpu = PagedTables.on_cpu(*lengths, self.page_tables, tile, self.ends, self.generated)
            self._paged[tile] = PagedTables(*to_device(on_cpu.tensors(), self.slots.device))
        return self._paged[tile]

    def of_tokens(self, indices: list[int]) -> "AttentionBatch":
        """Return the batch of some of the T tokens, each as its sequence's only new one, which attends up to itself.
        The cache holds the others' keys and values."""
        ends = list(accumulate(self.query_lens))
        sequences = [bisect_right(ends, index) for index in indices]
        return AttentionBatch(
            query_lens=[1] * len(indices),
            kv_lens=[self.kv_lens[one] - ends[one] + index + 1 for one, index in zip(sequences, indices, strict=True)],
            page_tables=[self.page_tables[one] for one in sequences],
            slots=self.slots[indices],
            generated=None if self.generated is None else [self.generated[one] for one in sequences],
        )

    @property
    def tile_sizes(self) -> list[int]:
        """The numbers of tokens per tile for which ``paged`` has been called."""
        return list(self._paged)

    @cached_property
    def page_runs(self) -> list[PageRun]:
        """[S]: each sequence's leading run of consecutive pages, found once per step rather than once per layer."""
        return [leading_run(table) for table in self.page_tables]


def _on_device(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def leading_run(page_table: Tensor) -> PageRun:
    """Return the longest run of consecutive page ids with which a page table starts."""
    pages = page_table.tolist()
    if not pages:
        return PageRun(0, 0)
    length = next((i for i, page in enumerate(pages) if page != pages[0] + i), len(pages))
    return PageRun(pages[0], length)


@dataclass(frozen=True)
class KVTensors:
    """The paged KV cache of one rank.

    On CPUs a token's heads may lie next to those of other ranks. Then each token's heads are contiguous in memory, but
    the tensors aren't.
    """

    layers: list[tuple[Tensor, ...]]
    """The parts of each layer, such as keys and values: [pages, page_size, heads, stored_dim], as ``kv_format`` stores
    them. ``stored_dim`` differs between parts."""
    states: StateTensors | None = None
    """What layers keep of each request as a whole; None if none keeps anything."""

    @property
    def tensors(self) -> list[Tensor]:
        """All parts of all layers."""
        return [part for parts in self.layers for part in parts]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layers[0][0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    @classmethod
    def allocate(
        cls, specs: Sequence[CacheSpec], num_pages: Sequence[int], page_size: int, device: torch.device
    ) -> "KVTensors":
        """Allocate ``num_pages`` pages for each group of the layers that ``specs`` describe. They are uninitialised,
        since no slot is read before it is written; on CPUs memory is committed as it fills, in huge pages."""
        make = HugePages().empty if device.type == "cpu" else partial(_on_device, device)
        return cls._make(specs, num_pages, page_size, make)

    @classmethod
    def within(
        cls, memory: Tensor, specs: Sequence[CacheSpec], num_pages: Sequence[int], page_size: int
    ) -> "KVTensors":
        """Return views of ``memory``, uint8 of ``cache_bytes`` elements: layer by layer, and part by part
        in each."""
        taken = 0

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal taken
            first, taken = taken, taken + math.prod(shape) * dtype.itemsize
            return memory[first:taken].view(dtype).view(shape)

        return cls._make(specs, num_pages, page_size, take)

    @classmethod
    def _make(
        cls,
        specs: Sequence[CacheSpec],
        num_pages: Sequence[int],
        page_size: int,
        make: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> "KVTensors":
        """``make`` returns a tensor of a shape and dtype; it is called in the order of the memory."""
        groups = CacheGroups.of(spec.window for spec in specs)
        layers = []
        for spec, group in zip(specs, groups.of_layer, strict=True):
            dtype, shape = dtype_of(spec.format), (num_pages[group], page_size, spec.heads)
            layers.append(tuple(make((*shape, spec.format.stored_dim(dim)), dtype) for dim in spec.dims))
        return cls(layers)

    def heads(self, of_layer: Sequence[slice]) -> "KVTensors":
        """Return views of some heads of each layer."""
        return KVTensors(
            [tuple(part[:, :, heads] for part in parts) for parts, heads in zip(self.layers, of_layer, strict=True)]
        )


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What a layer's attention does besides the plain softmax. Raises ValueError for sinks of another dtype."""

    window: Window | None = None
    """Which tokens each token attends to; None for all before it."""
    scale: float | None = None
    """Factor of the products of queries and keys; None for ``head_dim ** -0.5``."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: Tensor | None = None
    """float32 [heads], contiguous: a logit of each query head that takes part in the softmax's sum, without a value."""
    value_dim: int | None = None
    """A head's values are this number of the first values of its key, and the cache holds keys only. None: values are a
    part of their own, with as many values as keys. Towers have values of their own in either case."""
    spans: bool = False
    """Whether the tokens of an atomic span attend to its end, rather than up to themselves (``AttentionBatch.ends``). A
    window begins where it does for other tokens."""

    def __post_init__(self) -> None:
        if self.sinks is not None and (self.sinks.dtype != torch.float32 or not self.sinks.is_contiguous()):
            raise ValueError(f"sinks are {self.sinks.dtype} with strides {self.sinks.stride()}")

    def scale_for(self, head_dim: int) -> float:
        """Return the factor of the products of queries and keys."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = AttentionOptions()


class AttentionBackend(Protocol):
    """Writes a step's new keys and values into a layer's cache, then attends from its new tokens."""

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
        """Attend causally from each new token to its own sequence, or with ``options.spans`` to the end of its span.

        ``query`` [T, heads, head_dim]; ``key``, ``value`` [T, kv_heads, head_dim], or of 0 tokens if the caches hold
        those of the new tokens already; caches [pages, page_size, kv_heads, stored_dim]. Keys and values are rounded to
        the caches' format before they are used. Query head h reads kv head ``h * kv_heads // heads``. With
        ``options.value_dim``, ``value`` and ``value_cache`` are None. Returns [T, heads, head_dim], or
        [T, heads, value_dim], in the query's dtype.
        """


def group_size(heads: int, kv_heads: int, largest: int) -> int:
    """Return how many query heads that share a kv head kernels process together: the largest number up to ``largest``
    that divides them."""
    sharing = heads // kv_heads
    return next(size for size in range(min(sharing, largest), 0, -1) if sharing % size == 0)


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``num_tokens`` tokens."""
    return math.ceil(num_tokens / page_size)
