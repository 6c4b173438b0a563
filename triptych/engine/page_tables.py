"""The pages that one request holds."""

from dataclasses import dataclass, field

from triptych.errors import BlockError


@dataclass
class PageTable:
    """Consecutive pages of a request in one group of layers."""

    first: int = 0
    """Number of the first one among all pages of the request's tokens: earlier ones have been released."""
    pages: list[int] = field(default_factory=list)
    first_whole: int = 0
    """Number of the first page all of whose slots have been, or will be, written."""

    @property
    def end(self) -> int:
        """Number of the page after the last one."""
        return self.first + len(self.pages)

    def between(self, first: int, end: int) -> list[int]:
        """Return the pages with the numbers ``[first, end)``. Raises BlockError if one isn't held."""
        if first >= end:
            return []
        if first < self.first or end > self.end:
            raise BlockError(f"pages {first}..{end} are wanted, {self.first}..{self.end} are held")
        return self.pages[first - self.first : end - self.first]

    def copy(self) -> "PageTable":
        return PageTable(self.first, list(self.pages), self.first_whole)


PageTables = list[PageTable]
"""A request's page table in each group. In a model with state, tables of its slot and snapshots follow
(``engine/state_slots.py``)."""
