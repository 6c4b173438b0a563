"""What each layer of a decoder keeps in the KV cache. Sizes, tensors, page tables and transfers follow from it.

Without torch: the frontend's process and schedulers import it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEY_BLOCK = 64
"""Tokens whose keys a kernel reads together. Page tables of windowed layers begin at multiples of it: then a result
doesn't depend, in its last bits, on which pages were released."""


@dataclass(frozen=True)
class ChunkWindow:
    """A window that doesn't move with the token: chunks of ``length`` tokens follow one another from position 0 on, and
    a token reads those of its own chunk."""

    length: int


Window = int | ChunkWindow
"""Which tokens up to itself a token reads: a number of last ones, itself included; or those of its chunk."""


@dataclass(frozen=True)
class CacheFormat:
    """How the cache stores a head's values."""

    dtype: str
    """Name of the elements' dtype, such as float16."""
    item_bytes: int
    """Size of an element."""
    scale_bytes: int = 0
    """Bytes that follow the values: their scale, if they have one."""

    def stored_dim(self, dim: int) -> int:
        """Return the number of elements that ``dim`` values take, with their scale."""
        return dim + self.scale_bytes // self.item_bytes

    def head_bytes(self, dim: int) -> int:
        """Return the number of bytes that ``dim`` values take, with their scale."""
        return self.stored_dim(dim) * self.item_bytes


@dataclass(frozen=True)
class CacheSpec:
    """What one layer keeps of every token: *parts*, each with the same number of heads. A layer with keys and values
    has two parts."""

    heads: int
    """Key and value heads."""
    dims: tuple[int, ...]
    """Values per head in each part: of a key and of a value."""
    format: CacheFormat
    window: Window | None = None
    """Which tokens a token reads; None: all tokens up to itself."""

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each part."""
        return tuple(self.heads * self.format.head_bytes(dim) for dim in self.dims)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all parts."""
        return sum(self.part_bytes)


@dataclass(frozen=True)
class CacheGroups:
    """The layers of a decoder, grouped by which tokens they keep. The layers of a group share page tables, whatever
    their shapes."""

    windows: tuple[Window | None, ...]
    """Window of each group's layers: None, for layers that keep all tokens, then sliding windows, then chunks, both
    ascending."""
    of_layer: tuple[int, ...]
    """Group of each layer."""

    @classmethod
    def of(cls, windows: Iterable[Window | None]) -> "CacheGroups":
        """Group layers with these ``windows``."""
        by_layer = list(windows)
        distinct = sorted(set(by_layer), key=_order)
        return cls(tuple(distinct), tuple(distinct.index(window) for window in by_layer))


def layers_of(window: Window | None) -> str:
    """Return what the layers of a group with this ``window`` are called."""
    match window:
        case None:
            return "full"
        case ChunkWindow(length):
            return f"chunk {length}"
        case int():
            return f"window {window}"


def first_read(window: Window | None, position: int) -> int:
    """Return the first token that the one at ``position`` reads."""
    match window:
        case None:
            return 0
        case ChunkWindow(length):
            return position - position % length
        case int():
            return max(0, position - window + 1)


def first_sent(window: Window | None, first_token: int, end_token: int) -> int:
    """Return the first of the tokens ``[first_token, end_token)`` whose keys and values the token at ``end_token``
    reads; the last one if it reads none."""
    return max(first_token, min(first_read(window, end_token), end_token - 1))


def _order(window: Window | None) -> tuple[bool, int]:
    return (True, window.length) if isinstance(window, ChunkWindow) else (False, window or 0)


def bytes_per_token(specs: Iterable[CacheSpec]) -> int:
    """Return the bytes of one token in all of these layers."""
    return sum(spec.token_bytes for spec in specs)


def cache_bytes(specs: Sequence[CacheSpec], num_pages: Sequence[int], page_size: int) -> int:
    """Return the size of a cache with ``num_pages`` pages for each group of these layers."""
    groups = CacheGroups.of(spec.window for spec in specs)
    return sum(
        num_pages[group] * page_size * spec.token_bytes for spec, group in zip(specs, groups.of_layer, strict=True)
    )
