"""The multimodal cache: embedding rows by the key that names them, the least recently used given up first."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]


class RowCache:
    """Up to ``max_bytes`` of rows, each entry uint8 of shape (rows, row_bytes). A key names content in full
    (a 256-bit digest of bytes, plan and model), so an entry never has to be checked against its item."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, Rows] = OrderedDict()
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, key: str) -> Rows | None:
        rows = self._entries.get(key)
        if rows is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return rows

    def put(self, key: str, rows: Rows) -> None:
        """Keeps rows that aren't here yet, unless they alone exceed the limit."""
        if key in self._entries or rows.nbytes > self.max_bytes:
            return
        self._entries[key] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.nbytes
