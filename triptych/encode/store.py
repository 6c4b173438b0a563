"""Keeps the rows of parts by name: the interface, host memory, and several stores that are tried in order."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from triptych.messages.identity import update_with_length
from triptych.messages.stats import CacheTier

log = logging.getLogger(__name__)

EmbeddingRows = NDArray[np.uint8]
"""Embeddings as raw bytes, of shape (rows, row_bytes)."""

Found = Sequence[EmbeddingRows | None]
"""The rows of each name that was looked up, in order; None if they aren't there."""

MAX_NAMES = 2**16
"""Limit on the names that host memory has for its rows: equal parts of many items are kept once."""


def row_name(layout: str, name: str, salt: str) -> str:
    """Return the name of the rows of an item or part: a digest of their layout's digest, the item's or part's own name
    and the ``cache_salt``.

    Rows of different models or dtypes share no names, so that they can't be mistaken for each other even in a store
    that several services share. Neither do clients with different salts, so that response times don't reveal what
    others have sent.
    """
    digest = blake3()
    for part in (layout, name, salt):
        update_with_length(digest, part.encode())
    return digest.hexdigest()


def part_name(item: str, number: int) -> str:
    """Return the name of the rows of an item's part, by the item's own (``row_name``)."""
    return blake3(f"{item}|{number}".encode()).hexdigest()


class EmbeddingStore(Protocol):
    """Rows by name. May be called from any thread, and never waits for a disk or a network.

    A part's rows have two names: one of its item and its number, known before the item's file is fetched, and one of
    its content, which equal parts of other items have, too. Names are digests of everything that determines the rows,
    so that rows never have to be compared with their part.
    """

    @property
    def num_bytes(self) -> int:
        """Size of what it keeps."""

    @property
    def max_bytes(self) -> int: ...

    @property
    def tiers(self) -> list[CacheTier]:
        """Statistics of each of the stores that it consists of."""

    def lookup(self, names: Sequence[str]) -> "Future[Found]":
        """Return the rows of each name. They must not be changed. The future doesn't fail: what can't be read isn't
        there."""

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None:
        """Keep rows under these names, once, as long as there is room for them; they must not be changed."""

    def evict(self, names: Sequence[str]) -> None:
        """Forget what has one of these names."""


@dataclass(eq=False)
class _StoredRows:
    rows: EmbeddingRows
    names: set[str] = field(default_factory=set)


class MemoryStore:
    """``EmbeddingStore`` in this process's memory, with LRU eviction. Answers at once."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_hits = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[_StoredRows, None] = OrderedDict()
        """Least recently used first, as are the names."""
        self._names: OrderedDict[str, _StoredRows] = OrderedDict()

    @property
    def tiers(self) -> list[CacheTier]:
        return [CacheTier("memory", self._num_hits, self.num_bytes, self.max_bytes)]

    def lookup(self, names: Sequence[str]) -> "Future[Found]":
        with self._lock:
            found = [self._use(name) for name in names]
            self._num_hits += num_found(found)
        return answered(found)

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None:
        with self._lock:
            entry = next((self._names[name] for name in names if name in self._names), None)
            if entry is None:
                if rows.nbytes > self.max_bytes:
                    return
                entry = _StoredRows(rows)
                self._entries[entry] = None
                self.num_bytes += rows.nbytes
            for name in names:
                if self._names.setdefault(name, entry) is entry:
                    entry.names.add(name)
                self._use(name)
            while self.num_bytes > self.max_bytes:
                self._forget(next(iter(self._entries)))
            while len(self._names) > MAX_NAMES:
                self._drop(next(iter(self._names)))

    def evict(self, names: Sequence[str]) -> None:
        with self._lock:
            for entry in [self._names[name] for name in names if name in self._names]:
                self._forget(entry)

    def _use(self, name: str) -> EmbeddingRows | None:
        if (entry := self._names.get(name)) is None:
            return None
        self._names.move_to_end(name)
        self._entries.move_to_end(entry)
        return entry.rows

    def _forget(self, entry: _StoredRows) -> None:
        for name in list(entry.names):
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Remove a name, and its rows if they have no other."""
        entry = self._names.pop(name)
        entry.names.discard(name)
        if not entry.names:
            del self._entries[entry]
            self.num_bytes -= entry.rows.nbytes


class TieredStore:
    """Several stores, tried in order. What a later one has is put into those before it. Sizes are the first one's."""

    def __init__(self, stores: Sequence[EmbeddingStore]) -> None:
        self.stores = stores

    @property
    def num_bytes(self) -> int:
        return self.stores[0].num_bytes

    @property
    def max_bytes(self) -> int:
        return self.stores[0].max_bytes

    @property
    def tiers(self) -> list[CacheTier]:
        return [one for tier in self.stores for one in tier.tiers]

    def lookup(self, names: Sequence[str]) -> "Future[Found]":
        result: Future[Found] = Future()
        self._ask(0, names, {}, result)
        return result

    def _ask(self, tier: int, names: Sequence[str], found: dict[str, EmbeddingRows], result: "Future[Found]") -> None:
        """Look up what isn't found yet, from a tier on."""
        missing = [name for name in dict.fromkeys(names) if name not in found]
        if not missing or tier == len(self.stores):
            result.set_result([found.get(name) for name in names])
            return

        def take(future: "Future[Found]") -> None:
            for name, rows in zip(missing, self._result(future, len(missing)), strict=True):
                if rows is not None:
                    found[name] = rows
                    put_in(self.stores[:tier], [name], rows)
            self._ask(tier + 1, names, found, result)

        self.stores[tier].lookup(missing).add_done_callback(take)

    @staticmethod
    def _result(future: "Future[Found]", number: int) -> Found:
        if (error := future.exception()) is None:
            return future.result()
        log.error("a tier of the encoder cache has failed", exc_info=error)
        return [None] * number

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None:
        put_in(self.stores, names, rows)

    def evict(self, names: Sequence[str]) -> None:
        for tier in self.stores:
            tier.evict(names)


def put_in(stores: Iterable[EmbeddingStore], names: Sequence[str], rows: EmbeddingRows) -> None:
    """Keep rows in each of several stores."""
    for store in stores:
        store.put(names, rows)


def num_found(found: Found) -> int:
    """Return how many of the names that were looked up are there."""
    return sum(rows is not None for rows in found)


def answered(found: Found) -> "Future[Found]":
    """Return a future that is done."""
    future: Future[Found] = Future()
    future.set_result(found)
    return future
