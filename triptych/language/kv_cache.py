"""The accounting of KV pages. The tensors belong to the runner."""

from collections.abc import Iterable

from triptych.errors import BlockError


class PagePool:
    """Hands out pages one by one, lowest first, so that a sequence's pages tend to be consecutive."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """``count`` pages. Raises BlockError when fewer are free."""
        if count > len(self._free):
            raise BlockError(f"{count} pages wanted, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._taken.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises BlockError for one that isn't taken."""
        for page in pages:
            if page not in self._taken:
                raise BlockError(f"page {page} is not taken")
            self._taken.remove(page)
            self._free.append(page)
        self._free.sort(reverse=True)

    def check_all_free(self) -> None:
        """Raises BlockError naming how many pages leaked, if any did."""
        if self._taken:
            raise BlockError(f"{len(self._taken)} of {self.num_pages} pages were never given back")
