"""The multimodal cache: embedding rows by the name of the part they are of, the least recently used given up first."""

from collections import OrderedDict

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

EmbeddingRows = NDArray[np.uint8]

_MAX_NAMES = 2**16
"""Names of parts that are remembered for whole items; of some 100 bytes each."""


def salted(name: str, salt: str) -> str:
    """The name of an item or a part among requests of one ``cache_salt``; the name itself for none. Those who shall not
    learn from response times what others have sent share no names with them."""
    return blake3(name.encode() + b"|" + salt.encode()).hexdigest() if salt else name


class EncoderCache:
    """Up to ``max_bytes`` of rows, each entry uint8 of shape (rows, row_bytes), one for each part of an item. A name
    stands for all that the tower makes a part's rows of (a 256-bit digest), and an item's key for its bytes, its plan
    and the model, so an entry never has to be checked against its item."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, EmbeddingRows] = OrderedDict()
        self._items: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._num_names = 0
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, name: str) -> EmbeddingRows | None:
        """The rows of a part."""
        rows = self._entries.get(name)
        if rows is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(name)
        return rows

    def put(self, name: str, rows: EmbeddingRows) -> None:
        """Keeps rows that aren't here yet, unless they alone exceed the limit."""
        if name in self._entries or rows.nbytes > self.max_bytes:
            return
        self._entries[name] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.nbytes

    def get_item(self, key: str) -> list[EmbeddingRows] | None:
        """The rows of all parts of an item, in order; None unless all are here. Then each part is looked up as it is
        needed, and counts then."""
        names = self._items.get(key)
        if names is None or any(name not in self._entries for name in names):
            return None
        self._items.move_to_end(key)
        return [rows for name in names if (rows := self.get(name)) is not None]

    def put_item(self, key: str, names: tuple[str, ...]) -> None:
        """Remembers which parts an item has."""
        if key in self._items:
            return
        self._items[key] = names
        self._num_names += len(names)
        while self._num_names > _MAX_NAMES:
            _, oldest = self._items.popitem(last=False)
            self._num_names -= len(oldest)
