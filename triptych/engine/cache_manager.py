"""The pages that requests hold, in each group of layers (``layers/cache_spec.py``).

Each group has a pool of pages, and each request a page table in each group. In a group with a sliding window, pages
that no later token reads are released while the request goes on. They stay in the prefix cache until they are evicted.
"""

from collections.abc import Iterable, Sequence
from math import lcm

from triptych.engine.kv_cache import PagePool
from triptych.engine.page_tables import PageTable, PageTables
from triptych.engine.state_slots import StateSlots
from triptych.layers.cache_spec import KEY_BLOCK, ChunkWindow, Window, first_read, first_sent


def first_kept(window: Window | None, position: int, page_size: int) -> int:
    """Return the number of the first page that is kept for tokens from ``position`` on.

    It has what tokens from the page boundary before ``position`` on read, so that a prefix can end at that boundary,
    and it begins at a multiple of ``KEY_BLOCK``; with chunks, at the beginning of one, so that kernels find the
    others.
    """
    step = _table_step(window, page_size)
    return first_read(window, position // page_size * page_size) // step * (step // page_size)


def most_pages(window: Window, page_size: int, step_tokens: int) -> int:
    """Return the largest number of pages that a request holds at a time in a group with this window, if a step computes
    at most ``step_tokens`` of its tokens."""
    within = 0 if isinstance(window, ChunkWindow) else window  # a table's step has whole chunks
    return -(-(within + _table_step(window, page_size) + page_size + step_tokens) // page_size)


def _table_step(window: Window | None, page_size: int) -> int:
    """Return the number of tokens of which page tables begin at multiples."""
    return lcm(page_size, KEY_BLOCK, window.length if isinstance(window, ChunkWindow) else 1)


class CacheManager:
    """Allocates pages in all groups, and finds prefixes that are cached in all of them."""

    def __init__(
        self, pools: Sequence[PagePool], windows: Sequence[Window | None] = (None,), states: StateSlots | None = None
    ) -> None:
        """``pools`` and ``windows`` are those of the groups. All pools have the same page size. ``states`` are for
        models with state; each request then has further tables, in the pools of these."""
        self.pools = pools if states is None else [*pools, *states.pools]
        self.windows = windows
        self.states = states
        self.page_size = pools[0].page_size
        self._has_windows = any(window is not None for window in windows)

    def new_tables(self) -> PageTables:
        return [PageTable() for _ in self.pools]

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold that many tokens."""
        return -(-tokens // self.page_size)

    def missing(self, tables: PageTables, tokens: int, at_once: int = 0) -> list[int]:
        """Return how many pages a request lacks in each group to hold ``tokens`` tokens. Groups without a window count
        those of ``at_once`` tokens, if these are more."""
        return [
            self.pages_for(max(tokens, at_once) if window is None else tokens) - table.end
            for window, table in zip(self.windows, tables, strict=False)
        ] + ([] if self.states is None else self.states.missing(tables))

    def missing_at_most(self, tables: PageTables, tokens: int, step_tokens: int) -> list[int]:
        """Return how many pages a request may lack in each group until ``tokens`` tokens are computed, in steps of at
        most ``step_tokens``."""
        most = zip(self._most(tokens, step_tokens), tables, strict=False)
        states = [] if self.states is None else self.states.missing(tables)
        return [pages - len(table.pages) for pages, table in most] + states

    def can_send(self, lengths: Iterable[int], step_tokens: int) -> bool:
        """Whether requests of these lengths can be computed side by side and send their pages, which can't be
        preempted, while former ones are still being sent. Groups without a window aren't counted: there, such a request
        gets all of its pages at once."""
        wanted = [self._most(length, step_tokens) for length in lengths]
        return all(
            window is None or sum(most) + pool.num_retained <= pool.num_pages
            for window, pool, most in zip(self.windows, self.pools, zip(*wanted, strict=True), strict=False)
        )

    def fits(self, missing: Sequence[int], releasing: Sequence[PageTables] = ()) -> bool:
        """Whether ``missing`` pages are free in each group, or would be if requests released all they hold."""
        return all(
            count <= pool.num_free
            or (releasing and count <= pool.num_free + pool.num_freed_by(tables[group].pages for tables in releasing))
            for group, (pool, count) in enumerate(zip(self.pools, missing, strict=True))
        )

    def allocate(self, tables: PageTables, missing: Sequence[int]) -> None:
        """Append ``missing`` pages to each table. Raises BlockError when fewer are free."""
        for pool, table, count in zip(self.pools, tables, missing, strict=True):
            if count > 0:
                table.pages += pool.allocate(count)

    def trim(self, tables: PageTables, position: int) -> None:
        """Release the pages that no token from ``position`` on needs."""
        if not self._has_windows:
            return
        for pool, window, table in zip(self.pools, self.windows, tables, strict=False):
            if window is not None and (first := first_kept(window, position, self.page_size)) > table.first:
                pool.release(table.between(table.first, min(first, table.end)))
                table.pages = table.between(first, table.end)
                table.first = first

    def release(self, tables: PageTables) -> None:
        """Release all pages, and empty the tables."""
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release(table.pages)
        tables[:] = self.new_tables()

    def retain(self, kept: PageTables, tables: PageTables, tokens: int) -> None:
        """Extend ``kept``, and retain its new pages, with those of ``tables`` that hold the first ``tokens`` tokens."""
        for pool, mine, table in zip(self.pools, kept, tables, strict=True):
            new = table.between(mine.end, min(self.pages_for(tokens), table.end))
            pool.retain(new)
            mine.pages += new

    def release_retained(self, kept: PageTables) -> None:
        """Release the pages of ``retain``."""
        for pool, table in zip(self.pools, kept, strict=True):
            pool.release_retained(table.pages)

    def note_received(self, tables: PageTables, num_computed: int, num_tokens: int) -> None:
        """Record that tokens ``[num_computed, num_tokens)`` were received, in groups with a window only those that are
        read from now on."""
        for window, table in zip(self.windows, tables, strict=False):
            if (first := first_sent(window, num_computed, num_tokens)) > num_computed:
                table.first_whole = self.pages_for(first)

    # ── prefixes ─────────────────────────────────────────────────────────────────────────────────────────────

    def lookup(self, page_hashes: Sequence[bytes], *, with_state: bool = True) -> tuple[PageTables, int]:
        """Return the tables of the longest cached prefix of pages with these hashes, and its number of pages. A
        reference is added to each.

        Groups without a window must have all pages of the prefix, others those that tokens after it read. A model with
        state needs a snapshot at its end, unless the state comes from elsewhere (not ``with_state``).
        """
        length = len(page_hashes)
        for pool, window in zip(self.pools, self.windows, strict=False):
            if window is None:
                length = pool.count_cached(page_hashes[:length])
        states = self.states if with_state else None
        length = self._longest_in_windows(page_hashes[:length])
        while states is not None and length and page_hashes[length - 1] not in states.snapshots:
            length = self._longest_in_windows(page_hashes[: states.longest(page_hashes[:length])])
        tables = self.new_tables()
        if states is not None and length:
            states.hold(tables, page_hashes[length - 1])
        for pool, window, table in zip(self.pools, self.windows, tables, strict=False):
            table.first = first_kept(window, length * self.page_size, self.page_size)
            table.pages = pool.lookup(page_hashes[table.first : length])
        return tables, length

    def _longest_in_windows(self, page_hashes: Sequence[bytes]) -> int:
        """Return the length of the longest prefix that groups with a window have cached, as far as it is needed."""
        groups = zip(self.pools, self.windows, strict=False)
        windowed = [(pool, window) for pool, window in groups if window is not None]
        if not windowed:
            return len(page_hashes)
        longest, begins = 0, [0] * len(windowed)  # by group, where the cached pages before this one begin
        for number, page_hash in enumerate(page_hashes, start=1):
            begins = [begin if page_hash in pool else number for begin, (pool, _) in zip(begins, windowed, strict=True)]
            needed = [first_kept(window, number * self.page_size, self.page_size) for _, window in windowed]
            if all(begin <= first for begin, first in zip(begins, needed, strict=True)):
                longest = number
        return longest

    def cache(self, tables: PageTables, page_hashes: Sequence[bytes], first: int, end: int) -> None:
        """Add the pages with the numbers ``[first, end)``, as far as they are held and whole, to the prefix cache."""
        for pool, _, table in zip(self.pools, self.windows, tables, strict=False):
            for number in range(max(first, table.first, table.first_whole), min(end, table.end)):
                pool.cache(table.pages[number - table.first], page_hashes[number])

    # ── usage ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self.page_pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.page_pools)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.page_pools)

    @property
    def page_pools(self) -> Sequence[PagePool]:
        return self.pools[: len(self.windows)]

    def check_all_free(self) -> None:
        """Raise BlockError with the number of leaked pages, if any."""
        for pool in self.pools:
            pool.check_all_free()

    def _most(self, tokens: int, step_tokens: int) -> list[int]:
        """Return the largest number of pages that a request of ``tokens`` tokens holds at a time in each group."""
        pages = self.pages_for(tokens)
        return [
            pages if window is None else min(pages, most_pages(window, self.page_size, step_tokens))
            for window in self.windows
        ]
