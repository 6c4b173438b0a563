"""Cache of media that clients sent with a uuid, so that later requests can refer to them without sending them again."""

import heapq
import math
from collections import OrderedDict
from typing import NamedTuple

from triptych.clock import Clock

ITEM_OVERHEAD = 512
"""Bytes charged per item beside its uuid and its data, for Python's objects and tables. Without it, many small items
would use far more memory than ``max_bytes``."""


class _Kept(NamedTuple):
    data: bytes
    expires: float
    """Seconds since the epoch; infinity for never."""


class UuidMediaCache:
    """LRU cache of at most ``max_bytes``, shared fairly among scopes.

    A uuid is only valid within its ``scope``: a client can't refer to another client's media. Eviction removes the
    least recently used item of the scopes that exceed their equal share, so no client can evict a smaller user's."""

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._items: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        """By scope and name, least recently used first."""
        self._expiring: list[tuple[float, tuple[str, str]]] = []
        """Heap of when items expire; those that were replaced or removed since may still be there."""
        self._bytes: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of items."""
        return len(self._items)

    @property
    def num_scopes(self) -> int:
        """Number of scopes that have items."""
        return len(self._bytes)

    def put(self, scope: str, name: str, data: bytes, expires: float = math.inf) -> None:
        """Store the data under the name until ``expires``, in seconds since the epoch, replacing what was there. Empty
        and oversized data are not stored."""
        key = (scope, name)
        self._drop_expired()
        self._remove(key)
        if not data or _size(name, data) > self._max_bytes:
            return
        self._items[key] = _Kept(data, expires)
        if expires < math.inf:
            heapq.heappush(self._expiring, (expires, key))
        self._charge(scope, _size(name, data))
        while self.num_bytes > self._max_bytes:
            self._remove(self._eviction_candidate(key))

    def get(self, scope: str, name: str) -> bytes | None:
        """Return the data stored under the name, or None."""
        self._drop_expired()
        if (kept := self._items.get((scope, name))) is None:
            return None
        self._items.move_to_end((scope, name))
        return kept.data

    def _drop_expired(self) -> None:
        now = self._clock.wall()
        while self._expiring and self._expiring[0][0] <= now:
            _, key = heapq.heappop(self._expiring)
            if key in self._items and self._items[key].expires <= now:
                self._remove(key)
        if len(self._expiring) > 2 * len(self._items) + 16:  # mostly of items that are gone
            self._expiring = [(kept.expires, key) for key, kept in self._items.items() if kept.expires < math.inf]
            heapq.heapify(self._expiring)

    def _eviction_candidate(self, newest: tuple[str, str]) -> tuple[str, str]:
        """Return the key to evict next: ``newest`` only if no other scope exceeds its share."""
        share = self._max_bytes / len(self._bytes)
        return next((key for key in self._items if key != newest and self._bytes[key[0]] > share), newest)

    def _remove(self, key: tuple[str, str]) -> None:
        if (kept := self._items.pop(key, None)) is not None:
            self._charge(key[0], -_size(key[1], kept.data))

    def _charge(self, scope: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes[scope] = self._bytes.get(scope, 0) + num_bytes
        if not self._bytes[scope]:
            del self._bytes[scope]


def _size(name: str, data: bytes) -> int:
    return len(data) + len(name) + ITEM_OVERHEAD
