"""Encoder cache: embedding rows by the name of their part, with LRU eviction."""

from collections import OrderedDict

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from triptych.messages.identity import update_with_length

EmbeddingRows = NDArray[np.uint8]
"""Embeddings as raw bytes, of shape (rows, row_bytes)."""

_MAX_NAMES = 2**16
"""Limit on the part names that are kept for whole items."""


def row_name(layout: str, name: str, salt: str) -> str:
    """Return the name of the rows of an item or part: a digest of their layout's digest, the item's or part's own name
    and the ``cache_salt``.

    Rows of different models or dtypes share no names, so that they can't be mistaken for each other even in a store
    that several services share. Neither do clients with different salts, so that response times don't reveal what
    others have sent.
    """
    digest = blake3()
    for field in (layout, name, salt):
        update_with_length(digest, field.encode())
    return digest.hexdigest()


class EncoderCache:
    """Up to ``max_bytes`` of embedding rows, with one entry per part of an item.

    Names are those of ``row_name``: digests of everything that determines the rows, so that an entry never has to be
    compared with its item.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, EmbeddingRows] = OrderedDict()
        self._items: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._num_names = 0
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, name: str) -> EmbeddingRows | None:
        """Return the rows of a part, or None, and count a hit or a miss."""
        rows = self._entries.get(name)
        if rows is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(name)
        return rows

    def put(self, name: str, rows: EmbeddingRows) -> None:
        """Add a part's rows, unless they exceed the limit by themselves, and evict others as needed."""
        if name in self._entries or rows.nbytes > self.max_bytes:
            return
        self._entries[name] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.nbytes

    def get_item(self, key: str) -> list[EmbeddingRows] | None:
        """Return the rows of all parts of an item, in order, and count a hit for each; None unless all are cached. In
        that case nothing is counted, because the parts are looked up one by one later."""
        names = self._items.get(key)
        if names is None or any(name not in self._entries for name in names):
            return None
        self._items.move_to_end(key)
        return [rows for name in names if (rows := self.get(name)) is not None]

    def put_item(self, key: str, names: tuple[str, ...]) -> None:
        """Record the names of an item's parts."""
        if key in self._items:
            return
        self._items[key] = names
        self._num_names += len(names)
        while self._num_names > _MAX_NAMES:
            _, oldest = self._items.popitem(last=False)
            self._num_names -= len(oldest)
