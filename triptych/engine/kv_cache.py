"""Page accounting of the KV cache. The tensors belong to the runner.

A full page can be cached under a hash of everything its keys and values depend on (``engine/prefix.py``). After its
last reference is released it stays in the cache, and is evicted when the pool needs pages, least recently released
first.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from triptych.errors import BlockError


class PagePool:
    """Reference-counted KV pages. Lowest page numbers are allocated first, so that a request's pages tend to be
    consecutive."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))  # a heap
        self._ref_counts: dict[int, int] = {}
        self._page_by_hash: dict[bytes, int] = {}
        self._hash_by_page: dict[int, bytes] = {}
        self._lru: dict[int, None] = {}
        """Cached pages without references, in the order of eviction."""
        self.num_retained = 0
        """References that ``retain`` has added."""

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: empty ones, and cached ones without references."""
        return len(self._free) + len(self._lru)

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return len(self._ref_counts)

    @property
    def num_cached(self) -> int:
        """Cached pages without references."""
        return len(self._lru)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages, with one reference each; evicts cached pages if necessary. Raises BlockError when
        fewer are free."""
        if count > self.num_free:
            raise BlockError(f"{count} pages wanted, {self.num_free} of {self.num_pages} are free")
        pages = sorted(heapq.heappop(self._free) if self._free else self._evict() for _ in range(count))
        self._ref_counts.update(dict.fromkeys(pages, 1))
        return pages

    def __contains__(self, page_hash: bytes) -> bool:
        """Whether a page is cached under this hash."""
        return page_hash in self._page_by_hash

    def count_cached(self, page_hashes: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of ``page_hashes`` that is cached."""
        return next((count for count, one in enumerate(page_hashes) if one not in self), len(page_hashes))

    def lookup(self, page_hashes: Sequence[bytes]) -> list[int]:
        """Return the cached pages of the longest prefix of ``page_hashes``, with a reference added to each."""
        pages = []
        for page_hash in page_hashes:
            if (page := self._page_by_hash.get(page_hash)) is None:
                break
            self._lru.pop(page, None)
            self._ref_counts[page] = self._ref_counts.get(page, 0) + 1
            pages.append(page)
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add a reference to each page, for a transfer that sends it. Raises BlockError for a page without one."""
        for page in pages:
            if page not in self._ref_counts:
                raise BlockError(f"page {page} is not allocated")
            self._ref_counts[page] += 1
            self.num_retained += 1

    def release_retained(self, pages: Sequence[int]) -> None:
        """Drop a reference of ``retain`` to each page. Raises BlockError for a page without one."""
        self.release(pages)
        self.num_retained -= len(pages)

    def cache(self, page: int, page_hash: bytes) -> None:
        """Make a full page available to ``lookup``; it must not be written again. If the hash is cached already, the
        earlier page stays. Raises BlockError for a page without references."""
        if page not in self._ref_counts:
            raise BlockError(f"page {page} is not allocated")
        if page_hash not in self._page_by_hash and page not in self._hash_by_page:
            self._page_by_hash[page_hash] = page
            self._hash_by_page[page] = page_hash

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. Raises BlockError for a page without one."""
        for page in reversed(pages):  # evict the end of a prefix first: its beginning is of use without it
            if page not in self._ref_counts:
                raise BlockError(f"page {page} is not allocated")
            self._ref_counts[page] -= 1
            if self._ref_counts[page]:
                continue
            del self._ref_counts[page]
            if page in self._hash_by_page:
                self._lru[page] = None
            else:
                heapq.heappush(self._free, page)

    def num_freed_by(self, holdings: Iterable[Sequence[int]]) -> int:
        """Return how many pages would lose their last reference if each of ``holdings`` were released."""
        counts = Counter(page for pages in holdings for page in pages)
        return sum(self._ref_counts[page] == count for page, count in counts.items())

    def check_all_free(self) -> None:
        """Raise BlockError with the number of leaked pages, if any."""
        if self._ref_counts:
            raise BlockError(f"{len(self._ref_counts)} of {self.num_pages} pages were never released")

    def _evict(self) -> int:
        page = next(iter(self._lru))
        del self._lru[page]
        del self._page_by_hash[self._hash_by_page.pop(page)]
        return page
