"""What each layer of a decoder keeps in the KV cache. Sizes, tensors, page tables and transfers follow from it.

Without torch: the frontend's process and schedulers import it.
"""

from collections.abc import Iterable
from dataclasses import dataclass


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
    window: int | None = None
    """Tokens that a token reads at most, including itself; None: all tokens up to itself."""

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each part."""
        return tuple(self.heads * self.format.head_bytes(dim) for dim in self.dims)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all parts."""
        return sum(self.part_bytes)


def bytes_per_token(specs: Iterable[CacheSpec]) -> int:
    """Return the bytes of one token in all of these layers."""
    return sum(spec.token_bytes for spec in specs)
