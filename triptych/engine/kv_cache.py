"""The accounting of KV pages. The tensors belong to the runner.

A page that has been filled can be published under a key that names everything its keys and values depend on
(``language/prefix.py``). It stays findable after its last holder has let go, until the room is needed: then the page
that was let go first is taken.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from triptych.errors import BlockError


class PagePool:
    """Hands out pages one by one, lowest first, so that a request's pages tend to be consecutive. A page may have
    several holders, each of which took it or found it by its key."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))  # a heap
        self._holders: dict[int, int] = {}
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # published and held by nobody, the longest idle first

    @property
    def num_free(self) -> int:
        """Pages that can be taken: those that hold nothing, and those that are only kept for their key."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """Pages that are only kept for their key."""
        return len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """``count`` pages. Raises BlockError when fewer are free."""
        if count > self.num_free:
            raise BlockError(f"{count} pages wanted, {self.num_free} of {self.num_pages} are free")
        pages = sorted(heapq.heappop(self._free) if self._free else self._evict() for _ in range(count))
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The published pages of the first keys, as far as they are there without a gap; the caller now holds them."""
        pages = []
        for key in keys:
            if (page := self._pages.get(key)) is None:
                break
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Takes pages once more that are taken already. Raises BlockError for one that isn't."""
        for page in pages:
            if page not in self._holders:
                raise BlockError(f"page {page} is not taken")
            self._holders[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """A held page is full and won't be written to again: others may find it. The first page of a key stays the one
        that is found. Raises BlockError for a page that nobody holds."""
        if page not in self._holders:
            raise BlockError(f"page {page} is not taken")
        if key not in self._pages and page not in self._keys:
            self._pages[key] = page
            self._keys[page] = key

    def free(self, pages: Sequence[int]) -> None:
        """One holder lets go of each. Raises BlockError for one that isn't taken."""
        for page in reversed(pages):  # a prefix is of use without its continuation, but not the other way round
            if page not in self._holders:
                raise BlockError(f"page {page} is not taken")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._keys:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)

    def freed_with(self, holdings: Iterable[Sequence[int]]) -> int:
        """How many pages nobody would hold any more if the holders of these let go of them."""
        times = Counter(page for pages in holdings for page in pages)
        return sum(self._holders[page] == count for page, count in times.items())

    def check_all_free(self) -> None:
        """Raises BlockError naming how many pages leaked, if any did."""
        if self._holders:
            raise BlockError(f"{len(self._holders)} of {self.num_pages} pages were never given back")

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        del self._pages[self._keys.pop(page)]
        return page
